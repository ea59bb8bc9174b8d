"""docs/is-determinism-worth-it.md: its commands and its lines run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Program, forked

PAGE = (ROOT / "docs" / "is-determinism-worth-it.md").read_text()


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_the_sweep_is_compared(tmp_path: Path) -> None:
    commands = re.findall(r"^    ((?:python|lockstep) .*)$", PAGE, re.MULTILINE)
    train, compare = (shlex.split(line)[1:] for line in commands[:2])
    assert compare[0] == "compare"
    short = [re.sub(r"^(seed=0,1).*", r"\1", each).replace("max_epochs=5", "max_epochs=1") for each in train[1:]]
    run = Program(tmp_path, train[0])(*short, "logger=none", "accelerator=cpu")
    assert len(run.jobs) == 4
    sweep = run.jobs[0].parent
    table = forked("lockstep compare", str(sweep)).stdout
    assert re.findall(r"\| *(0\.0\d+) *\| *2 \|", table) in (["0.01", "0.02"], ["0.02", "0.01"])
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = subprocess.run([sys.executable, "-c", code], cwd=sweep, capture_output=True, text=True, check=True).stdout
    shown = re.findall(r"^    (one seed.*\n    spread.*\n)", PAGE, re.MULTILINE)
    assert len(shown) == 2
    for each in (printed, *shown):
        assert re.fullmatch(
            r" *one seed of each: -?\+?\d+\.\d to -?\+?\d+\.\d, wrong in \d+ of \d+\n"
            r" *spread of a difference: \d+\.\d with the same seed for both, \d+\.\d without\n",
            each,
        )
    assert " of 4\n" in printed
