"""A process's place in a run and the engine that started it, read once from the environment variables.

On one machine our own parent (launch/parent.py) starts the workers. On several machines an engine starts them, such as
torchrun, SLURM or MPI. Each engine has its own variables for rank and world size:

    lockstep   as torchrun, and LOCKSTEP_LAUNCHER                    our own parent sets them
    torchrun   RANK, WORLD_SIZE, LOCAL_RANK, TORCHELASTIC_*
    env        RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT            any launcher that follows torch's `env://`
    mpi        OMPI_COMM_WORLD_* (Open MPI), PMI_* and MPI_LOCAL* (MPICH, Intel MPI), MV2_COMM_WORLD_* (MVAPICH)
    slurm      SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID     in a job step of several tasks
    group      none: torch's process group exists already (Ray Train)
"""

import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lockstep.errors import UserError
from lockstep.text import plural

# Our own variables, which child processes inherit.
STARTED = "LOCKSTEP_STARTED"  # `time.time()` when the command or the sweep's job started
# Process id of the program whose call of `lockstep.train` started this command. If the program is killed, the command
# is killed too. It is not the parent of workers, launch/parent.py.
PARENT = "LOCKSTEP_PARENT"
# Its value is the name, in the table above, of what started this worker. It is set wherever Lockstep itself sets
# torchrun's variables, since the worker would otherwise count as started by torchrun.
LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"
SCRATCH = "LOCKSTEP_SCRATCH"  # the run's folder for temporary files, see `scratch_folder`
# Host and port of torchrun's store. `lockstep torchrun` sets it if the number of machines may change (--nnodes=1:3).
STORE = "LOCKSTEP_RDZV_STORE"

# The names of four variables: rank, world size, local rank, local world size.
TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
COMM_WORLD = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
# Each engine's names of the same four variables; "" if it has none. An engine is recognised by its first variable.
ENGINE_NAMES = (
    ("mpi", tuple(f"OMPI_COMM_WORLD_{name}" for name in COMM_WORLD)),
    ("slurm", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")),
    ("mpi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("mpi", tuple(f"MV2_COMM_WORLD_{name}" for name in COMM_WORLD)),
)
# If one of these is set but Lockstep finds no world size, another launcher may have started several processes.
RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "JSM_NAMESPACE_RANK", "PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK", "RANK")
# Variables that identify one start of several processes and have the same value in all of them.
START_IDS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True)
class Environment:
    """A process's place in a run. A process that is not a worker has rank 0 and world size 1."""

    launcher: str | None  # a name of the table above: what started this process as a worker; None: nothing did
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int  # workers on this machine; 0: the engine does not set it
    run_id: str  # TORCHELASTIC_RUN_ID: with torchrun its --rdzv-id; empty: not set
    master_addr: str  # empty: the engine does not set it
    master_port: int
    agent_store: bool  # whether the store of torchrun's agent is at the master's address
    rdzv_store: str  # host and port of torchrun's store; empty: `lockstep torchrun` does not set it
    restarts: int  # how many times the workers were restarted
    started: float  # `time.time()` when the command or the sweep's job started
    scratch: str  # the run's folder for temporary files; empty: no parent has created one
    slurm_job: str | None  # the batch job of this process; 77_3 is job 3 of array 77
    slurm_task: int  # the number of this process in its job step, 0-based
    slurm_restarts: int  # how many times SLURM has restarted the job
    slurm_nodes: str  # the hosts of this job step, in SLURM's notation
    dedicated_cores: bool  # whether SLURM has assigned cores to this worker alone
    dedicated_gpu: bool  # whether SLURM has assigned one GPU to this worker alone, the only one that it sees

    @property
    def started_by(self) -> str:
        """The launcher's name in messages."""
        names = {"mpi": "mpirun", "slurm": "srun", "env": "the launcher", "group": "the process group's owner"}
        return names.get(str(self.launcher), str(self.launcher))

    @property
    def rdzv_name(self) -> str:
        """The name that the user has given torchrun's rendezvous by --rdzv-id; empty without one.

        Without it torchrun gives the name "none", and with --standalone a random one.
        """
        default = self.run_id in ("", "none") or re.fullmatch(r"[\da-f-]{36}", self.run_id)
        return "" if self.launcher != "torchrun" or default else self.run_id

    @property
    def external_workers(self) -> int:
        """The number of all workers of the run if another process has started this worker, else 0."""
        return self.world_size if self.launcher else 0

    @property
    def num_nodes(self) -> int:
        """The number of machines; 1 if they have unequal numbers of workers."""
        divisible = self.local_world_size and self.world_size % self.local_world_size == 0
        return self.world_size // self.local_world_size if divisible else 1


