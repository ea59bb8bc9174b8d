"""`lockstep.Trainer` in workers that torchrun has started."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, TIMEOUT


def hashes(folder: Path, *command: str) -> list[str]:
    """Run a command and return the lines that it prints, of all ranks."""
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert run.returncode == 0, run.stderr
    return [line for line in run.stdout.splitlines() if len(line) == 64]


def test_one_file_prints_one_hash_under_torchrun(tmp_path: Path) -> None:
    file = str(ROOT / "examples" / "one_file.py")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    (one,) = hashes(tmp_path / "one", file)
    assert hashes(tmp_path / "two", *torchrun, file) == [one, one]
    assert hashes(tmp_path / "control", *torchrun, file, "--seed=1") != [one, one]
    refused = subprocess.run(
        [sys.executable, *torchrun, file, "--devices=3"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert "devices=3: torchrun has started 2 workers on 1 machine: give devices=2, or leave it out" in refused.stderr
