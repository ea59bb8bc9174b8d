"""Where a network is cut into stages."""

from collections.abc import Sequence
from functools import cache

from torch import nn

from lockstep.errors import UserError


def stage_starts(module: nn.Module, parts: Sequence[nn.Module], split: Sequence[int | str], stages: int) -> list[int]:
    """The parts with which the second and later stages begin, by `strategy.split`: their numbers or names.

    Raises:
        UserError: there is no such part, or not as many as stages, or they are out of order.
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
        raise UserError(f"{setting}: must be the {stages - 1} parts that the later ones of {stages} stages begin with")
    return starts


def balanced(seconds: Sequence[float], stages: int) -> list[int]:
    """The parts with which the second and later stages begin, so that the slowest takes the least time."""

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The slowest of the last `left` stages, the first of which begins with part `start`, and where others do."""
        if left == 1:
            return sum(seconds[start:]), ()
        cuts = ((cut, best(cut, left - 1)) for cut in range(start + 1, len(seconds) - left + 2))
        return min((max(sum(seconds[start:cut]), slowest), (cut, *later)) for cut, (slowest, later) in cuts)

    return list(best(0, stages)[1])