@cache
def environment() -> Environment:
    """Return this process's environment as it was at the first call."""
    variables = os.environ
    launcher, names = _launcher_and_names()
    group = _ranks_of_group() if launcher is None else None
    if group:
        launcher, names = "group", TORCH_NAMES

    def number(index: int, default: int) -> int:  # `index` is a position in `names`
        return int(variables.get(names[index], default)) if names else default

    rank, world_size = group or (number(0, 0), number(1, 1))
    return Environment(
        launcher=launcher,
        rank=rank,
        local_rank=number(2, 0),
        world_size=world_size,
        local_world_size=number(3, 0 if names else 1),
        run_id=variables.get("TORCHELASTIC_RUN_ID", ""),
        master_addr=variables.get("MASTER_ADDR", ""),
        master_port=int(variables.get("MASTER_PORT", "0")) or _port(),
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        rdzv_store=variables.get(STORE, ""),
        restarts=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
        started=float(variables.get(STARTED, time.time())),
        scratch=variables.get(SCRATCH, ""),
        slurm_job=_slurm_job(),
        slurm_task=int(variables.get("SLURM_PROCID", "0")),
        slurm_restarts=int(variables.get("SLURM_RESTART_COUNT", "0")),
        slurm_nodes=variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", "")),
        dedicated_cores=launcher == "slurm" and "SLURM_CPUS_PER_TASK" in variables,
        dedicated_gpu=launcher == "slurm" and variables.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1",
    )


os.register_at_fork(after_in_child=environment.cache_clear)  # a worker gets its rank after the fork


def _slurm_job() -> str | None:
    """Return the name of the batch job in SLURM's commands, `<array>_<task>` in an array.

    There the SLURM_JOB_ID of the last job is also the id of the array, so it would name the whole array.
    """
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def _launcher_and_names() -> tuple[str | None, tuple[str, ...]]:
    """Return the launcher whose variables are set, and their names in the order of TORCH_NAMES.

    Without such a launcher return None and (). Torch's own variables come first, because a user or Lockstep may have
    set them. Open MPI comes before SLURM: it starts its daemons with srun, and its processes inherit srun's variables.
    A single process of MPI or SLURM counts as having no launcher, so that it may start workers as our own parent does.
    """
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" in variables:
        return variables.get(LAUNCHER_VARIABLE, "torchrun"), TORCH_NAMES
    if "RANK" in variables and variables.get("WORLD_SIZE", "").isdecimal() and int(variables["WORLD_SIZE"]) > 1:
        return "env", TORCH_NAMES
    for launcher, names in ENGINE_NAMES:
        if names[0] in variables and int(variables.get(names[1], "1")) > 1:
            return launcher, names
    return None, ()


