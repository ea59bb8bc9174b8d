"""Under SLURM: a job that is told to end asks to be queued again, and goes on where it was when it is started again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import OmegaConf

from lockstep.launch.environment import environment


def restarted() -> bool:
    """Whether SLURM has started this job before."""
    return environment().slurm_job is not None and environment().slurm_restarts > 0


def earlier_run(runs: Path, overrides: Sequence[str]) -> Path | None:
    """The folder in `runs` of the newest run that this job has made with the same overrides and a checkpoint."""
    found = []
    for checkpoint in runs.glob("*/checkpoints/last.ckpt"):
        folder = checkpoint.parent.parent
        with suppress(OSError, ValueError):
            if ours(folder) and _plain(OmegaConf.load(folder / ".hydra" / "overrides.yaml")) == _plain(overrides):
                found.append((checkpoint.stat().st_mtime, folder))
    return max(found)[1] if found else None


def earlier_sweep(runs: Path, overrides: Sequence[str]) -> Path | None:
    """The folder in `runs` of the newest sweep with the same overrides of which this job has begun a run."""
    found = []
    for record in runs.glob("sweeps/*/multirun.yaml"):
        with suppress(OSError, ValueError, AttributeError):
            same = _plain(OmegaConf.load(record).hydra.overrides.task) == _plain(overrides)
            if same and any(ours(made.parent) for made in record.parent.glob("*/provenance.json")):
                found.append((record.stat().st_mtime, record.parent))
    return max(found)[1] if found else None


def ours(folder: Path) -> bool:
    """Whether this job has made or resumed the run in `folder`."""
    with suppress(OSError, ValueError):
        return bool(json.loads((folder / "provenance.json").read_text()).get("slurm_job") == environment().slurm_job)
    return False


def _plain(overrides: Iterable[object]) -> list[str]:
    """Overrides in order, without flags, what Hydra keeps to itself, and what an earlier start of the job went on
    from."""
    left = (str(override) for override in overrides)
    return sorted(text for text in left if not text.startswith(("-", "hydra.", "resume=", "sweep.resume=")))


def requeue() -> str | None:
    """Asks SLURM to queue this job again; what came of it in one line, None where there was nothing to ask.

    Only a job that is still running is queued again: one that SLURM itself preempts is already, and one that somebody
    cancelled shall end. Of several tasks the first one asks.
    """
    job = environment().slurm_job
    if job is None or environment().slurm_task != 0:
        return None
    state, error = _ask("squeue", "--noheader", "--format=%T", f"--jobs={job}")
    if not error and state != "RUNNING":
        return None
    if not error:
        _, error = _ask("scontrol", "requeue", job)
    return f"SLURM job {job} {f'could not be queued again: {error}' if error else 'is queued again'}"


def _ask(*command: str) -> tuple[str, str]:
    """What a SLURM command answered, and what was wrong with it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout.strip(), " ".join(done.stderr.split()) if done.returncode else ""
