"""What has started this process, and its place in the run: read from the environment once.

On one machine our own parent (launch/parent.py) starts workers. On several an engine has started them, and each engine
has its own variables for rank and world size:

    torchrun   RANK, WORLD_SIZE, LOCAL_RANK, TORCHELASTIC_*          also our own workers: the parent sets the same
    env        RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT            any launcher that follows torch's `env://`
    mpi        OMPI_COMM_WORLD_* (Open MPI), PMI_* and MPI_LOCAL* (MPICH, Intel MPI), MV2_COMM_WORLD_* (MVAPICH)
    slurm      SLURM_PROCID and its like, in a step of several tasks
    group      none: torch's process group exists already (Ray Train)
"""

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from lockstep.errors import UserError

# Our own variables, for the processes that this one starts.
STARTED = "LOCKSTEP_STARTED"  # `time.time()` when the command, or a sweep's job, began
PARENT = "LOCKSTEP_PARENT"  # the process that has started the command from Python, and without which it ends
LAUNCHER = "LOCKSTEP_LAUNCHER"  # the engine, in a worker whose place has been written in torchrun's variables
SCRATCH = "LOCKSTEP_SCRATCH"  # the folder of what its processes keep for a moment: lockstep.launch.scratch

# Rank, world size, local rank, local world size.
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
DIALECTS = {
    ("mpi", "OMPI_COMM_WORLD_RANK"): (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("slurm", "SLURM_PROCID"): ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    ("mpi", "PMI_RANK"): ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("mpi", "MV2_COMM_WORLD_RANK"): (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
}
# Set in each of several processes by launchers whose world size is not read here.
UNREAD = ("PMIX_RANK", "PMI_RANK", "JSM_NAMESPACE_RANK", "PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK", "RANK")
# What names one start of several processes, the same in all of them.
STARTS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True)
class Environment:
    """A process's place in a run. One that nobody has started as a worker is rank 0 of a world of one."""

    launcher: str | None  # of this worker, see above; None: nobody has started it as one of several
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int  # workers on this machine; 0: the engine does not say
    run_id: str
    master_addr: str  # empty: the engine does not say
    master_port: int
    agent_store: bool  # whether the store of torchrun's agent is at the master's address
    restarts: int  # times that this worker's group was started again
    started: float  # `time.time()` when the command, or a sweep's job, began
    scratch: str  # the folder of what the run's processes keep for a moment, where a parent has made one
    slurm_job: str | None  # the batch job that this process is part of; 77_3 is job 3 of array 77
    slurm_task: int  # its number in there
    slurm_restarts: int  # times that SLURM has started the job again
    slurm_nodes: str  # the hosts of this step, as SLURM writes them
    dedicated_cores: bool  # whether SLURM has given this worker cores of its own
    dedicated_gpu: bool  # and whether a GPU, so that it sees no other one

    @property
    def started_by(self) -> str:
        """The engine, as people call it."""
        names = {"mpi": "mpirun", "slurm": "srun", "env": "the launcher", "group": "the process group's owner"}
        return names.get(self.launcher or "", self.launcher or "nobody")

    @property
    def num_nodes(self) -> int:
        """Machines of the world; of workers that are not spread evenly, one."""
        even = self.local_world_size and self.world_size % self.local_world_size == 0
        return self.world_size // self.local_world_size if even else 1


@cache
def environment() -> Environment:
    """This process's environment, as it was at the first call."""
    return read_environment(os.environ)


os.register_at_fork(after_in_child=environment.cache_clear)  # a worker gets its rank after it was forked


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Return the place in a run that some environment variables describe."""
    launcher, names = _dialect(variables)

    def number(index: int, default: int) -> int:
        return int(variables.get(names[index], default)) if names else default

    group = _ranks_of_group() if launcher is None else None
    rank, world_size = group or (number(0, 0), number(1, 1))
    task = variables.get(LAUNCHER, launcher) == "slurm"
    return Environment(
        launcher="group" if group else variables.get(LAUNCHER, launcher) if launcher else None,
        rank=rank,
        local_rank=int(variables.get("LOCAL_RANK", "0")) if group else number(2, 0),
        world_size=world_size,
        local_world_size=int(variables.get("LOCAL_WORLD_SIZE", "0")) if group else number(3, 0 if names else 1),
        run_id=variables.get("TORCHELASTIC_RUN_ID", ""),
        master_addr=variables.get("MASTER_ADDR", ""),
        master_port=int(variables.get("MASTER_PORT", "0")) or _port(variables),
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
        started=float(variables.get(STARTED, time.time())),
        scratch=variables.get(SCRATCH, ""),
        slurm_job=_slurm_job(variables),
        slurm_task=int(variables.get("SLURM_PROCID", "0")),
        slurm_restarts=int(variables.get("SLURM_RESTART_COUNT", "0")),
        slurm_nodes=variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", "")),
        dedicated_cores=task and "SLURM_CPUS_PER_TASK" in variables,
        dedicated_gpu=task and variables.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1",
    )


def _slurm_job(variables: Mapping[str, str]) -> str | None:
    """The batch job, by a name that is its own: an array's last job has the number of the whole array."""
    if "SLURM_ARRAY_TASK_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables.get("SLURM_JOB_ID")


def _dialect(variables: Mapping[str, str]) -> tuple[str | None, tuple[str, ...]]:
    """The engine that has started this process as one of several, and the names of its variables.

    What the user says in torch's own variables comes first. Open MPI comes before SLURM: it starts its daemons by
    srun, whose variables the processes below inherit. A single process of MPI's or SLURM's is started by nobody: our
    own parent may start workers below it.
    """
    if "TORCHELASTIC_RUN_ID" in variables:
        return "torchrun", TORCH
    if "RANK" in variables and variables.get("WORLD_SIZE", "").isdecimal() and int(variables["WORLD_SIZE"]) > 1:
        return "env", TORCH
    for (launcher, sign), names in DIALECTS.items():
        if sign in variables and int(variables.get(names[1], "1")) > 1:
            return launcher, names
    return None, ()


def _ranks_of_group() -> tuple[int, int] | None:
    """Rank and world size of a process group that exists already; None: there is none."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    started = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if started and dist.get_world_size() > 1 else None


def _port(variables: Mapping[str, str]) -> int:
    """A port for rank zero's store where nobody gives one: the same in all processes of one start, and below those
    that the kernel hands out."""
    start = [variables[name] for name in STARTS if name in variables] or [str(os.getppid())]
    return 20000 + int(hashlib.sha256(" ".join(start).encode()).hexdigest(), 16) % 10000


def refuse_unread(variables: Mapping[str, str]) -> None:
    """Refuse to run where several processes were started for one run and it can't be told how many, or where they
    meet: each of them would be a rank zero.

    Raises:
        UserError: naming the variable, and what starts workers that are known.
    """
    launcher, names = _dialect(variables)
    rank, world_size = (variables.get(name, "") for name in TORCH[:2])
    if launcher == "env" and not (rank.isdecimal() and int(rank) < int(world_size)):
        raise UserError(f"RANK={rank}: must be one of 0 to {int(world_size) - 1}, since WORLD_SIZE={world_size}")
    if launcher is None:
        known = {sign for (_, sign), variable_names in DIALECTS.items() if variable_names[1] in variables}
        unread = [name for name in UNREAD if name in variables and name not in known]
        unread += ["WORLD_SIZE"] * (world_size not in ("", "1"))
        slurm = "SLURM_STEP_NUM_TASKS" in variables  # which counts the tasks, whatever else is set
        alone = world_size == "1" or slurm
        if unread and not alone:
            raise UserError(
                f"{unread[0]}={variables[unread[0]]}: several processes may have been started for this run, and it "
                "can't be told which of how many this is: start it with torchrun, srun or mpirun, or set RANK, "
                f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a process alone: unset {unread[0]}"
            )
    elif launcher == "env" and not {"MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        raise UserError(
            "RANK and WORLD_SIZE are set without MASTER_ADDR and MASTER_PORT, so the ranks can't meet: set the "
            "address of rank zero and a free port there"
        )
    elif launcher == "mpi" and "MASTER_ADDR" not in variables and variables.get(names[3]) != variables[names[1]]:
        raise UserError(
            "MPI does not say where rank zero is, and the ranks are on several machines: "
            "mpirun -x MASTER_ADDR=<host of rank zero> (Intel MPI and MPICH: -genv MASTER_ADDR <host>)"
        )


def external_workers() -> int:
    """World size where workers exist already (an engine has started them), else 0."""
    return environment().world_size if environment().launcher else 0


def export(**variables: str) -> None:
    """Sets variables for this process and those that it starts."""
    os.environ.update(variables)
    environment.cache_clear()
