"""Learning rate as a pure function of the optimizer step, so that a resumed run needs no schedule state."""

import math
from collections.abc import Callable
from typing import Any

from lockstep.arithmetic.layout import Refusal

Factor = Callable[[int], float]  # optimizer step (0-based) -> fraction of lr


def _between(start: float, end: float, part: float) -> float:
    """Half a cosine from start (part=0) to end (part>=1)."""
    return end + (start - end) * (1 + math.cos(math.pi * min(part, 1.0))) / 2


def cosine(total: int, warmup_steps: int = 0, final: float = 0.0) -> Factor:
    """Linear warm-up, then half a cosine from 1, which reaches `final` when the run ends.

    Loshchilov and Hutter, SGDR, 2017; warm-up: Goyal et al., Accurate, Large Minibatch SGD, 2017.
    """
    if not 0 <= warmup_steps <= total:
        raise ValueError(f"warmup_steps={warmup_steps} must lie in 0..{total}, the run's optimizer steps")
    if not 0 <= final <= 1:
        raise ValueError(f"final={final} must lie in 0..1, it is a fraction of lr")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return _between(1.0, final, (step - warmup_steps) / max(1, total - warmup_steps))

    return factor


def constant(total: int, warmup_steps: int = 0) -> Factor:
    """Linear warm-up, then lr."""
    return cosine(total, warmup_steps, final=1.0)


def onecycle(total: int, peak: float = 0.3, start: float = 0.04, final: float = 0.0) -> Factor:
    """Linear from `start` up to 1, reached after the fraction `peak` of the run, then half a cosine down to `final`.

    Smith and Topin, Super-Convergence, 2018.
    """
    if not 0 < peak < 1:
        raise ValueError(f"peak={peak} must lie between 0 and 1, it is a fraction of the run")
    if not (0 <= start <= 1 and 0 <= final <= 1):
        raise ValueError(f"start={start} and final={final} must lie in 0..1, they are fractions of lr")
    top = peak * total

    def factor(step: int) -> float:
        if step < top:
            return start + (1 - start) * step / top
        return _between(1.0, final, (step - top) / (total - top))

    return factor


SCHEDULES: dict[str, Callable[..., Factor]] = {"constant": constant, "cosine": cosine, "onecycle": onecycle}


def lr_factor(total_steps: int, name: str = "constant", **options: Any) -> Factor:
    """Schedule `name` over a run of total_steps optimizer steps. Refusal: unknown name or option, or a bad value."""
    if name not in SCHEDULES:
        raise Refusal(f"scheduler={name}: unknown, one of {', '.join(SCHEDULES)}")
    if total_steps < 1:
        raise Refusal(f"total_steps={total_steps}: a run has at least one optimizer step")
    try:
        return SCHEDULES[name](total_steps, **options)
    except (TypeError, ValueError) as error:
        raise Refusal(f"scheduler={name}: {error}") from error
