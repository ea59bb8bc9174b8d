"""docs/use/same.md: the case on the page is run, and `lockstep same` prints what the page shows."""

import os
import sys
from pathlib import Path

import pytest
import site_pages
from conftest import forked

PAGE = site_pages.read("use/same.md")
(PROGRAM,) = [code for language, code in PAGE.blocks if language == "python"]
WRONG, RIGHT = [command for command in PAGE.commands if command.output is not None]
LOSS = "nn.functional.cross_entropy(net(x[rows]), y[rows])"


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_the_case_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows the verdicts of the two programs."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    assert LOSS in PROGRAM
    mended = PROGRAM.replace(LOSS, f"({LOSS} / micro_batches)")
    for command, program, code in ((WRONG, PROGRAM, 1), (RIGHT, mended, 0)):
        (tmp_path / "train.py").write_text(program)
        done = forked("lockstep same", *command.words[2:], cwd=tmp_path)
        printed = done.stdout.splitlines()
        assert site_pages.matches(command.output or [], printed), f"{done.stdout}{done.stderr}"
        assert done.returncode == code
