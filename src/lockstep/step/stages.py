"""A network as parts in a row, and where a pipeline cuts it into stages."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from lockstep.errors import UserError
from lockstep.step.compile import networks


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The parts that a piece passes one after the other: what `stages()` returns, the module's own or its only
    network's; else the children of its only network, if that is an nn.Sequential. Empty where there is neither."""
    found = list(networks(module))
    only = found if len(found) == 1 else []
    for owner in (module, *only):
        stages: Any = getattr(type(owner), "stages", None)
        if callable(stages):
            return list(stages(owner))
    return list(only[0]) if only and isinstance(only[0], nn.Sequential) else []


def contents(part: nn.Module) -> list[Any]:
    """All parameters, buffers and layers."""
    return [*part.parameters(), *part.buffers(), *part.modules()]


def runs(module: nn.Module, things: Iterable[Any]) -> list[int]:
    """For each of some parameters or layers of a module a number that grows where the next one is in another part.
    Exact sums share no grid over such a border, and so are the same wherever a pipeline is cut."""
    part_of = {id(thing): at for at, part in enumerate(parts_of(module)) for thing in contents(part)}
    parts = [part_of.get(id(thing)) for thing in things]
    borders = (before != now for before, now in pairwise(parts))
    return list(accumulate(borders, initial=0))[: len(parts)]


def chosen(module: nn.Module, parts: Sequence[nn.Module], split: Sequence[int | str], stages: int) -> list[int]:
    """The parts with which the second and later stages begin, by `strategy.split`: their numbers or names.

    Raises:
        UserError: there is no such part, or not as many as stages, or they are out of order.
    """
    paths = {id(layer): name for name, layer in module.named_modules()}
    names = [paths.get(id(part), str(at)).rpartition(".")[2] for at, part in enumerate(parts)]
    given = f"strategy.split=[{','.join(map(str, split))}]"
    if unknown := [part for part in split if part not in names and part not in range(len(parts))]:
        raise UserError(f"{given}: there is no part {unknown[0]}; known: 0 to {len(parts) - 1}, or {', '.join(names)}")
    starts = [part if isinstance(part, int) else names.index(part) for part in split]
    if len(starts) != stages - 1 or sorted({0, *starts}) != [0, *starts]:
        raise UserError(f"{given}: must be the {stages - 1} parts that the later ones of {stages} stages begin with")
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
