"""A network as parts in a row, and where a pipeline cuts it into stages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.arithmetic.layout import Refusal
from lockstep.step.networks import networks

MEASURED = 3  # times; the fastest counts


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The parts that a piece passes one after the other: what `stages()` returns, the module's own or its only
    network's; else the children of its only network, if that is an nn.Sequential. Empty where there is neither."""
    found = list(networks(module))
    for owner in (module, *found[:1]) if len(found) == 1 else (module,):
        if callable(getattr(type(owner), "stages", None)):
            return list(owner.stages())  # type: ignore[operator]
    return list(found[0]) if len(found) == 1 and isinstance(found[0], nn.Sequential) else []


def runs(module: nn.Module, things: Iterable[Any]) -> list[int]:
    """For each of some parameters or layers of a module a number that grows where the next one is in another part.

    Exact sums share no grid over such a border, so that they are the same wherever a pipeline is cut.
    """
    part_of = {id(thing): at for at, part in enumerate(parts_of(module)) for thing in contents(part)}
    found, before = [0], None
    for at, thing in enumerate(things):
        part = part_of.get(id(thing))
        found.append(found[-1] + (at > 0 and part != before))
        before = part
    return found[1:]


def contents(part: nn.Module) -> list[Any]:
    """All parameters and layers."""
    return [*part.parameters(), *part.modules()]


def starts_of(module: nn.Module, parts: Sequence[nn.Module], split: Sequence[int | str], stages: int) -> list[int]:
    """Where `strategy.split` wants the second and later stages to begin: numbers or names of parts.

    Raises:
        Refusal: there is no such part, or not as many as stages, or they are out of order.
    """
    paths = {id(layer): name for name, layer in module.named_modules()}
    names = [paths.get(id(part), str(at)).rpartition(".")[2] for at, part in enumerate(parts)]
    given = f"strategy.split=[{','.join(map(str, split))}]"
    if unknown := [part for part in split if part not in names and part not in range(len(parts))]:
        raise Refusal(f"{given}: there is no part {unknown[0]}; known: 0 to {len(parts) - 1}, or {', '.join(names)}")
    starts = [part if isinstance(part, int) else names.index(part) for part in split]
    if len(starts) != stages - 1 or sorted({0, *starts}) != [0, *starts]:
        raise Refusal(f"{given}: must be the {stages - 1} parts that the later ones of {stages} stages begin with")
    return starts


def balanced(seconds: Sequence[float], stages: int) -> list[int]:
    """Where the second and later stages begin, so that the slowest takes the least time."""

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Of what begins at part `start`, in `left` stages: the slowest one's time, and where the others begin."""
        if left == 1:
            return sum(seconds[start:]), ()
        found = []
        for cut in range(start + 1, len(seconds) - left + 2):
            slowest, later = best(cut, left - 1)
            found.append((max(sum(seconds[start:cut]), slowest), (cut, *later)))
        return min(found)

    return list(best(0, stages)[1])


def measured(parts: Sequence[nn.Module], x: Tensor) -> list[float]:
    """Seconds that each part's forward and backward pass of a piece `x` takes."""
    seconds = []
    for part in parts:
        took = []
        for _ in range(MEASURED):
            given = x.detach().clone().requires_grad_(x.is_floating_point())
            start = _now(x)
            y = part(given * 1)  # a part may change what it is given
            if y.requires_grad:
                wanted = [t for t in (given, *part.parameters()) if t.requires_grad]
                torch.autograd.grad(y.float().sum(), wanted, allow_unused=True)
            took.append(_now(x) - start)
        seconds.append(min(took))
        x = y.detach()
    return seconds


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
