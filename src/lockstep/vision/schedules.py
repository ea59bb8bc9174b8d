"""Compute learning rates as pure functions of the optimizer step. conf/scheduler/ names them beside those of torch."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def onecycle(
    optimizer: Optimizer, total_steps: int, peak: float = 0.3, start: float = 0.04, final: float = 0.0
) -> LambdaLR:
    """Return a schedule that rises linearly to lr and then falls along half a cosine.

    Source: Smith and Topin, Super-Convergence, 2018.

    Args:
        total_steps: optimizer steps of the whole run.
        peak: fraction of the run at which lr is reached.
        start: fraction of lr at the first step.
        final: fraction of lr at the end.
    """
    if not 0 < peak < 1:
        raise ValueError(f"peak={peak}: must be a fraction of the run, between 0 and 1")
    _check_fractions(start=start, final=final)
    peak_step = peak * total_steps

    def factor(step: int) -> float:
        if step < peak_step:
            return start + (1 - start) * step / peak_step
        return _half_cosine(1.0, final, (step - peak_step) / (total_steps - peak_step))

    return LambdaLR(optimizer, factor)


def cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> LambdaLR:
    """Return a schedule that rises linearly to lr in the warm-up and then falls along half a cosine.

    Sources: Loshchilov and Hutter, SGDR, 2017; for the warm-up Goyal et al., Accurate, Large Minibatch SGD, 2017.

    Args:
        total_steps: optimizer steps of the whole run.
        warmup_steps: optimizer steps of the warm-up.
        final: fraction of lr at the end.
    """
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps}: must be 0 to {total_steps}, the optimizer steps of the run")
    _check_fractions(final=final)

    def factor(step: int) -> float:
        return _half_cosine(1.0, final, (step - warmup_steps) / max(1, total_steps - warmup_steps))

    return LambdaLR(optimizer, _after_warmup(warmup_steps, factor))


def constant(optimizer: Optimizer, warmup_steps: int = 0) -> LambdaLR:
    """Return a schedule that rises linearly to lr in the warm-up and then stays there.

    Args:
        warmup_steps: optimizer steps of the warm-up.
    """
    return LambdaLR(optimizer, _after_warmup(warmup_steps, lambda step: 1.0))


def _after_warmup(warmup_steps: int, factor: Callable[[int], float]) -> Callable[[int], float]:
    """Return a factor of lr by step that rises linearly to 1 in the warm-up, and is `factor` afterwards."""
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: must be a whole number of at least 0")
    return lambda step: (step + 1) / warmup_steps if step < warmup_steps else factor(step)


def _half_cosine(start: float, end: float, progress: float) -> float:
    """Return the value on half a cosine from `start` (progress=0) to `end` (progress>=1)."""
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def _check_fractions(**fractions: float) -> None:
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: must be a fraction of lr, 0 to 1")
