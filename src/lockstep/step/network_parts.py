"""The networks of a module. One may be a sequence of parts, between which it can be cut into stages."""

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

from torch import nn


def networks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module that have parameters.

    An nn.ModuleList or nn.ModuleDict is never called itself, so its members are yielded instead.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from networks(child)
        elif any(True for _ in child.parameters()):
            yield child


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that a piece passes one after the other.

    These are the result of `stages()`, a method of the module or of its only network; otherwise the children of its
    only network if this is an nn.Sequential; otherwise none.
    """
    nets = list(networks(module))
    only = nets if len(nets) == 1 else []
    for owner in (module, *only):
        stages: Any = getattr(type(owner), "stages", None)
        if callable(stages):
            return list(stages(owner))
    return list(only[0]) if only and isinstance(only[0], nn.Sequential) else []


def contents(part: nn.Module) -> list[Any]:
    """Return all parameters, buffers and layers of a part."""
    return [*part.parameters(), *part.buffers(), *part.modules()]


def segment_ids(module: nn.Module, things: Iterable[Any]) -> list[int]:
    """Return the segment of each parameter or layer: a new segment begins with each new part.

    Exact sums share no grid between segments, so they are the same wherever the network is cut into stages.

    Args:
        module: the module that owns them; see `parts_of`.
        things: parameters, buffers or layers of the module.

    Returns:
        The segment's number for each of `things`, ascending from 0.
    """
    part_of = {id(thing): at for at, part in enumerate(parts_of(module)) for thing in contents(part)}
    parts = [part_of.get(id(thing)) for thing in things]
    borders = (before != now for before, now in pairwise(parts))
    return list(accumulate(borders, initial=0))[: len(parts)]
