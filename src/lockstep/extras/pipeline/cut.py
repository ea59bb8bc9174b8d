"""Decide where a network is cut into stages."""

from collections.abc import Sequence
from functools import cache

from torch import nn

from lockstep.errors import UserError


def stage_starts(module: nn.Module, parts: Sequence[nn.Module], split: Sequence[int | str], stages: int) -> list[int]:
    """Return the numbers of the parts with which the second and later stages begin, as `strategy.split` gives them.

    Args:
        module: the module that contains the parts.
        parts: the network's parts in order.
        split: numbers or names of parts.
        stages: number of stages.

    Raises:
        UserError: A part does not exist, their number does not fit the stages, or they are out of order.
    """
    paths = {id(layer): name for name, layer in module.named_modules()}
    names = [paths.get(id(part), str(at)).rpartition(".")[2] for at, part in enumerate(parts)]
    setting = f"strategy.split=[{','.join(map(str, split))}]"
    if unknown := [part for part in split if part not in names and part not in range(len(parts))]:
        raise UserError(
            f"{setting}: there is no part {unknown[0]}; known: 0 to {len(parts) - 1}, or {', '.join(names)}"
        )
    starts = [part if isinstance(part, int) else names.index(part) for part in split]
    if len(starts) != stages - 1 or sorted({0, *starts}) != [0, *starts]:
        raise UserError(f"{setting}: must name the first part of each later stage, {stages - 1} in all")
    return starts


def balanced(seconds: Sequence[float], stages: int) -> list[int]:
    """Return the parts with which the second and later stages begin, so that the slowest stage is as fast as possible.

    Args:
        seconds: time of each part.
        stages: number of stages.
    """

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the time of the slowest of `left` stages over the parts from `start` on, and their first parts."""
        if left == 1:
            return sum(seconds[start:]), ()
        cuts = ((cut, best(cut, left - 1)) for cut in range(start + 1, len(seconds) - left + 2))
        return min((max(sum(seconds[start:cut]), slowest), (cut, *later)) for cut, (slowest, later) in cuts)

    return list(best(0, stages)[1])
