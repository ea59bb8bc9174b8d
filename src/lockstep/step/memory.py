"""The error message of a step that ran out of memory."""

import torch
from lightning.pytorch.utilities.memory import is_oom_error

from lockstep.arithmetic.layout import Layout
from lockstep.text import plural

MIB = 1 << 20


def out_of_memory(error: BaseException | None) -> bool:
    """Check whether an error, or an error that caused it, is a lack of memory."""
    if error is None:
        return False
    lacked = isinstance(error, torch.OutOfMemoryError | MemoryError) or is_oom_error(error)
    return lacked or out_of_memory(error.__cause__)


def out_of_memory_advice(error: BaseException, step: int, layout: Layout, less: str = "") -> str | None:
    """Return a message for a step whose passes ran out of memory, with a setting that takes less.

    Args:
        error: the error of the step.
        step: the number of the step, 0-based.
        layout: the run's layout.
        less: a setting with which the weights take less; empty: there is none.

    Returns:
        The message; None if the error has another cause.
    """
    if not out_of_memory(error):
        return None
    size = plural(layout.piece_size, "sample")
    wrong = _wrong(step, f"in {plural(layout.pieces, 'piece')} of {size}", layout)
    finer = next(layout.with_more_pieces(), None)
    if finer is None:
        other = f", or {less}" * bool(less)
        return f"{wrong}: use a smaller batch_size, since {layout.batch_size} can't be cut finer{other}"
    return f"{wrong}: pieces={finer.pieces} (accumulate_grad_batches={finer.accumulate}) takes less"


def optimizer_memory_advice(error: BaseException, step: int, layout: Layout, less: str = "") -> str | None:
    """Return a message for a step whose optimizer ran out of memory; see `out_of_memory_advice`.

    Its state does not depend on the pieces.
    """
    if not out_of_memory(error):
        return None
    wrong = _wrong(step, "in the optimizer", layout)
    other = f", or {less}" * bool(less)
    return f"{wrong}: use an optimizer with less state, since pieces do not change it{other}"


def _wrong(step: int, where: str, layout: Layout) -> str:
    peak = peak_memory()
    at = "" if peak is None else f" at {peak / MIB:.0f} MiB"
    on = f" with strategy={layout.strategy}" * (layout.num_devices > 1)
    return f"step {step + 1}: out of memory{at} {where}{on}"


def peak_memory() -> int | None:
    """Return the peak memory of this process on one of its GPUs, in bytes; None on a CPU."""
    if not torch.cuda.is_initialized():
        return None
    return max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
