"""The nets: sizes, switches, refusals. test_inherited.py trains them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import composed
from small_data import fast_cnn, resnet9, small_cnn, small_resnet18, task
from torch import nn

import project.models
from lockstep.config.check import check
from lockstep.data.build import open_data
from lockstep.job.build import make_module
from lockstep.vision.models import ImageClassifier, SmallResNet18, Torchvision, published


@pytest.mark.parametrize(("channels", "image_size", "num_classes"), [(1, 28, 10), (3, 32, 100), (1, 19, 2), (4, 35, 3)])
@pytest.mark.parametrize("build", [small_cnn, partial(fast_cnn, width=[2, 3, 4, 5])])
def test_a_net_derives_its_sizes(build: Any, channels: int, image_size: int, num_classes: int) -> None:
    model = build(channels=channels, image_size=image_size, num_classes=num_classes)
    assert model(model.example_input_array).shape == (2, num_classes)
    tail = torch.randn(1, channels, image_size, image_size)
    assert model.train()(tail).shape == (1, num_classes), "a tail of one sample must train too"


@pytest.mark.parametrize(
    ("build", "options", "kernel", "pools"),
    [
        (project.models.ResNet18, {"image_size": 32}, 3, False),
        (project.models.ResNet18, {"image_size": 65, "channels": 3}, 7, True),
        (SmallResNet18, {"image_size": 65, "channels": 3}, 3, False),
        (SmallResNet18, {"image_size": 8, "norm": "group"}, 3, False),
    ],
)
def test_resnet18_takes_any_image(build: Any, options: dict[str, Any], kernel: int, pools: bool) -> None:
    model = build(**task(**options))
    assert model.net.conv1.kernel_size == (kernel, kernel)
    assert isinstance(model.net.maxpool, nn.MaxPool2d) == pools
    shape = model.example_input_array.shape[1:]
    assert model.train()(torch.randn(1, *shape)).shape == (1, 3), "a tail of one sample must train too"


def test_dropout_is_off_unless_requested() -> None:
    x = torch.randn(4, 1, 12, 12)
    state = torch.get_rng_state()
    off = small_cnn()
    torch.set_rng_state(state)
    on = small_cnn(dropout=0.5)
    before = torch.get_rng_state()
    assert torch.equal(off(x), off(x))
    assert torch.equal(torch.get_rng_state(), before), "without dropout nothing may draw random numbers"
    assert not torch.equal(on(x), on(x))
    assert torch.equal(on.eval()(x), off(x)), "same weights, same parameter names"


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (small_cnn, {"image_size": 9}, "at least 10 x 10"),
        (lambda **options: project.models.MnistCNN(**task(**options)), {"image_size": 9}, "at least 10 x 10"),
        (small_cnn, {"dropout": 1.0}, "^dropout=1.0: "),
        (small_cnn, {"label_smoothing": -0.1}, "^label_smoothing=-0.1: "),
        (small_cnn, {"num_classes": 1}, "num_classes=1: .*must be at least 2"),
        (fast_cnn, {"image_size": 18}, "at least 19 x 19"),
        (fast_cnn, {"width": [8, 8, 8]}, r"^width=\[8, 8, 8\]: must be four"),
        (resnet9, {"image_size": 7}, "at least 8 x 8"),
        (resnet9, {"width": [8, 8]}, r"^width=\[8, 8\]: must be four"),
        (fast_cnn, {"width": 32}, "^width=32: must be four"),
        (fast_cnn, {"width": [8, 8, 8, 0]}, "at least 1"),
        (small_resnet18, {"norm": "layer"}, "batch, group"),
        (small_resnet18, {"image_size": 8}, "at least 9 x 9"),
    ],
)
def test_what_does_not_fit_is_refused(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("whole_run")
def test_pretrained_weights_are_used_or_their_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    place = tmp_path / "checkpoints" / Path(torchvision.models.ResNet18_Weights.DEFAULT.url).name
    place.parent.mkdir()
    place.write_bytes(b"half a file")
    resnet18 = partial(Torchvision, arch="resnet18", channels=3, image_size=40, num_classes=3)
    with pytest.raises(ValueError, match="pretrained=true") as caught:
        resnet18(pretrained=True)
    assert str(place) in str(caught.value)
    assert "\n" not in str(caught.value)

    weights = {key: torch.full_like(value, 2) for key, value in torchvision.models.resnet18().state_dict().items()}
    torch.save(weights, place)
    net: Any = resnet18(pretrained=True).net
    assert (net.layer1[0].conv1.weight == 2).all()
    assert net.fc.weight.shape == (3, 512)
    assert not (net.fc.weight == 2).any(), "the last layer has none for these classes"


@pytest.mark.usefixtures("whole_run")
def test_pretrained_weights_are_not_requested_where_a_checkpoint_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    calls = []

    def downloaded(weights: Any) -> dict[str, Any]:
        calls.append("downloaded")
        return {}

    monkeypatch.setattr(published, "downloaded", downloaded)
    data = ("data=synthetic", "data.samples=20", "data.channels=3", "data.image_size=40")
    config = check(composed(*data, "model=torchvision", "model.arch=resnet18", "model.pretrained=true"))
    splits = open_data(config.data, config.data_dir)
    for brings in (replace(config, checkpoint="best.ckpt"), replace(config, resume="last.ckpt")):
        make_module(brings, splits)
        assert calls == []
    make_module(config, splits)  # the control
    monkeypatch.setattr(Torchvision, "strict_loading", False)
    make_module(replace(config, resume="last.ckpt"), splits)  # whose checkpoint may lack weights
    assert calls == ["downloaded"] * 2


class SameOptionName(ImageClassifier):
    """A module with an option of the same name as one that loads weights elsewhere."""

    def __init__(self, *, image_size: int, num_classes: int, weights: str | None = None, **options: Any) -> None:
        net = nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
        super().__init__(net, image_size=image_size, num_classes=num_classes, **options)
        self.weights = weights


def test_an_option_keeps_its_value_where_a_checkpoint_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a module knows which of its options load weights."""
    config = check(composed("data=synthetic", "data.samples=20"))
    splits = open_data(config.data, config.data_dir)
    model = {"_target_": f"{__name__}.SameOptionName", "name": "own", "weights": "balanced"}
    config = replace(config, model=model, resume="last.ckpt")
    module: Any = make_module(config, splits)
    assert module.weights == "balanced"
    monkeypatch.setattr(SameOptionName, "without_pretrained", {"weights": None}, raising=False)
    module = make_module(config, splits)
    assert module.weights is None
