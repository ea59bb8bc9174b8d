"""Checkpoints of older formats are read, those of newer ones refused. formats/<number>: a run of each."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, checkpoint_of, summary_of

from lockstep.checkpoint import formats, io
from lockstep.errors import UserError
from lockstep.project import use_project_of

RUNS = sorted((Path(__file__).parent / "formats").glob("[0-9]*"))
OLD = {"config": {"model": {"_target_": "project.models.FastCNN"}, "list": ["project.schedules.cosine"], "lr": 0.1}}


def test_classes_that_have_moved_get_their_new_names() -> None:
    record = formats.up_to_date(OLD, "x")
    assert record == {
        "config": {
            "model": {"_target_": "lockstep.vision.models.FastCNN"},
            "list": ["lockstep.vision.schedules.cosine"],
            "lr": 0.1,
        }
    }
    ours = {**OLD, "format": formats.FORMAT}
    assert formats.up_to_date(ours, "x") == ours, "in a checkpoint of today it is a user's own class"


def test_a_class_that_the_project_still_has_is_meant(tmp_path: Path) -> None:
    for name, text in {"conf/train.yaml": "", "src/project/models/fast_cnn.py": "class FastCNN:\n    pass\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    use_project_of(tmp_path)
    names = formats.up_to_date(OLD, "x")["config"]
    assert names["model"]["_target_"] == "project.models.FastCNN"
    assert names["list"] == ["lockstep.vision.schedules.cosine"]


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("", False),
        ("from dogs.models.mine import FastCNN\n", True),
        ("from lockstep.vision.models import (\n    FastCNN,\n    ResNet9,\n)\n", True),
        ("from dogs.models.mine import Mine\n", False),
    ],
)
def test_a_project_may_have_any_name(tmp_path: Path, text: str, has: bool) -> None:
    """`make project` gave the user's name to the package, and checkpoints have it."""
    mine = "from lockstep.vision.models import FastCNN\n\n\nclass Mine(FastCNN):\n    pass\n"
    files = {"conf/train.yaml": "", "src/dogs/__init__.py": "", "src/dogs/models/__init__.py": text}
    for name, content in (files | {"src/dogs/models/mine.py": mine}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    use_project_of(tmp_path)
    old = {"model": "dogs.models.FastCNN", "data": "dogs.data.mnist", "other": "cats.data.mnist"}
    assert formats.up_to_date({"config": old}, "x")["config"] == {
        "model": "dogs.models.FastCNN" if has else "lockstep.vision.models.FastCNN",
        "data": "lockstep.vision.data.mnist",
        "other": "cats.data.mnist",
    }


@pytest.mark.parametrize("number", [formats.WITH_PARTS + 1, 0, True, "2", None, 1.0])
def test_a_format_that_is_unknown_is_refused(number: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    content = {"state_dict": {}, "pytorch-lightning_version": "2.6.6", "lockstep": {"format": number}}
    torch.save(content, path)
    with pytest.raises(UserError, match=re.escape(f"{path}: checkpoint format {number}, this Lockstep reads 1 to")):
        io.load(path)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"format {run.name}")
def test_a_run_goes_on(run_train: Program, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(run, folder)
    run_train(f"resume={folder}", "max_epochs=3", "max_steps=6")
    assert summary_of(folder)["steps"] == 6
    with_parts = run.name == str(formats.WITH_PARTS)  # its strategy saves parts
    assert checkpoint_of(folder)["lockstep"]["format"] == (formats.WITH_PARTS if with_parts else formats.FORMAT)


def test_no_format_lacks_a_run() -> None:
    assert [int(run.name) for run in RUNS] == [*range(1, formats.WITH_PARTS + 1)]
