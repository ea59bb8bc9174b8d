"""What the processes of a run tell each other through the environment: who exists, how often, since when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

RESTARTS = "LOCKSTEP_RESTARTS"  # what a worker is told by its environment
STARTED = "LOCKSTEP_STARTED"  # `time.time()` when the command, or a sweep's job, began


def external_workers() -> int:
    """World size where workers exist already (torchrun, several SLURM tasks), else 0."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        return int(os.environ["SLURM_NTASKS"])
    return 0


def is_first() -> bool:
    """Whether no other process exists already, or this one is rank zero among them."""
    return not external_workers() or os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0"


def restart_count() -> int:
    """Times that this worker's group was started again: by the agent, and before that by the parent."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(os.environ.get(RESTARTS, "0"))


@contextmanager
def environment_kept() -> Iterator[None]:
    """The agent leaves variables and signal handlers behind; a sweep's next job must not see them."""
    variables = dict(os.environ)
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def slurm_as_torchrun() -> None:
    """SLURM's names for ranks, as torchrun's; MASTER_ADDR and MASTER_PORT are the job script's to set."""
    if "RANK" in os.environ:
        return
    names = {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_NTASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
        "TORCHELASTIC_RUN_ID": "SLURM_JOB_ID",
    }
    os.environ.update({ours: os.environ[theirs] for ours, theirs in names.items()})