def _ranks_of_group() -> tuple[int, int] | None:
    """Return rank and world size of a process group that exists already; None without one."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    exists = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if exists and dist.get_world_size() > 1 else None


def _port() -> int:
    """Return a port for rank zero's store if MASTER_PORT is not set.

    It is the same in all processes of one start, and below the range from which the kernel assigns ports.
    """
    start_ids = [os.environ[name] for name in START_IDS if name in os.environ] or [str(os.getppid())]
    return 20000 + int(hashlib.sha256(" ".join(start_ids).encode()).hexdigest(), 16) % 10000


def refuse_unknown_rank() -> None:
    """Refuse to run if several processes were started but their ranks or rank zero's address are unknown.

    Each of the processes would act as rank zero.

    Raises:
        UserError: it names the variable that is wrong or lacks its counterpart, and what to do.
    """
    variables = os.environ
    launcher, names = _launcher_and_names()
    rank, world_size = (variables.get(name, "") for name in TORCH_NAMES[:2])
    if launcher == "env" and not (rank.isdecimal() and int(rank) < int(world_size)):
        raise UserError(f"RANK={rank}: must be one of 0 to {int(world_size) - 1}, since WORLD_SIZE={world_size}")
    if launcher is None:
        # An engine's rank is known only if its variable for the world size is set too.
        known_ranks = {its_names[0] for _, its_names in ENGINE_NAMES if its_names[1] in variables}
        suspicious_names = [name for name in RANK_VARIABLES if name in variables and name not in known_ranks]
        suspicious_names += ["WORLD_SIZE"] * (world_size not in ("", "1"))
        # If srun had started several tasks, `launcher` would be slurm.
        is_single_task = "SLURM_STEP_NUM_TASKS" in variables
        if suspicious_names and world_size != "1" and not is_single_task:
            name = suspicious_names[0]
            raise UserError(
                f"{name}={variables[name]} suggests that this is one of several processes, but its rank or "
                "world size is unknown: start it with torchrun, srun or mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR "
                f"and MASTER_PORT; for a single process unset {name}"
            )
    elif launcher == "env" and not {"MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        raise UserError(
            "RANK and WORLD_SIZE are set, but not both MASTER_ADDR and MASTER_PORT: set them to the address of rank "
            "zero's machine and a free port there"
        )
    elif launcher == "mpi" and "MASTER_ADDR" not in variables and variables.get(names[3]) != variables[names[1]]:
        raise UserError(
            "MASTER_ADDR is not set, and MPI has started ranks on several machines: use "
            "mpirun -x MASTER_ADDR=<host of rank zero> (Intel MPI and MPICH: -genv MASTER_ADDR <host>)"
        )


def external_workers() -> int:
    """Return the world size if this process is a worker that another process has started, else 0.

    The other process is an engine or, on one machine, our own parent. So the result is the number of all workers of the
    run, this one included. The parent itself gets 0.
    """
    return environment().external_workers


def ends_survivors() -> str:
    """Return why the engine of this worker would end or restart the others when one dies, and what to give instead.

    Empty: it leaves them alone, as far as its variables tell.
    """
    variables, launcher = os.environ, environment().launcher
    if launcher == "torchrun" and variables.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        return "torchrun would start a dead worker again, which the others do not wait for: leave out --max-restarts"
    if launcher == "mpi" and variables.get("OMPI_MCA_orte_enable_recovery") not in ("1", "true"):
        return "mpirun would end all ranks when one dies: give mpirun --enable-recovery, which Open MPI has"
    if launcher == "group":
        return "the process group is of another program, and can't be made anew: leave it out"
    return ""


def devices_of_engine(chosen: Mapping[str, Any]) -> dict[str, int]:
    """Return `devices`, of one machine, and `num_nodes` for which an engine has started this worker and the others.

    Args:
        chosen: those of the two that the user has chosen.

    Raises:
        UserError: the user has chosen other numbers.
    """
    here = environment()
    started = {"devices": here.external_workers // here.num_nodes, "num_nodes": here.num_nodes}
    for key, count in started.items():
        if chosen.get(key, count) not in (count, "auto", -1):
            raise UserError(
                f"{key}={chosen[key]}: {here.started_by} has started {plural(here.external_workers, 'worker')} on "
                f"{plural(started['num_nodes'], 'machine')}: give {key}={count}, or leave it out"
            )
    return started


def export(**variables: str) -> None:
    """Set environment variables for this process and its children. `environment` then reads them anew."""
    os.environ.update(variables)
    environment.cache_clear()
