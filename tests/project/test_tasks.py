"""Tasks other than one class per image: several labels, numbers, masks. Trained, evaluated, predicted, exported."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Program, Run, checkpoint_of, composed
from PIL import Image
from small_data import config, layout, module, one_line, step_batches

from lockstep.config.check import check
from lockstep.data import ArrayDataset, Spec, Splits
from lockstep.data.augment import Augment
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.run.build import make_module
from lockstep.testing import DataTests, ModuleTests

ROWS: dict[str, list[str]] = composed(page="parity")["rows"]
SHORT = ("data.samples=110", "data.image_size=32")
SIZE = 24


class TaskTests(ModuleTests):
    """The tests of a module, and those of its evaluation."""

    def test_dp_has_the_same_bits_and_the_same_evaluation(self, exact: dict[str, Any], tmp_path: Path) -> None:
        other = self.train(tmp_path, "exact=true", "strategy=dp", "devices=3")
        assert other["weights_sha256"] == exact["weights_sha256"]
        metrics = {name: value for name, value in exact["metrics"].items() if name.startswith(("val", "test"))}
        assert len(metrics) >= 4
        assert {name: other["metrics"][name] for name in metrics} == metrics


@pytest.mark.slow
@pytest.mark.proof
class TestMultiLabel(TaskTests):
    overrides = " ".join((*ROWS["multi_label"], *SHORT))


@pytest.mark.slow
@pytest.mark.proof
class TestRegression(TaskTests):
    overrides = " ".join((*ROWS["regression"], *SHORT))


@pytest.mark.slow
@pytest.mark.proof
class TestSegmentation(TaskTests):
    overrides = " ".join((*ROWS["segmentation"], *SHORT))


class TestLabelsData(DataTests):
    overrides = "data=synthetic data.task=multi_label"


class TestValuesData(DataTests):
    overrides = "data=synthetic data.task=regression data.num_classes=1"


class TestMasksData(DataTests):
    overrides = "data=synthetic data.task=segmentation data.num_classes=2"


# --- one run of each task on files, and what is done with its checkpoint ---

TASKS = {
    "multi_label": ("data.labels=[cat,dog]", "model.net._target_=torchvision.models.shufflenet_v2_x0_5"),
    "regression": ("data.values=[age]", "model.center=50", "model.net._target_=torchvision.models.shufflenet_v2_x0_5"),
    "segmentation": ("data.mask=mask", "data.classes=[ground,thing]", "data.unlabelled=255"),
}


def write_list(folder: Path, rows: int = 36) -> Path:
    """Write images, masks and a list that has the columns of every task."""
    rng = np.random.default_rng(3)
    lines = ["path,cat,dog,age,mask,note"]
    for number in range(rows):
        pixels = rng.integers(0, 256, (SIZE, SIZE + 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        mask = np.where(pixels[..., 0] > 250, 255, pixels[..., 1] > 127).astype(np.uint8)
        Image.fromarray(mask).save(folder / f"{number}_mask.png")
        lines.append(f"{number}.png,{number % 2},{number % 3 % 2},{40.5 + number},{number}_mask.png,none")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return folder / "list.csv"


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_list(tmp_path_factory.mktemp("listed"))


def train(outputs: Path, file: Path, task: str, *more: str, ok: bool = True) -> Run:
    options = ("data=image_list", f"data.csv={file}", f"data.image_size={SIZE}", "data.val_fraction=0.2")
    short = ("max_steps=2", "batch_size=8", "threads=1", "num_workers=0", "accelerator=cpu")
    return Program(outputs)(f"model={task}", *TASKS[task], *options, *short, *more, ok=ok)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_is_evaluated_predicted_exported_and_compared(task: str, listed: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "outputs", listed, task)
    monitor = composed(f"model={task}")["callbacks"]["checkpoint"]["monitor"]
    assert checkpoint_of(run.folder, "best")
    assert f"best.ckpt by {monitor}" in run.stderr
    spec = checkpoint_of(run.folder)["lockstep"]["spec"]
    assert (spec["task"], len(spec["classes"])) == (task, 1 if task == "regression" else 2)

    # evaluated on three devices, of which the last has the fewest samples: each sample counts once
    options = (f"checkpoint={run.folder}", "accelerator=cpu", "threads=1")
    tested = Program(tmp_path / "tested", "src/evaluate.py")(*options, "strategy=ddp", "devices=3", "batch_size=4")
    expected = {name: value for name, value in run.summary["metrics"].items() if name.startswith("test/")}
    assert len(expected) >= 2
    assert tested.summary["metrics"] == pytest.approx(expected, rel=1e-5)

    # predicted: rows are what forward returns, by name; masks are images
    predicted = Program(tmp_path / "predicted", "src/predict.py")(*options, f"images={listed}")
    with (predicted.folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 36
    outputs = forward_of(run.folder, listed)
    if task == "segmentation":
        assert list(rows[0]) == ["file", "mask", "ground", "thing"]
        masks = [np.asarray(Image.open(predicted.folder / row["mask"])) for row in rows]
        assert np.mean(np.stack(masks) == outputs.argmax(1).numpy()) > 0.999
        assert float(rows[0]["thing"]) == pytest.approx(masks[0].mean(), abs=1e-5)
    else:
        names = {"multi_label": ["cat", "dog"], "regression": ["age"]}[task]
        assert list(rows[0]) == ["file", *names]
        values = np.array([[float(row[name]) for name in names] for row in rows])
        wanted = outputs.sigmoid() if task == "multi_label" else outputs
        np.testing.assert_allclose(values, wanted.numpy(), rtol=1e-4, atol=1e-4)
    refused = Program(tmp_path / "top", "src/predict.py")(*options, f"images={listed}", "top_k=1", ok=False)
    assert refused.returncode == 2
    assert "top_k=1: the model is for" in refused.stderr

    # exported: with the activation of the task, in the file too
    exported = Program(tmp_path / "exported", "scripts/export.py")(f"checkpoint={run.folder}", "format=torch")
    about = json.loads((exported.folder / "model.json").read_text())
    assert (about["task"], about["classes"]) == (task, list(spec["classes"]))
    images = torch.stack([image for image, _ in opened(listed)]).contiguous()
    found = torch.export.load(exported.folder / "model.pt2").module()(images)
    activation = {"multi_label": torch.sigmoid, "segmentation": lambda logits: logits.softmax(1)}
    torch.testing.assert_close(found, activation.get(task, lambda values: values)(outputs), rtol=1e-4, atol=1e-4)

    # compared by the model's own metric
    train(tmp_path / "outputs", listed, task, "seed=1", "lr=0.001")
    compared = Program(tmp_path / "none", "scripts/compare.py").finish(compare(tmp_path))
    assert f"test {monitor.removeprefix('val/')}" in compared.stdout


def compare(folder: Path) -> Any:
    import subprocess
    import sys

    command = [sys.executable, str(ROOT / "scripts" / "compare.py"), str(folder / "outputs")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def opened(file: Path, **options: Any) -> Any:
    """Return all images of a list, in its order."""
    options = options or {"values": ["age"]}
    source = config("image_list", csv=str(file), image_size=SIZE, val_fraction=0.0, test_fraction=0.0, **options)
    return open_data(source, "nowhere").train


def forward_of(folder: Path, file: Path) -> torch.Tensor:
    """Return the output of a checkpoint's module for all images of a list."""
    raw = composed(*(f"{each}" for each in overrides_of(folder)))
    splits = open_data(raw["data"], "nowhere")
    net = make_module(check(raw), splits)
    net.load_state_dict(checkpoint_of(folder, "best")["state_dict"])
    images = torch.stack([image for image, _ in opened(file)])
    mean, std = (torch.tensor(moment).view(-1, 1, 1) for moment in (splits.spec.mean, splits.spec.std))
    with torch.no_grad():
        return net.eval()((images / 255 - mean) / std)


def overrides_of(folder: Path) -> list[str]:
    text = (folder / ".hydra" / "overrides.yaml").read_text()
    return [line.removeprefix("- ").strip("'") for line in text.splitlines() if line.startswith("- ")]
