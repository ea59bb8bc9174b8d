"""What the workers that an engine has started agree on before they train: one value each, and who writes in the run's
folder."""

import json
import os
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.process_group import broadcast_from_rank_zero, gather_objects


def decide_on_rank_zero(what: str, make: Callable[[], Any]) -> Any:
    """Return what rank zero makes, on all ranks of workers that an engine has started; else what this process makes.

    torchrun starts workers again, and may give rank zero to a machine that joins later. So the workers of each machine
    remember what was agreed on for as long as the agent lives that started them, and what one remembers holds for all.

    Args:
        what: the value's name, the same on all ranks.
        make: called on rank zero if nobody remembers; its result is plain data.

    Raises:
        UserError: `make`'s, on all ranks.
    """
    if not external_workers():
        return make()
    memory = _memory()
    remembered = memory and json.loads(memory.read_text() if memory.exists() else "{}")
    decided = next((each for each in gather_objects((remembered or {}).get(what)) if each is not None), None)
    answer = ("", decided)
    if decided is None and environment().rank == 0:
        try:
            answer = ("", json.loads(json.dumps(make())))
        except UserError as refusal:
            answer = (str(refusal), None)
    refused, value = broadcast_from_rank_zero(answer)
    if refused:
        raise UserError(refused)
    if memory and environment().local_rank == 0:
        with suppress(OSError):  # without it, a later start makes the value anew
            memory.write_text(json.dumps({**(remembered or {}), what: value}))
    return value


def forget_decisions() -> None:
    """Remove what this machine's workers remember: their run is completed, and the agent ends too."""
    if (memory := _memory()) and environment().local_rank == 0:
        memory.unlink(missing_ok=True)


def _memory() -> Path | None:
    """The file in which the workers of one torchrun agent remember values; None under another engine.

    It is named by the agent's process and when that began, so a later agent never reads it. Those of agents that are
    gone are removed.
    """
    if environment().launcher != "torchrun":
        return None
    agent = os.getppid()
    for other in Path(tempfile.gettempdir()).glob("lockstep-agent-*.json"):
        with suppress(OSError, ValueError):
            pid, began = map(int, other.stem.split("-")[2:])
            if _start_time(pid) != began:
                other.unlink()
    return Path(tempfile.gettempdir(), f"lockstep-agent-{agent}-{_start_time(agent)}.json")


def _start_time(pid: int) -> int:
    """When a process began, in the kernel's ticks since the machine did; 0: it is gone. See proc(5)."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def ranks_with_folder(folder: Path) -> list[int]:
    """Return the ranks that write in the run's folder: rank zero, and one of each machine that does not see rank zero's
    folder, which keeps copies of its checkpoints. All ranks call it.

    Args:
        folder: the run's; each machine has one of this name in its own `outputs`.
    """
    if external_workers() <= 1:
        return [0]
    sign = broadcast_from_rank_zero(uuid.uuid4().hex)
    mark = folder / f".{sign}"
    if environment().rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    broadcast_from_rank_zero(None)  # now it is there
    rows = gather_objects((environment().local_rank == 0, mark.exists()))
    if environment().rank == 0:
        mark.unlink(missing_ok=True)
    return [0, *(rank for rank, (first, sees) in enumerate(rows) if rank and first and not sees)]
