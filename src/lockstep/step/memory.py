"""Where memory runs out: the line that says so."""

from typing import Any

import torch
from lightning.pytorch.utilities.memory import is_oom_error

from lockstep.arithmetic.layout import Layout
from lockstep.text import plural

MIB = 1 << 20


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory is what lacked, in an operation or in what an error was raised from."""
    if error is None:
        return False
    lacked = isinstance(error, torch.OutOfMemoryError | MemoryError) or is_oom_error(error)
    return lacked or out_of_memory(error.__cause__)


def out_of_memory_advice(error: BaseException, step_batch: Any, layout: Layout) -> str | None:
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
