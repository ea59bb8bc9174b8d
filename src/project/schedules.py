"""Learning rates as pure functions of the optimizer step; conf/scheduler/ names them, as it does torch's."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def onecycle(
    optimizer: Optimizer, total_steps: int, peak: float = 0.3, start: float = 0.04, final: float = 0.0
) -> LambdaLR:
    """Linear from `start` up to lr, reached after the fraction `peak` of the run, then half a cosine down to `final`.

    Smith and Topin, Super-Convergence, 2018. total_steps counts the whole run's optimizer steps; start and final are
    fractions of lr.
    """
    if not 0 < peak < 1:
        raise ValueError(f"peak={peak}: must lie between 0 and 1, it is a fraction of the run")
    _check_fractions(start=start, final=final)
    top = peak * total_steps

    def factor(step: int) -> float:
        if step < top:
            return start + (1 - start) * step / top
        return _half_cosine(1.0, final, (step - top) / (total_steps - top))

    return LambdaLR(optimizer, factor)


def cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> LambdaLR:
    """Linear warm-up over warmup_steps, then half a cosine from lr down to its fraction `final` when the run ends.

    Loshchilov and Hutter, SGDR, 2017; warm-up: Goyal et al., Accurate, Large Minibatch SGD, 2017.
    """
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps}: must lie in 0..{total_steps}, the run's optimizer steps")
    _check_fractions(final=final)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return _half_cosine(1.0, final, (step - warmup_steps) / max(1, total_steps - warmup_steps))

    return LambdaLR(optimizer, factor)


def _half_cosine(start: float, end: float, part: float) -> float:
    """From start (part=0) to end (part>=1)."""
    return end + (start - end) * (1 + math.cos(math.pi * min(part, 1.0))) / 2


def _check_fractions(**fractions: float) -> None:
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: must lie in 0..1, it is a fraction of lr")
