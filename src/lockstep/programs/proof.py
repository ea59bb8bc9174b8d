"""Prove in a minute that layouts train the same bits, by the small CNN on the digits that scikit-learn contains:

    lockstep proof

The same training runs on one device, on three (ddp), and once more: killed by `kill -9`, then resumed on two (dp). Each
prints the SHA-256 of its weights. With exact=portable they must be equal, and equal to the recorded one, which other
processors have computed. The runs write to a temporary folder. `lockstep parity` proves the same of your own model.

Exit codes: 0 all four are equal, 1 one differs, 2 the proof can't run here.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep import compose, exit_on_signal
from lockstep.config.arguments import quote_path
from lockstep.errors import UserError
from lockstep.launch.portable import missing_instructions
from lockstep.launch.programs import started
from lockstep.programs.common.template import template
from lockstep.project import Project, use_project_of
from lockstep.report.summary import summary_of

# The weights are compared here, so a run need not do it.
TASK = ("experiment=golden", "callbacks.golden=null", "logger=none", "accelerator=cpu", "threads=1")
ONE, THREE, KILLED = "one device", "ddp, 3 devices", "killed, resumed on dp, 2 devices"
LAYOUTS: dict[str, tuple[str, ...]] = {
    ONE: ("devices=1",),
    THREE: ("strategy=ddp", "devices=3"),
    KILLED: ("strategy=dp", "devices=2"),
}
TIMEOUT = 300.0  # seconds of one run
POLL = 0.005  # seconds between two looks for the checkpoint: after the first one, the run lasts half a second


class Different(Exception):
    """Weights differ."""


def main(words: list[str]) -> int:
    """Print the proof. Return the exit code."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    if words:
        raise UserError(f"lockstep proof {words[0]}: it takes no arguments: try lockstep parity {words[0]}")
    if lacking := missing_instructions():
        raise UserError(
            f"this processor has no {' and '.join(lacking)}, with which the weights were recorded: try lockstep parity"
        )
    exit_on_signal.restore()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the running program must end too
    try:
        prove(_project())
    except Different as different:
        print(f"error: {different}", file=sys.stderr)
        return 1
    return 0


def _project() -> Project:
    """Return the project whose `experiment=golden` is trained: that of the template, wherever the command runs."""
    return Project(template())


def prove(of: Project, added: Mapping[str, Sequence[str]] | None = None) -> None:
    """Train on each layout, and compare the weights.

    Args:
        of: the project.
        added: further overrides of a layout's run. They plant a difference, so that a test can see it found.

    Raises:
        Different: a run has other weights than the first one, or all have others than the recorded ones.
        UserError: a run did not complete.
    """
    use_project_of(of.root)
    recorded = compose("experiment=golden")["callbacks"]["golden"]["sha256"]
    print("the small CNN trains on digits, three times; SHA-256 of its weights after the last step:", flush=True)
    hashes = {}
    for layout in LAYOUTS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="lockstep_proof_") as folder:
            hashes[layout] = train(of, layout, (added or {}).get(layout, ()), Path(folder))
        print(f"  {hashes[layout]}  {layout}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"  {recorded}  recorded")
    print(verdict(hashes, recorded))


def verdict(hashes: Mapping[str, str], recorded: str) -> str:
    """Return the last line.

    Raises:
        Different: the hashes differ.
    """
    if differing := [layout for layout, sha256 in hashes.items() if sha256 != hashes[ONE]]:
        raise Different(f"other weights than on {ONE}: {'; '.join(differing)}")
    if hashes[ONE] != recorded:
        from torch import __version__

        raise Different(
            f"the runs agree, but their weights are not the recorded ones: is torch {__version__} not the one that "
            "recorded them?"
        )
    return "proven: the same bits on one device, on three, and after kill -9 on two; they are the recorded ones"


def train(of: Project, layout: str, added: Sequence[str], outputs: Path) -> str:
    """Train, and return the hash of the weights. The run KILLED starts on one device, and is resumed on its layout.

    Raises:
        UserError: the run failed, or ended before it could be killed.
    """
    task = [*TASK, *added, f"outputs={quote_path(outputs)}"]
    if layout == KILLED:
        folder = kill_after_checkpoint(of, [*task, *LAYOUTS[ONE], "checkpoint_every=3"], outputs)
        task = [f"resume={quote_path(folder)}"]
    with training(of, [*task, *LAYOUTS[layout]], outputs) as process:
        try:
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise UserError(f"{layout}: the run has not ended in {TIMEOUT:.0f} s: {last_line(outputs)}") from None
    if process.returncode:
        raise UserError(f"{layout}: the run failed: {last_line(outputs)}")
    (summary,) = outputs.rglob("summary.json")
    return str(summary_of(summary.parent)["weights_sha256"])


def kill_after_checkpoint(of: Project, overrides: Sequence[str], outputs: Path) -> Path:
    """Train until there is a checkpoint, kill the run and its workers at once, and return its folder.

    Raises:
        UserError: the run ended before.
    """
    deadline = time.monotonic() + TIMEOUT
    with training(of, overrides, outputs) as process:
        while not (checkpoints := [*outputs.rglob("last.ckpt")]):
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"{KILLED}: the run made no checkpoint: {last_line(outputs)}")
            time.sleep(POLL)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    folder = checkpoints[0].parents[1]
    if process.returncode != -signal.SIGKILL or summary_of(folder).get("status") == "completed":
        raise UserError(f"{KILLED}: the run ended before it could be killed: try again")
    return folder


@contextmanager
def training(of: Project, overrides: Sequence[str], outputs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the project's training, with its output in a file. Kill what is left at the end."""
    with (
        open(outputs / "output.txt", "wb") as log,
        started(of, overrides, stdout=log, stderr=log, cwd=outputs) as process,
    ):
        yield process


def last_line(outputs: Path) -> str:
    """Return the last line that the run has printed."""
    lines = (outputs / "output.txt").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
