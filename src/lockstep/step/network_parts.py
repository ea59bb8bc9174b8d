"""A network as parts in a row: where it may be cut into stages, and where exact sums begin a new grid."""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from lockstep.step.compile import networks


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The parts that a piece passes one after the other: what `stages()` returns, the module's own or its only
    network's; else the children of its only network, if that is an nn.Sequential. Empty where there is neither."""
    nets = list(networks(module))
    only = nets if len(nets) == 1 else []
    for owner in (module, *only):
        stages: Any = getattr(type(owner), "stages", None)
        if callable(stages):
            return list(stages(owner))
    return list(only[0]) if only and isinstance(only[0], nn.Sequential) else []


def contents(part: nn.Module) -> list[Any]:
    """All parameters, buffers and layers."""
    return [*part.parameters(), *part.buffers(), *part.modules()]


def segment_ids(module: nn.Module, things: Iterable[Any]) -> list[int]:
    """For each of some parameters or layers of a module a number that grows where the next one is in another part.
    Exact sums share no grid over such a border, and so are the same wherever the network is cut."""
    part_of = {id(thing): at for at, part in enumerate(parts_of(module)) for thing in contents(part)}
    parts = [part_of.get(id(thing)) for thing in things]
    borders = (before != now for before, now in pairwise(parts))
    return list(accumulate(borders, initial=0))[: len(parts)]
