"""Nets of torchvision and timm by their names: sizes, weights, refusals. test_inherited.py trains them."""

from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from conftest import composed
from small_data import task

from lockstep.errors import UserError
from lockstep.vision.models import Timm, Torchvision
from lockstep.vision.models.published import segmentation_net

pytestmark = pytest.mark.usefixtures("whole_run")


def torchvision(**changes: Any) -> Any:
    return Torchvision(**task(**{"arch": "mobilenet_v3_small", "image_size": 33, **changes}))


def timm(**changes: Any) -> Any:
    pytest.importorskip("timm")
    return Timm(**task(**{"arch": "test_efficientnet", "image_size": 33, **changes}))


@pytest.mark.parametrize(
    ("make", "arch", "channels", "image_size"),
    [
        (torchvision, "mobilenet_v3_small", 1, 33),
        (torchvision, "squeezenet1_1", 5, 40),
        (torchvision, "googlenet", 1, 64),
        (timm, "test_efficientnet", 2, 28),
        (timm, "test_vit", 1, 32),
    ],
)
def test_any_net_takes_its_channels_size_and_classes(make: Any, arch: str, channels: int, image_size: int) -> None:
    torch.manual_seed(0)
    model = make(arch=arch, channels=channels, image_size=image_size, num_classes=7)
    drawn = torch.rand(1)
    for mode in (True, False):
        assert model.train(mode)(torch.randn(2, channels, image_size, image_size)).shape == (2, 7)
    torch.manual_seed(0)
    again = make(arch=arch, channels=channels, image_size=image_size, num_classes=7)
    assert torch.equal(torch.rand(1), drawn)
    for name, buffer in again.named_buffers():  # its trial has left no trace
        assert "running_mean" not in name or not buffer.any()
        assert "num_batches_tracked" not in name or buffer == 0


@pytest.mark.parametrize("make", [torchvision, timm])
def test_weights_of_colour_images_serve_others(make: Any, tmp_path: Path) -> None:
    published = make(channels=3, num_classes=5).net.state_dict()
    first = next(name for name, value in published.items() if value.ndim == 4)
    torch.save(published, tmp_path / "colour.pth")
    one, five = (make(channels=channels, weights=str(tmp_path / "colour.pth")).net for channels in (1, 5))
    pretrained = {name for name, value in one.state_dict().items() if torch.equal(value, published[name])}
    assert {"classifier" in name for name in published.keys() - pretrained - {first}} == {True}, "what fits is taken"
    grey = torch.rand(1, 1, 9, 9)
    seen = torch.nn.functional.conv2d(grey.expand(1, 3, 9, 9), published[first])
    assert torch.allclose(torch.nn.functional.conv2d(grey, one.get_parameter(first)), seen, atol=1e-5)
    wide = torch.nn.functional.conv2d(torch.ones(1, 5, 9, 9), five.get_parameter(first))
    assert wide.std() > 0


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (torchvision, {"arch": "mobilnet_v3"}, "^arch=mobilnet_v3: torchvision has no such .*mobilenet_v3_small"),
        (torchvision, {"arch": "alexnet"}, "^arch=alexnet: does not take 1 x 33 x 33 images: .*too small"),
        (torchvision, {"arch": "vit_b_16"}, "^arch=vit_b_16: does not take .*patch size"),
        (torchvision, {"smallest_piece": 1, "image_size": 28}, "a piece of one sample: .* another batch_size"),
        (
            torchvision,
            {"arch": "googlenet", "image_size": 64, "options": {"aux_logits": True}},
            "^arch=googlenet: returns GoogLeNetOutputs for each image in training",
        ),
        (torchvision, {"pretrained": True, "weights": "some.pth"}, "^pretrained=True: must be .*false with weights"),
        (torchvision, {"pretrained": "yes"}, "^pretrained=yes: must be true or false"),
        (timm, {"arch": "resnet10"}, "^arch=resnet10: timm has no such net: did you mean resnet10t"),
        (timm, {"arch": "hf-hub:somebody/net"}, "^arch=hf-hub:somebody/net: timm has no such net"),
        (timm, {"arch": "resnet18.mine"}, "^arch=resnet18.mine: resnet18 has no weights mine: known are a1_in1k"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make(**options)
    assert "\n" not in str(caught.value)
    torchvision(image_size=28)  # the control of the piece of one sample: two


def test_an_unknown_segmentation_net_is_not_called_a_classifier() -> None:
    with pytest.raises(ValueError, match=r"^arch=fcn_resnet5: torchvision has no such net: did you mean fcn_resnet50"):
        segmentation_net("fcn_resnet5", 3, 2)


@pytest.mark.usefixtures("whole_run")
def test_options_go_to_the_architecture_or_are_refused(tmp_path: Path) -> None:
    assert torchvision(options={"dropout": 0.4}).net.classifier[2].p == 0.4
    for arch in ("mobilenet_v3_small", "resnet18"):
        with pytest.raises(TypeError, match="dropuot"):
            torchvision(arch=arch, options={"dropuot": 0.4})
    with pytest.raises(TypeError, match="checkpoint_path"):  # a checkpoint's config is not to name files
        timm(options={"checkpoint_path": str(tmp_path / "any.pth")})


def test_weights_that_cant_be_had_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*args: Any, **options: Any) -> Any:
        raise URLError("no\nnetwork")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", no_network)
    with pytest.raises(ValueError, match=r"^pretrained=true: no usable weights \(.*put torchvision's file at") as one:
        torchvision(pretrained=True, channels=3)
    timm(arch="test_vit", image_size=32)
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", no_network)
    with pytest.raises(ValueError, match=r"^pretrained=true: no usable weights .*use model.weights=<file>") as other:
        timm(pretrained=True, arch="test_vit", image_size=32)
    assert "\n" not in str(one.value) + str(other.value)
    with pytest.raises(UserError, match=r"^model.weights=.*none.pth: no such file"):
        torchvision(weights=str(tmp_path / "none.pth"))


def test_a_named_net_names_the_run() -> None:
    assert composed("model=timm", "model.arch=test_efficientnet")["name"] == "test_efficientnet_digits"
