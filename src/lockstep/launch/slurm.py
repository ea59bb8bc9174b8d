"""Under SLURM: a job that is told to end asks to be queued again, and goes on in its folder when it starts again."""

import hashlib
import json
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lockstep.launch.environment import environment


def restarted() -> bool:
    """Whether SLURM has started this job before."""
    return environment().slurm_job is not None and environment().slurm_restarts > 0


def folder_of_job(runs: Path, overrides: Iterable[object]) -> Path | None:
    """The folder in `runs` of this job's run with these overrides: the same one each time that the job is started. None
    without a job, and where a command that is given twice in one life of the job has been there before."""
    job = environment().slurm_job
    if job is None:
        return None
    of_command = hashlib.sha256("\n".join(map(str, overrides)).encode()).hexdigest()[:6]
    job_folder = runs / f"slurm_{job}_{of_command}"
    return job_folder if restarted() or not job_folder.exists() else None


def worked_on(run: Path) -> bool:
    """Whether this job, in an earlier life, has made or resumed the run in a folder."""
    if not restarted():
        return False
    with suppress(OSError, ValueError):
        return bool(json.loads((run / "provenance.json").read_text()).get("slurm_job") == environment().slurm_job)
    return False


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
