"""SLURM: an interrupted job requeues itself, and continues in the same run folder when SLURM restarts it."""

import hashlib
import json
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lockstep.launch.environment import Environment, environment


def restarted(here: Environment | None = None) -> bool:
    """Check whether SLURM has started this job before.

    Args:
        here: this rank's place in the run; None: that of this process.
    """
    here = here or environment()
    return here.slurm_job is not None and here.slurm_restarts > 0


def folder_of_job(runs: Path, overrides: Iterable[object]) -> Path | None:
    """Return the folder in `runs` for this job's run with these overrides.

    A restarted job gets the same folder. Return None outside of SLURM, and if the job runs the same command a second
    time without a restart.
    """
    job = environment().slurm_job
    if job is None:
        return None
    job_folder = runs / f"slurm_{job}_{hash_of_command(overrides)}"
    return job_folder if restarted() or not job_folder.exists() else None


def hash_of_command(overrides: Iterable[object]) -> str:
    """Return a short hash of a command's overrides."""
    return hashlib.sha256("\n".join(map(str, overrides)).encode()).hexdigest()[:6]


def worked_on(run: Path) -> bool:
    """Check whether this job created or resumed the run in a folder before SLURM restarted it."""
    if not restarted():
        return False
    with suppress(OSError, ValueError):
        return bool(json.loads((run / "provenance.json").read_text()).get("slurm_job") == environment().slurm_job)
    return False


def requeue() -> str | None:
    """Requeue this job. Return the result in one line; None if there is nothing to requeue.

    Only a job in state RUNNING is requeued: SLURM requeues a preempted job itself, and a cancelled job must end. Only
    the first task of a job requeues it.
    """
    job = environment().slurm_job
    if job is None or environment().slurm_task != 0:
        return None
    state, error = _run("squeue", "--noheader", "--format=%T", f"--jobs={job}")
    if not error and state != "RUNNING":
        return None
    if not error:
        _, error = _run("scontrol", "requeue", job)
    if error:
        return f"SLURM job {job} could not be requeued ({error}): submit it again with resume=<run folder>"
    return f"SLURM job {job} is requeued"


def _run(*command: str) -> tuple[str, str]:
    """Run a SLURM command. Return its output, and its error message (empty if it succeeded)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout.strip(), " ".join(done.stderr.split()) if done.returncode else ""
