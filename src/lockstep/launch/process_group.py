"""What the ranks of a run exchange: small values, files, and decisions that all of them share before training."""

import json
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lockstep.errors import UserError
from lockstep.files import write
from lockstep.launch.environment import Environment, environment
from lockstep.launch.rendezvous import group_store, join_external

T = TypeVar("T")


class TensorHeader(NamedTuple):
    """What a rank sends before a tensor that a user's module gathers.

    Attributes:
        what: what is gathered, in words; the same on all ranks.
        shape: the tensor's shape.
        dtype: the tensor's dtype.
    """

    what: str
    shape: tuple[int, ...]
    dtype: Any


def broadcast_from_rank_zero(value: T) -> T:
    """Return rank zero's value; in a process that is not a worker, its own. All ranks must call it."""
    return gather_objects(value)[0]


def gather_objects(value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks. All ranks must call it.

    Args:
        value: this rank's value; it must be picklable.
        group: the process group; None: the default group.

    Returns:
        A list with the value of each rank, in the order of ranks. In a process that is not a worker it has one value.

    Raises:
        UserError: a rank gathers a user's tensor here, and another one something else.
    """
    import torch.distributed as dist

    join_external()
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    _check_same_call(values)
    return values


def _check_same_call(values: Sequence[Any]) -> None:
    """Check that all ranks gather the same thing.

    Ranks get out of step if a user's module gathers a list of one tensor per batch, or gathers on rank zero only.

    Raises:
        UserError: they do not.
    """
    calls = [value.what if isinstance(value, TensorHeader) else "" for value in values]
    if len(set(calls)) > 1:
        first = next(rank for rank, call in enumerate(calls) if call)
        other = next(rank for rank, call in enumerate(calls) if call != calls[first])
        does = f"is in {calls[other]}" if calls[other] else "is not"
        raise UserError(
            f"rank {first} is in {calls[first]}, and rank {other} {does}: "
            "all ranks must gather the same values, in the same order and number"
        )


def broadcast_file(path: Path | None, source: int = 0, group: Any = None) -> memoryview | None:
    """Send a file from one rank to all ranks of a group. Return its bytes on all of them; None if there is no file.

    Args:
        path: the file on the rank `source`, or None if it has no file. Other ranks pass None.
        source: the rank that sends.
        group: the process group; None: the default group.
    """
    import torch

    mine = None if path is None else torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    return _broadcast(mine, source, group)


def broadcast_bytes(content: bytearray | None, source: int) -> memoryview | None:
    """Send bytes from one rank to all ranks. Return them on all ranks. Ranks that do not send pass None."""
    import torch

    return _broadcast(None if content is None else torch.frombuffer(content, dtype=torch.uint8), source)


def _broadcast(mine: Any, source: int, group: Any = None) -> memoryview | None:
    """Send a tensor of bytes from one rank to all ranks of a group. Return the bytes on all of them; None: none."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return None if mine is None else mine.numpy().data
    size = torch.tensor(-1 if mine is None else mine.numel())
    dist.broadcast(size, source, group)
    if size < 0:
        return None
    content = torch.empty(int(size), dtype=torch.uint8) if mine is None else mine
    dist.broadcast(content, source, group)
    return content.numpy().data


def barrier_with_timeout(name: str, seconds: float, here: Environment | None = None, store: Any = None) -> bool:
    """Wait until all ranks have called this with the same name. Return False if that takes longer than `seconds`.

    Args:
        here: this rank's place in the run; None: that of this process.
        store: the store of the ranks' group; None: that of the default group.
    """
    from torch.distributed import DistError

    here, store = here or environment(), store or group_store()
    if store is None:
        return False
    keys = [f"{name} {rank}" for rank in range(here.world_size)]
    try:
        store.set(keys[here.rank], "")
        store.wait(keys, timedelta(seconds=seconds))
    except DistError:
        return False
    return True


# --- decisions that external workers share before training ---


def decide_on_rank_zero(what: str, make: Callable[[], Any], here: Environment | None = None) -> Any:
    """Call `make` on rank zero and return its result on all ranks. Without external workers, call it in this process.

    torchrun restarts workers and may give rank zero to a machine that joined later. So each machine stores the decided
    values in a file for as long as its torchrun agent runs, and a value stored on any machine is used by all.

    Args:
        what: the value's name, the same on all ranks.
        make: called on rank zero if no machine has stored the value; must return plain data.
        here: this rank's place in the run; None: that of this process.

    Raises:
        UserError: `make` raised it on rank zero; all ranks raise it.
    """
    here = here or environment()
    if not here.external_workers:
        return make()
    file = _decisions_file(here)
    stored = json.loads(file.read_text()) if file and file.exists() else {}
    decided = next((each for each in gather_objects(stored.get(what)) if each is not None), None)
    answer = ("", decided)
    if decided is None and here.rank == 0:
        try:
            answer = ("", json.loads(json.dumps(make())))
        except UserError as refusal:
            answer = (str(refusal), None)
    refused, value = broadcast_from_rank_zero(answer)
    if refused:
        raise UserError(refused)
    if file and here.local_rank == 0:
        with suppress(OSError):  # without the file, a restart calls `make` again
            # atomically: the machine's other ranks may read the file already, for the next decision
            write(file, json.dumps({**stored, what: value}).encode())
    return value


def remove_decisions() -> None:
    """Remove this machine's file of decided values. Call it when the run is completed."""
    if (file := _decisions_file(environment())) and environment().local_rank == 0:
        file.unlink(missing_ok=True)


def _decisions_file(here: Environment) -> Path | None:
    """Return the file with the decided values of this torchrun agent; None if torchrun did not start this process.

    The file name contains the agent's process id and start time, so a later agent never reads it. Remove the files of
    agents that have exited.
    """
    if here.launcher != "torchrun":
        return None
    agent = os.getppid()
    for other in Path(tempfile.gettempdir()).glob("lockstep-agent-*.json"):
        with suppress(OSError, ValueError):
            pid, began = map(int, other.stem.split("-")[2:])
            if _start_time(pid) != began:
                other.unlink()
    return Path(tempfile.gettempdir(), f"lockstep-agent-{agent}-{_start_time(agent)}.json")


def _start_time(pid: int) -> int:
    """Return when a process started, in kernel ticks since boot; 0 if it has exited. See proc(5)."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def ranks_writing_in(folder: Path, here: Environment | None = None) -> list[int]:
    """Return the ranks that write into the run's folder. All ranks must call it.

    These are rank zero and the first rank of each machine that does not see rank zero's folder. The latter keep copies
    of the checkpoints.

    Args:
        folder: the run's folder; each machine has one of this name in its own `outputs`.
        here: this rank's place in the run; None: that of this process.
    """
    here = here or environment()
    if here.external_workers <= 1:
        return [0]
    sign = broadcast_from_rank_zero(uuid.uuid4().hex)
    mark = folder / f".{sign}"
    if here.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    broadcast_from_rank_zero(None)  # wait until rank zero has created the file
    rows = gather_objects((here.local_rank == 0, mark.exists()))
    if here.rank == 0:
        mark.unlink(missing_ok=True)
    return [0, *(rank for rank, (first, sees) in enumerate(rows) if rank and first and not sees)]
