"""What an exported file computes: what predict.py writes for the module, whatever its data are for."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lockstep.data import Spec
from lockstep.errors import UserError
from lockstep.job.prediction import prediction_step
from lockstep.programs import export

SPEC = Spec(1, 4, ("a", "b", "c"), mean=(0.5,), std=(0.25,))
IMAGES = export.random_images(SPEC)
NORMALISED = (IMAGES.float() / 255 - 0.5) / 0.25


class Logits(pl.LightningModule):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, outputs))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Softmax(Logits):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).double().softmax(1)


class Labels(Logits):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).argmax(1)


class Masks(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1).byte()


class Image(Logits):
    """An autoencoder: it returns images, of as many channels as there are classes or fewer."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__(16 * channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).view(len(x), -1, 4, 4)


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


class Several(Logits):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        mean, spread = self.net(x), self.net(x).exp()
        made = {
            "tuple": (mean, spread),
            "named": Pair(mean, spread),
            "dict": {"mean": mean, "loss": None, "inner": [spread]},
        }
        return made[self.kind]


class Random(Logits):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + torch.rand(len(x), 3)


class Text(Logits):
    def forward(self, x: Tensor) -> Any:
        return self.net(x), "logits"


CASES = [
    (Logits(), ["output"]),
    (Softmax(), ["output"]),
    (Labels(), ["output"]),
    (Masks(), ["output"]),
    (Image(3), ["output"]),
    (Several("tuple"), ["output_0", "output_1"]),
    (Several("named"), ["mean", "spread"]),
    (Several("dict"), ["mean", "inner.output_0"]),
]
IDS = [f"{type(module).__name__}-{'-'.join(names)}" for module, names in CASES]


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize(("module", "names"), CASES, ids=IDS)
def test_a_file_computes_what_predict_writes(module: Any, names: list[str], tmp_path: Path) -> None:
    assert export.names_of(module.eval(), NORMALISED) == names
    description = export.described(SPEC, names)
    exported = export.write_torch(export.Deployed(module, SPEC).eval(), IMAGES[:2], tmp_path / "model.pt2", description)
    predicted = prediction_step(module)((NORMALISED, torch.arange(len(IMAGES))), 0)
    wanted, actual = list(export.named_tensors(predicted, "").values()), exported(IMAGES)
    wanted = [each.float() if each.is_floating_point() else each for each in wanted]
    torch.testing.assert_close(list(actual) if len(wanted) > 1 else [actual], wanted)
    with torch.no_grad():
        assert export.largest_difference(module, exported, IMAGES, NORMALISED) <= export.TOLERANCE
        wrong = lambda images: exported(images.flip(2))  # noqa: E731  of other images
        assert export.largest_difference(module, wrong, IMAGES, NORMALISED) > export.TOLERANCE


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Random(), "Random draws random numbers in evaluation, so an exported file can't be compared with it"),
        (Text(), "Text.forward returned a str: must be a tensor, or a tuple or dict of tensors"),
        (pl.LightningModule(), "LightningModule has neither forward nor predict_step: define forward"),
    ],
)
def test_what_can_not_be_exported_is_refused(module: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        export.names_of(module.eval(), NORMALISED)


@pytest.mark.usefixtures("whole_run")
def test_a_file_describes_itself(tmp_path: Path) -> None:
    """As docs/use/predict-and-export.md reads it."""
    spec = Spec(3, 4, ("cat", "größer"), mean=(0.5,), std=(0.1, 0.2, 0.3))
    module = Logits()
    module.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    model, description = export.Deployed(module, spec).eval(), export.described(spec, ["output"])
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    export.write_torch(model, images, tmp_path / "model.pt2", description)
    inside = {"model.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=inside)
    actual = json.loads(inside["model.json"])
    assert actual == {
        "task": "classification",
        "classes": ["cat", "größer"],
        "input": ["n", 3, 4, 4],
        "dtype": "uint8",
        "channels": 3,
        "image_size": 4,
        "value_range": [0, 255],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.1, 0.2, 0.3],
        "outputs": ["output"],
    }
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    export.write_onnx(model, images, tmp_path / "model.onnx", description)
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    texts = session.get_modelmeta().custom_metadata_map
    assert {key: texts[key] if key in ("task", "dtype") else json.loads(texts[key]) for key in texts} == actual
    names = [[each.name for each in part] for part in (session.get_inputs(), session.get_outputs())]
    assert names == [["images"], ["output"]]
    for count in (1, 3):
        raw = torch.randint(256, (count, 3, 4, 4), dtype=torch.uint8)
        (actual,) = session.run(None, {"images": raw.numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), model(raw))


def test_a_wrong_file_is_seen() -> None:
    module = Softmax().eval()
    with torch.no_grad():
        model = export.Deployed(module, SPEC).eval()
        assert export.largest_difference(module, model, IMAGES, NORMALISED) <= export.TOLERANCE
        for wrong in (
            lambda images: model(images) + 1e-3,
            lambda images: model(images.flip(0)),
            lambda images: model(images)[:1],
            lambda images: model(images) * float("nan"),
        ):
            assert not export.largest_difference(module, wrong, IMAGES, NORMALISED) <= export.TOLERANCE


def test_few_whole_numbers_may_differ() -> None:
    one = torch.zeros(1000, dtype=torch.int64)
    for count, largest in ((0, 0.0), (1, 0.0), (2, float("inf"))):
        other = one.clone()
        other[:count] = 1
        assert export.difference(one, other) == largest
