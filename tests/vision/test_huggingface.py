"""Data sets of the library `datasets`: folders that it or others have written, without network."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Program
from PIL import Image
from small_data import config, refusal_of
from written_shards import CLASSES, write_folder, write_shards

from lockstep.data.build import open_data
from lockstep.data.datasets import innermost_dataset

pytestmark = pytest.mark.usefixtures("whole_run")

WHY = "pip install -e .[huggingface] brings it"


def opened(path: Any, **changes: Any) -> Any:
    return open_data(config("huggingface", path=str(path), image_size=12, **changes), "nowhere")


def refusal(path: Any, **changes: Any) -> str:
    return refusal_of(opened, path, **changes)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the library, with a cache of its own. conftest.py keeps it offline."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))
    yield pytest.importorskip("datasets", reason=WHY)
    patch.undo()


@pytest.fixture
def rows(library: Any, tmp_path: Path) -> Any:
    """Return a data set of the library with the splits train and test, from a folder of images."""
    folder, splits = write_folder(tmp_path / "folder"), {}
    features = library.Features(
        {"image": library.Image(), "label": library.ClassLabel(names=list(CLASSES)), "id": library.Value("int64")}
    )
    for part in ("train", "test"):
        paths = sorted((folder / part).rglob("*.*"))
        labels = [CLASSES.index(path.parent.name) for path in paths]
        images = [{"bytes": path.read_bytes(), "path": None} for path in paths]
        splits[part] = library.Dataset.from_dict(
            {"image": images, "label": labels, "id": range(len(paths))}, features=features
        )
    return library.DatasetDict(splits)


@pytest.mark.nightly
def test_a_run_offline_on_a_local_copy(rows: Any, run_train: Program, tmp_path: Path) -> None:
    """It trains what the folder trains, also on two devices and after a resume."""
    rows.save_to_disk(tmp_path / "copy")
    task = ("data.image_size=20", "batch_size=9", "pieces=3", "exact=true", "scheduler=constant")
    alone = ("threads=1", "accelerator=cpu", "logger=none")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    folder = Program(tmp_path / "plain")(
        *task, *alone, "data=image_folder", f"data_dir={tmp_path / 'folder'}", "max_steps=6"
    )
    hub = (*task, *alone, "data=huggingface", f"data.path={tmp_path / 'copy'}", "strategy=ddp", "devices=2")
    run_train(*hub, "max_steps=2", env=offline)
    run = run_train("resume=last", "max_steps=6", "devices=1", "strategy=auto", env=offline)
    assert run.summary["steps"] == 6
    assert run.summary["weights_sha256"] == folder.summary["weights_sha256"]


def test_splits_and_classes(rows: Any, tmp_path: Path) -> None:
    rows.save_to_disk(tmp_path / "copy")
    splits = opened(tmp_path / "copy", val_fraction=0.5)
    assert (splits.spec.classes, splits.sizes) == (CLASSES, {"train": 21, "val": 21, "test": 12})
    image, label = splits.test[5]
    path = sorted((tmp_path / "folder" / "test").rglob("*.*"))[5]
    with Image.open(path) as stored:
        expected = np.asarray(stored.convert("RGB").resize((12, 15), Image.Resampling.BILINEAR)).shape
    assert (image.shape, label, expected[1]) == ((3, 12, 12), CLASSES.index(path.parent.name), 12)
    rows["train"].save_to_disk(tmp_path / "one")
    one = opened(tmp_path / "one", val_fraction=0.2, test_fraction=0.2)
    assert (one.sizes, one.split_by_opener) == ({"train": 24, "val": 9, "test": 9}, True)
    first = opened(tmp_path / "copy")
    again = opened(tmp_path / "copy")
    assert first.fingerprint == again.fingerprint
    rows["train"] = rows["train"].select(range(41, -1, -1))
    rows.save_to_disk(tmp_path / "turned")
    turned = opened(tmp_path / "turned", val_fraction=0)
    assert turned.fingerprint != opened(tmp_path / "copy", val_fraction=0).fingerprint
    assert torch.equal(turned.train[0][0], opened(tmp_path / "copy", val_fraction=0).train[41][0])


def test_a_folder_of_parquet_files(rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shards(tmp_path / "folder", tmp_path / "parquet", "parquet")
    splits = opened(folder)
    assert splits.spec.classes == ("0", "1", "2")
    assert splits.sizes == {"train": 38, "val": 4, "test": 12}
    rows["train"].cast_column("label", rows["train"].features["id"]).to_parquet(tmp_path / "one" / "a.parquet")
    assert opened(tmp_path / "one").sizes["test"] == 3


def test_images_are_not_in_memory(rows: Any, tmp_path: Path) -> None:
    rows.save_to_disk(tmp_path / "copy")
    images = innermost_dataset(opened(tmp_path / "copy").train)
    assert [Path(each["filename"]).suffix for each in images.rows.cache_files] == [".arrow"]


def test_data_sets_that_are_refused(library: Any, rows: Any, tmp_path: Path) -> None:
    assert "data.path must be given: data.path=<a name on the hub, or a folder>" in refusal("")
    assert "there is no such folder: it must be written by save_to_disk" in refusal(tmp_path / "nowhere")
    assert "is a folder of another kind: it must be written by save_to_disk" in refusal(tmp_path / "folder")
    assert "data.path=nobody/nothing can't be opened (" in refusal("nobody/nothing")  # offline
    rows.save_to_disk(tmp_path / "copy")
    right = "its columns are image, label, id: choose by data.image= and data.label="
    assert f"split train: no column img, {right}" in refusal(tmp_path / "copy", image="img")
    assert f"split train: no column y, {right}" in refusal(tmp_path / "copy", label="y")
    assert "the column id is Value('int64')" in refusal(tmp_path / "copy", image="id")
    assert "data.label=image: must be another column than that of the images" in refusal(
        tmp_path / "copy", label="image"
    )
    library.DatasetDict({"train": rows["test"], "test": rows["train"]}).save_to_disk(tmp_path / "more")
    assert "split test has the class 12: train must have it, too" in refusal(tmp_path / "more", label="id")
    table = {"image": [b"none", None], "label": ["a", "b"]}
    library.Dataset.from_dict(table).save_to_disk(tmp_path / "broken")
    line = refusal(tmp_path / "broken")
    assert f"{tmp_path / 'broken'}, split train: image of row 1 is missing" in line or "image of row 0" in line, line
    unlabelled = rows["test"].remove_columns("label").add_column("label", [-1] * 12)
    library.DatasetDict(
        {"train": rows["train"], "test": unlabelled.cast_column("label", rows["train"].features["label"])}
    ).save_to_disk(tmp_path / "unlabelled")
    assert "split test: a label is none of the classes" in refusal(tmp_path / "unlabelled")
    library.DatasetDict({"a": rows["train"], "b": rows["test"]}).save_to_disk(tmp_path / "named")
    assert "has the splits a, b: one must be train" in refusal(tmp_path / "named")
    (arrow,) = (tmp_path / "copy" / "train").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:900])
    assert "can't be opened (" in refusal(tmp_path / "copy")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal("mnist") == "data=huggingface needs the library datasets: pip install datasets"
