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


class Sigmoid(Logits):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).sigmoid()


class Labels(Logits):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).argmax(1)


class Probabilities(Logits):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).softmax(1)


class Warm(Logits):
    """Its probabilities are no known activation of its logits."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        images, _ = batch
        return ((self(images) + self(images.flip(3))) / 3).softmax(1).double()


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
    (Logits(), "classification", ("output",), "none"),
    (Logits(1), "classification", ("output",), "none"),
    (Logits(3), "regression", ("values",), "none"),
    (Softmax(), "classification", ("probabilities",), "softmax"),
    (Softmax(), "multi_label", ("probabilities",), "softmax"),
    (Sigmoid(), "multi_label", ("probabilities",), "sigmoid"),
    (Sigmoid(), "classification", ("probabilities",), "sigmoid"),
    (Labels(), "classification", ("probabilities",), "softmax"),
    (Probabilities(), "classification", ("probabilities",), "none"),
    (Warm(), "classification", ("probabilities",), "none"),
    (Masks(), "segmentation", ("probabilities",), "softmax"),
    (Image(), "classification", ("output",), "none"),
    (Image(3), "classification", ("output",), "none"),
    (Several("tuple"), "classification", ("output_0", "output_1"), "none"),
    (Several("named"), "classification", ("mean", "spread"), "none"),
    (Several("dict"), "classification", ("mean", "inner.output_0"), "none"),
]
IDS = [f"{type(module).__name__}-{task}-{'-'.join(names)}" for module, task, names, _ in CASES]


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize(("module", "task", "names", "activation"), CASES, ids=IDS)
def test_a_file_computes_what_predict_writes(
    module: Any, task: str, names: tuple[str, ...], activation: str, tmp_path: Path
) -> None:
    spec = Spec(1, 4, ("a", "b", "c"), mean=(0.5,), std=(0.25,), task=task)
    output = export.output_of(module.eval(), spec, NORMALISED)
    assert (output.names, output.activation) == (names, activation)
    model = export.Deployed(output, spec).eval()
    description = export.described(spec, output, IMAGES)
    exported = export.write_torch(model, IMAGES[:2], tmp_path / "model.pt2", description)
    predicted = export.prediction_step(module)((NORMALISED, torch.arange(len(IMAGES))), 0)
    actual = exported(IMAGES)
    if activation == "softmax" and not predicted.is_floating_point():
        assert torch.equal(actual.argmax(1), predicted)
        torch.testing.assert_close(actual, module(NORMALISED).softmax(1))
    else:
        wanted = list(export.named_tensors(predicted).values())
        torch.testing.assert_close(list(actual) if len(wanted) > 1 else [actual], [each.float() for each in wanted])
    with torch.no_grad():
        expected = export.expected_of(module, output)
        assert export.largest_difference(expected, exported, IMAGES, NORMALISED) <= export.TOLERANCE
        wrong = lambda images: exported(images.flip(2))  # noqa: E731  of other images
        assert export.largest_difference(expected, wrong, IMAGES, NORMALISED) > export.TOLERANCE


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Random(), "Random.forward draws random numbers in evaluation, so an exported file can't be compared with it"),
        (Text(), "Text.forward returned a str: must be a tensor, or a tuple or dict of tensors"),
        (pl.LightningModule(), "LightningModule has neither forward nor predict_step: define forward"),
    ],
)
def test_what_can_not_be_exported_is_refused(module: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        export.output_of(module.eval(), SPEC, NORMALISED)


@pytest.mark.usefixtures("whole_run")
def test_a_file_describes_itself(tmp_path: Path) -> None:
    """As docs/use/predict-and-export.md reads it."""
    spec = Spec(3, 4, ("cat", "größer"), mean=(0.5,), std=(0.1, 0.2, 0.3))
    output = export.Output(Logits(), "softmax", ("probabilities",))
    description = export.described(spec, output, torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    model = export.Deployed(export.Output(network, "softmax", ("probabilities",)), spec).eval()
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
        "outputs": ["probabilities"],
        "activation": "softmax",
    }
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    export.write_onnx(model, images, tmp_path / "model.onnx", description)
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    texts = session.get_modelmeta().custom_metadata_map
    assert {
        key: texts[key] if key in ("task", "dtype", "activation") else json.loads(texts[key]) for key in texts
    } == actual
    names = [[each.name for each in part] for part in (session.get_inputs(), session.get_outputs())]
    assert names == [["images"], ["probabilities"]]
    for count in (1, 3):
        raw = torch.randint(256, (count, 3, 4, 4), dtype=torch.uint8)
        (actual,) = session.run(None, {"images": raw.numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), model(raw))


def test_a_wrong_file_is_seen() -> None:
    module = Softmax().eval()
    with torch.no_grad():
        expected = export.expected_of(module, export.output_of(module, SPEC, NORMALISED))
        model = export.Deployed(export.output_of(module, SPEC, NORMALISED), SPEC).eval()
        assert export.largest_difference(expected, model, IMAGES, NORMALISED) <= export.TOLERANCE
        for wrong in (
            lambda images: model(images) + 1e-3,
            lambda images: model(images.flip(0)),
            lambda images: model(images)[:1],
            lambda images: model(images) * float("nan"),
        ):
            assert not export.largest_difference(expected, wrong, IMAGES, NORMALISED) <= export.TOLERANCE
