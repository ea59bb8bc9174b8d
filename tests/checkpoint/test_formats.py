"""Checkpoints of the known formats are read, others refused. formats/<number>: a run of each."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, checkpoint_of, summary_of

from lockstep.checkpoint import formats, io
from lockstep.errors import UserError

RUNS = sorted((Path(__file__).parent / "formats").glob("[0-9]*"))


@pytest.mark.parametrize("number", [formats.WITH_PARTS + 1, 0, 1, True, "2", None, 2.0])
def test_a_format_that_is_unknown_is_refused(number: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    content = {"state_dict": {}, "pytorch-lightning_version": "2.6.6", "lockstep": {"format": number}}
    torch.save(content, path)
    with pytest.raises(UserError, match=re.escape(f"checkpoint format {number}, this Lockstep reads 2 and 3: ")):
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
    assert [int(run.name) for run in RUNS] == [formats.FORMAT, formats.WITH_PARTS]
