"""A network as a sequence of parts: it may be cut into stages between them, and exact sums share no grid over a cut."""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from lockstep.step.compile import networks


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
