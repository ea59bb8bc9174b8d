"""Tasks other than one class per image: several labels, numbers, masks. Trained, evaluated, predicted, exported."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import Program, Run, checkpoint_of, composed, forked
from PIL import Image
from small_data import TASK_ROWS, config, layout, module, step_batches

from lockstep.config.check import check
from lockstep.data import ArrayDataset, Spec, Splits
from lockstep.data.augment import Augment
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.job.build import make_module
from lockstep.testing import DataTests, ModuleTests

SHORT = ("data.samples=110",)
SIZE = 24


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
class TestMultiLabel(ModuleTests):
    overrides = [*TASK_ROWS["multi_label"], *SHORT]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
class TestRegression(ModuleTests):
    overrides = [*TASK_ROWS["regression"], *SHORT]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
class TestSegmentation(ModuleTests):
    overrides = [*TASK_ROWS["segmentation"], *SHORT]


@pytest.mark.usefixtures("processes")
def test_segmentation_has_the_same_bits_on_two_layouts(tmp_path: Path) -> None:
    short = ("max_steps=3", "exact=true", "pieces=4", "accelerator=cpu", "threads=1", "logger=none", "callbacks=none")
    layouts = {"one": ("devices=1",), "two": ("strategy=ddp", "devices=2"), "control": ("seed=1",)}
    one, two, control = (
        Program(tmp_path / name)(*TASK_ROWS["segmentation"], *SHORT, *short, *more).summary["weights_sha256"]
        for name, more in layouts.items()
    )
    assert one == two != control


@pytest.mark.usefixtures("processes")
class TestLabelsData(DataTests):
    overrides = ["data=synthetic", "data.task=multi_label"]


@pytest.mark.usefixtures("processes")
class TestValuesData(DataTests):
    overrides = ["data=synthetic", "data.task=regression", "data.num_classes=1"]


@pytest.mark.usefixtures("processes")
class TestMasksData(DataTests):
    overrides = ["data=synthetic", "data.task=segmentation", "data.num_classes=2"]


# --- one run of each task on files, and what is done with its checkpoint ---

TASKS = {
    "multi_label": ("data.labels=[cat,dog]", "model.arch=mobilenet_v3_small"),
    "regression": ("data.values=[age]", "model.center=50", "model.arch=mobilenet_v3_small"),
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


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "task", ["multi_label", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("regression", "segmentation"))]
)
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

    # exported: what is predicted
    exported = Program(tmp_path / "exported", "lockstep export")(f"checkpoint={run.folder}", "format=torch")
    about = json.loads((exported.folder / "model.json").read_text())
    assert (about["task"], about["classes"]) == (task, list(spec["classes"]))
    images = torch.stack([image for image, _ in opened(listed)]).contiguous()
    actual = torch.export.load(exported.folder / "model.pt2").module()(images)
    if task == "segmentation":
        assert (actual == outputs.argmax(1)).float().mean() > 0.999
    else:
        wanted = outputs.sigmoid() if task == "multi_label" else outputs
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)

    # compared by the model's own metric
    train(tmp_path / "outputs", listed, task, "seed=1", "lr=0.001")
    compared = forked("lockstep compare", str(tmp_path / "outputs"))
    assert f"test {monitor.removeprefix('val/')}" in compared.stdout


def opened(file: Path, **options: Any) -> Any:
    """Return all samples of a list, in its order."""
    options = options or {"values": ["age"]}
    source = config("image_list", csv=str(file), image_size=SIZE, val_fraction=0.0, test_fraction=0.0, **options)
    return open_data(source, "nowhere").train


def forward_of(folder: Path, file: Path) -> torch.Tensor:
    """Return the output of a checkpoint's module for all images of a list."""
    raw = composed(*yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()))
    splits = open_data(raw["data"], "nowhere")
    net = make_module(check(raw), splits)
    net.load_state_dict(checkpoint_of(folder, "best")["state_dict"])
    images = torch.stack([image for image, _ in opened(file)])
    mean, std = (torch.tensor(moment).view(-1, 1, 1) for moment in (splits.spec.mean, splits.spec.std))
    with torch.no_grad():
        return net.eval()((images / 255 - mean) / std)


# --- one line where something does not fit ---

