"""Copies of the template for runs that an engine starts, and what all engines must show.

A run is slow until its copy has a file `hurry`, so that it can be struck in its middle however fast the machine is.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from conftest import ROOT, SAVES_OFTEN, Run, finished, summary_of, template, wait_for

# Six epochs of ten steps. Six pieces: for one, two or three workers alike.
JOB = (*SAVES_OFTEN, "max_epochs=6", "batch_size=36", "exact=true", "pieces=6")
SLOW = "callbacks=[default,slow]"
BAD = "lr=-1"
REFUSAL = "error: lr=-1"
SECONDS = 240.0  # that a run may take, restarts included, on a busy machine; submitit asks SLURM in doubled intervals

CALLBACK = """
import time
from pathlib import Path

from lightning.pytorch import Callback


class Slow(Callback):
    def on_train_batch_end(self, *args, **kwargs):
        time.sleep(0 if (Path(__file__).parents[2] / "hurry").exists() else 0.4)
"""


class Site:
    """A folder with the template in it, from which programs are started; their runs are below `outputs`.

    Args:
        placed: makes of a command one that runs on another machine.
    """

    def __init__(self, home: Path, placed: Callable[[Sequence[str]], Sequence[str]] = list) -> None:
        self.home = template(home)
        self.placed = placed
        self.outputs = home / "outputs"
        home.joinpath("src", "project", "slow.py").write_text(CALLBACK)
        home.joinpath("conf", "callbacks", "slow.yaml").write_text("slow:\n  _target_: project.slow.Slow\n")
        home.joinpath("scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "slurm.sh", home / "scripts")

    def start(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program in this folder, in a process group of its own."""
        return subprocess.Popen(
            self.placed(command),
            cwd=self.home,
            env=environment() | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> Run:
        return finished(process, self.outputs, SECONDS)

    def run(self, *command: str, env: dict[str, str] | None = None) -> Run:
        return self.finish(self.start(*command, env=env))

    def hurry(self) -> None:
        """Let the steps of slow runs take no longer than they need."""
        (self.home / "hurry").touch()

    def wait_for_checkpoint(self, name: str, process: subprocess.Popen[str]) -> Path:
        """Wait until a run has saved once more, and return its folder; fail when the process ends before."""
        before = self.saved(name)
        wait_for(lambda: self.saved(name) > before, process, SECONDS)
        return max(self.outputs.glob(f"{name}/*/checkpoints/last.ckpt"), key=modified).parents[1]

    def saved(self, name: str) -> int:
        """Return when a run was saved for the last time, in nanoseconds."""
        return max((modified(file) for file in self.outputs.glob(f"{name}/*/checkpoints/last.ckpt")), default=0)


def modified(file: Path) -> int:
    with suppress(FileNotFoundError):
        return file.stat().st_mtime_ns
    return 0


def everything(*runs: Run) -> str:
    """Return the output of several programs, one after the other."""
    return "\n".join(run.stdout + run.stderr for run in runs)


def environment() -> dict[str, str]:
    """Return what an engine hands to its workers: programs of this interpreter's environment come first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # Open MPI refuses root unless it is told twice.
    return {**os.environ, "PATH": path, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def ended_well(name: str, sites: Sequence[Site], one_device: Run, output: str) -> dict[str, Any]:
    """Return the summary of a run that completed with the bits of one device, and was written once: on all machines
    together there is one folder's name, one completed summary, and one line about its test, in the log and in
    `output`.

    Args:
        output: what all processes of the run wrote, since it was started for the last time.
    """
    files = [file for site in sites for file in site.outputs.glob(f"{name}/*/summary.json")]
    assert len({file.parent.name for file in files}) == 1, f"one run expected, found {files}\n{output}"
    completed = [file.parent for file in files if summary_of(file.parent)["status"] == "completed"]
    assert len(completed) == 1, f"{[summary_of(file.parent) for file in files]}\n{output}"
    summary = summary_of(completed[0])
    for key in ("weights_sha256", "steps"):
        assert summary[key] == one_device.summary[key], key
    for key in ("test/correct", "test/count"):
        assert summary["metrics"][key] == one_device.summary["metrics"][key], key
    logs = [file.read_text() for site in sites for file in site.outputs.glob(f"{name}/*/train.log")]
    line = f"test (best.ckpt by val/acc, step {summary['steps']})"
    assert sum(log.count(line) for log in logs) == 1
    assert output.count(line) == 1, output
    return summary


def refused_once(printed: str) -> bool:
    """Return whether the refusal of BAD stands in an output exactly once, without a traceback of the program."""
    return printed.count(REFUSAL) == 1 and 'src/train.py", line' not in printed
