"""Where memory runs out: the line that says so, and a limit under which a number of pieces can be tried."""

import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.memory import is_oom_error

from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError
from lockstep.text import plural

MIB = 1 << 20


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory is what lacked, in an operation or in what an error was raised from."""
    if error is None:
        return False
    lacked = isinstance(error, torch.OutOfMemoryError | MemoryError) or is_oom_error(error)
    return lacked or out_of_memory(error.__cause__)


def advice(error: BaseException, step_batch: Any, layout: Layout) -> str | None:
    """What to say of a step that failed: that memory ran out and what takes less of it; None if it failed otherwise."""
    if not out_of_memory(error):
        return None
    peak = peak_memory()
    at = "" if peak is None else f" at {peak / MIB:.0f} MiB"
    size = plural(layout.piece_size, "sample")
    wrong = f"step {step_batch.step + 1}: out of memory{at} in {plural(layout.pieces, 'piece')} of {size}"
    finer = next(layout.finer(), None)
    if finer is None:
        return f"{wrong}; the batch_size can't be cut finer"
    return f"{wrong}; pieces={finer.pieces} (accumulate_grad_batches={finer.accumulate}) takes less"


def peak_memory() -> int | None:
    """Most bytes that this process has used so far of one of its GPUs; None on a CPU."""
    if not torch.cuda.is_initialized():
        return None
    return max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


def limit_memory(mib: float, strategy: Any) -> None:
    """From here on this process may use so much of each device of the trainer's strategy. On a CPU, what it maps as
    data may grow by that much, the stacks of threads included.

    Raises:
        UserError: a CPU whose kernel knows no such limit.
    """
    devices = getattr(strategy, "devices", None) or [strategy.root_device]  # dp's are all one process's
    if devices[0].type == "cuda":
        for device in devices:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, mib * MIB / total), device)
        return
    status = Path("/proc/self/status")
    if not status.exists():
        raise UserError(f"memory_budget={mib:g}: on a CPU, only Linux limits what a process may use")
    import resource  # not on Windows

    mapped = re.search(r"^VmData:\s*(\d+) kB", status.read_text(), re.MULTILINE)
    assert mapped is not None
    limit = int(mapped[1]) * 1024 + int(mib * MIB) * len(devices)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