MASK = {"mask": "mask", "classes": ["ground", "thing"], "unlabelled": 255}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": ["cat", "dgo"]}, "data.labels: .*list.csv has no column dgo: its columns are path, cat, dog, age"),
        ({"labels": ["cat", "age"]}, "row 2: age is 40.5: must be 0 or 1"),
        ({"labels": "cat"}, r"data.labels=cat: must be a list of different names, \[cat,dog\] for example"),
        ({"labels": ["cat", "cat"]}, "must be a list of different names"),
        ({"values": ["age", "note"]}, "row 2: note is none: must be a number"),
        ({"values": ["age"], "labels": ["cat"]}, r"data.values=.*one kind of target: leave it or data.labels out"),
        ({"mask": "mask"}, r"data.mask=mask: must be a column, with data.classes=\[background,cat\]"),
        ({**MASK, "mask": "masks"}, "data.mask: .*has no column masks"),
        ({**MASK, "mask": "note"}, "row 2: there is no mask .*none: paths are relative to the list's folder"),
        ({**MASK, "unlabelled": None}, "0_mask.png: a mask with pixels of 255: must be 0 to 1, .*data.unlabelled=255"),
        ({**MASK, "unlabelled": 1}, "data.unlabelled=1: must be 2 to 255"),
        ({"labels": ["cat"], "unlabelled": 255}, "data.unlabelled=255: is a value of masks"),
        ({"labels": ["cat"], "classes": ["a", "b"]}, "are those of masks: give data.mask"),
        ({}, "its columns are path, cat.*must be path,label .*data.labels, data.values and data.mask name columns"),
        ({"labels": ["cat"], "sampling": "balanced"}, "data.sampling=balanced is for data with one class per sample"),
        ({"values": ["age"], "mix": "mixup"}, "data.mix=mixup is for .*this data set is for regression: leave it out"),
    ],
)
def test_lists_that_are_refused(listed: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        opened(listed, **({"labels": None} | options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda mask: mask.resize((SIZE, SIZE)),
            f"5_mask.png: a mask of {SIZE} x {SIZE} pixels: must have .* as .*5.png",
        ),
        (lambda mask: mask.convert("RGB"), "5_mask.png: a mask of mode RGB: must have one channel of 8 bits"),
        (lambda mask: mask.point(lambda value: 2 * value), "5_mask.png: a mask with pixels of 2: must be 0 to 1"),
    ],
)
def test_masks_that_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    file, path = write_list(tmp_path), tmp_path / "5_mask.png"
    assert len(opened(file, **MASK)) == 36  # the control
    change(Image.open(path)).save(path)
    with pytest.raises(UserError, match=message) as error:
        opened(file, **MASK)
    assert "\n" not in str(error.value)


def test_transforms_that_would_leave_masks_behind_are_refused(listed: Path) -> None:
    transforms = {"train": [{"_target_": "torchvision.transforms.v2.CenterCrop", "size": 8}]}
    transforms["eval"] = transforms["train"]
    assert opened(listed, values=["age"], transforms=transforms)  # the control
    with pytest.raises(UserError, match="would change images without their masks: leave it out"):
        opened(listed, **MASK, transforms=transforms)


@pytest.mark.usefixtures("processes")
def test_a_model_and_data_of_other_tasks_are_refused(listed: Path, tmp_path: Path) -> None:
    for model, task in (("regression", "regression"), ("mnist_cnn", "classification")):
        run = train(tmp_path / model, listed, "segmentation", f"model={model}", ok=False)
        assert run.returncode == 2, str(run)
        assert f"model={model} is for {task}, and data=image_list for segmentation: use a model" in run.stderr
    run = train(tmp_path, listed, "multi_label", "data.labels=[cat,note]", ok=False)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)


# --- data ---


def test_masks_move_with_their_images() -> None:
    """Each image is its own mask here, so they must be the same after shifts and flips."""
    masks = np.random.default_rng(0).integers(0, 3, (8, 12, 12), dtype=np.uint8)
    spec = Spec(1, 12, ("a", "b", "c"), (0.0,), (1 / 255,), "segmentation")
    for fill, outside in (("reflect", 0), ("zero", 255)):
        splits = Splits(
            ArrayDataset(masks[:, None], masks), None, None, spec, "", Augment(crop=3, flip=True, fill=fill)
        )
        made = module(splits, layout(batch_size=8))
        (micro_batch,) = step_batches(made)[0].micro_batches
        x, y = made.prepare(micro_batch)
        covered = y != 255
        assert torch.equal(x[:, 0][covered].round().byte(), y[covered])
        assert bool((~covered).any()) == bool(outside)
        assert not torch.equal(y, torch.from_numpy(masks)[torch.from_numpy(micro_batch.ids)])  # something moved


def test_a_turned_photograph_and_its_mask_fit(tmp_path: Path) -> None:
    file = write_list(tmp_path)
    image = Image.open(tmp_path / "0.png")
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.save(tmp_path / "0.png", exif=exif)
    with pytest.raises(UserError, match="a mask of 30 x 24 pixels: must have 24 x 30"):
        opened(file, **MASK)
    mask = Image.open(tmp_path / "0_mask.png")
    mask.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "0_mask.png")
    (image, mask), *_ = opened(file, **MASK)
    green = image[1][mask != 255] > 127
    assert torch.equal(green, mask[mask != 255] == 1)


def test_lists_of_numbers_are_split_and_known_by_their_content(listed: Path, tmp_path: Path) -> None:
    source = config("image_list", csv=str(listed), image_size=SIZE, labels=["cat", "dog"])
    splits = open_data(source, "nowhere")
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [28, 4, 4]
    assert splits.spec.classes == ("cat", "dog")
    assert splits.class_counts() is None
    file = write_list(tmp_path)
    assert opened(file).fingerprint() == opened(listed).fingerprint()
    file.write_text(listed.read_text().replace(",41.5,", ",41.25,"))
    assert opened(file).fingerprint() != opened(listed).fingerprint()
