"""examples/lockstep.ipynb: its cells run in order in an empty folder, and print one hash for all layouts.

They are run without Jupyter: a cell is plain Python, or begins with `%%writefile <name>`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT

NOTEBOOK = json.loads((ROOT / "examples" / "lockstep.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
RESULTS = """
import json
pairs = ("one", "ddp of three"), ("rounded, one", "rounded, ddp of three")
numbers = [float(difference(*pair).max()) for pair in pairs]
Path("results.json").write_text(json.dumps([hashes, other, numbers]))
"""


def program(folder: Path) -> Path:
    """Write the files of the notebook, and all other cells as one program."""
    cells = []
    for cell in CODE:
        first, _, rest = cell.partition("\n")
        if first.startswith("%%writefile "):
            (folder / first.removeprefix("%%writefile ")).write_text(rest + "\n")
        else:
            cells.append(cell)
    file = folder / "cells.py"
    file.write_text("\n\n".join([*cells, RESULTS]))
    return file


@pytest.mark.usefixtures("processes")
def test_the_cells_print_one_hash_over_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, str(program(tmp_path))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert "exit code -9" in done.stdout, "it was killed before its end"
    hashes, other, (exact, rounded) = json.loads((tmp_path / "results.json").read_text())
    assert len(hashes) == 7
    (one,) = set(hashes.values())
    assert len(one) == 64
    assert len({one, *other.values()}) == 4, "the controls: another seed, and rounding"
    assert exact == 0 < rounded


def test_the_notebook_is_stored_without_results() -> None:
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
