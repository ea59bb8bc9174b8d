"""Checkpoints of this format are read, others refused. formats/: a run whose checkpoint is whole, and one in parts."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, checkpoint_of, summary_of

from lockstep.checkpoint import io
from lockstep.checkpoint.record import FORMAT
from lockstep.errors import UserError

RUNS = Path(__file__).parent / "formats"


@pytest.mark.parametrize("number", [FORMAT + 1, FORMAT - 1, 0, True, str(FORMAT), None, float(FORMAT)])
def test_another_format_is_refused(number: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    content = {"state_dict": {}, "pytorch-lightning_version": "2.6.6", "lockstep": {"format": number}}
    torch.save(content, path)
    with pytest.raises(UserError, match=re.escape(f"checkpoint format {number}, this Lockstep reads {FORMAT}: ")):
        io.load(path)


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_a_run_goes_on(run_train: Program, name: str, tmp_path: Path) -> None:
    """A run that was stored says when the format has changed: give it another number, and store it again."""
    shutil.copytree(RUNS / name, folder := tmp_path / "old")
    run_train(f"resume={folder}", "max_epochs=3", "max_steps=6")
    assert summary_of(folder)["steps"] == 6
    assert checkpoint_of(folder)["lockstep"]["format"] == FORMAT
