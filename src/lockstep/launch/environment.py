"""What the environment tells a process of its run, read once; and what a process tells those that it starts."""

import os
import time
from dataclasses import dataclass
from functools import cache

# Our own variables, for the processes that this one starts.
STARTED = "LOCKSTEP_STARTED"  # `time.time()` when the command, or a sweep's job, began
SLURM_TASK = "LOCKSTEP_SLURM_TASK"  # set in a worker that is a task of srun's
SCRATCH = "LOCKSTEP_SCRATCH"  # the folder of what its processes keep for a moment: lockstep.launch.scratch


@dataclass(frozen=True)
class Environment:
    """A process's place in a run. One that nobody has started as a worker is rank 0 of a world of one."""

    launcher: str | None  # of this worker: `torchrun` (our own parent, too), or `slurm` as one of several tasks
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    run_id: str
    master_addr: str
    master_port: int
    agent_store: bool  # whether the store of torchrun's agent is at the master's address
    restarts: int  # times that this worker's group was started again
    started: float  # `time.time()` when the command, or a sweep's job, began
    scratch: str  # the folder of what the run's processes keep for a moment, where a parent has made one
    slurm_job: str | None  # the batch job that this process is part of
    slurm_task: int  # its number in there
    slurm_restarts: int  # times that SLURM has started the job again
    own_cores: bool  # whether SLURM has given this worker cores of its own
    own_gpu: bool  # and whether a GPU, so that it sees no other one


@cache
def environment() -> Environment:
    """This process's environment, as it was at the first call."""
    told = os.environ
    torchrun = "TORCHELASTIC_RUN_ID" in told
    several = int(told.get("SLURM_STEP_NUM_TASKS", "1")) > 1  # a batch script alone is no task of srun's
    task = several and (not torchrun or SLURM_TASK in told)
    slurm = not torchrun and several

    def number(name: str, alone: int) -> int:
        return int(told.get(SLURM_NAMES.get(name, "") if slurm else name, alone)) if torchrun or slurm else alone

    return Environment(
        launcher="torchrun" if torchrun else "slurm" if slurm else None,
        rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        run_id=told.get("TORCHELASTIC_RUN_ID", ""),
        master_addr=told.get("MASTER_ADDR", ""),
        master_port=int(told.get("MASTER_PORT", "0")),
        agent_store=told.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=int(told.get("TORCHELASTIC_RESTART_COUNT", "0")),
        started=float(told.get(STARTED, time.time())),
        scratch=told.get(SCRATCH, ""),
        slurm_job=told.get("SLURM_JOB_ID"),
        slurm_task=int(told.get("SLURM_PROCID", "0")),
        slurm_restarts=int(told.get("SLURM_RESTART_COUNT", "0")),
        own_cores=task and "SLURM_CPUS_PER_TASK" in told,
        own_gpu=task and told.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1",
    )


os.register_at_fork(after_in_child=environment.cache_clear)  # a worker is told its rank after it was forked

SLURM_NAMES = {  # for torchrun's; MASTER_ADDR and MASTER_PORT are the job script's to set
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "TORCHELASTIC_RUN_ID": "SLURM_JOB_ID",
}


def external_workers() -> int:
    """World size where workers exist already (torchrun, several SLURM tasks), else 0."""
    return environment().world_size if environment().launcher else 0


def export(**variables: str) -> None:
    """Sets variables for this process and those that it starts."""
    os.environ.update(variables)
    environment.cache_clear()
