"""Compare what two programs did, step by step, and decide whether the difference is rounding.

Rounding is measured, never assumed. A program is run again after the last bit of each weight was flipped: how far that
run gets from the first one, tensor by tensor and step by step, is what rounding does in this training. A second run of
a program that differs from the first is such a measure, too. Two programs are the same up to rounding if no tensor of
any step is further apart than MARGIN times this.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from statistics import median

from lockstep.programs.sameness.recorded import EPSILONS, Run, Side, Step, Tensor, Tensors

MARGIN = 32.0  # one flipped bit is one rounding of many
AHEAD = 2  # steps: a difference may grow a little earlier than in the run that measures
LAST_PLACE = 4  # in so many last places a flipped bit may change a tensor
FIRST_STEP = 2.0**14  # in so many last places it may change the first gradient: more is no rounding
RANK = " (rank "
STATE = ("weights", "buffers")
STAGES = ("unclipped", "gradients", *STATE)
SHOWN = ("gradients", "weights")  # of which a verdict says how far they are apart
ALIKE = 1e-5  # norms of gradients that are the same on two ranks, or in two steps, differ by less


@dataclass(frozen=True)
class Apart:
    """How far a tensor of two runs is apart at a step, and how far rounding takes it."""

    stage: str
    name: str
    distance: float
    rounding: float

    @property
    def real(self) -> bool:
        return self.distance > MARGIN * self.rounding


@dataclass
class Pair:
    """Two sides, and the names of their parameters beside one another.

    Attributes:
        start: the step before the first one that is recorded. It counts in what is shown only.
    """

    one: Side
    other: Side
    start: int = 0
    names: dict[str, str] = field(init=False)  # of the first side -> of the second one

    def __post_init__(self) -> None:
        self.names = aligned(self.one.run, self.other.run)

    @cached_property
    def measures(self) -> list[tuple[Run, Run, bool]]:
        """The pairs of runs that measure rounding, and whether they are the first side's."""
        return [
            (side.run, run, side is self.one)
            for side in (self.one, self.other)
            for run in (*side.flipped, *([side.again] if side.again else []))
            if unlike(side, run) is None
        ]

    @property
    def length(self) -> int:
        """The number of steps that both took."""
        return min(self.one.run.length, self.other.run.length)

    def tensors(self, stage: str, step: int) -> tuple[Tensors, Tensors]:
        """Return the tensors of the first ranks, the second side's by the first one's names. Step 0: the start."""
        if stage == "unclipped" and not self.unclipped_comparable(step):
            return {}, {}
        one, other = (tensors_of(side.run, stage, step) for side in (self.one, self.other))
        if stage == "buffers" and len(self.one.run.ranks) == len(self.other.run.ranks):
            one, other = (buffers_of_ranks(side.run, step) for side in (self.one, self.other))
        names = (
            self.names if stage != "buffers" else {**{name: name for name in one}, **aligned_names([*one], [*other])}
        )
        return one, {name: other[names[name]] for name in names if names[name] in other}

    def unclipped_comparable(self, step: int) -> bool:
        """Check whether the gradients before clipping show what clipping hides: of both sides, and of all ranks.

        Without a function that clips, they may be sums that are divided later. That they are normalised is known only
        where the optimizer gets gradients of one norm.
        """
        sides = [side.run.at(step) for side in (self.one, self.other)]
        if any(not alike([each.unclipped_norm for each in ranks]) for ranks in sides):
            return False  # they are summed over the ranks later
        clips = [all(each.clips for each in ranks) for ranks in sides]
        if clips[0] != clips[1]:
            return False
        return clips[0] or all(normalised(side.run) for side in (self.one, self.other))

    @cached_property
    def same_bits(self) -> bool:
        if self.one.run.length != self.other.run.length:
            return False
        for step in range(self.length + 1):
            for stage in STAGES if step else STATE:
                one, other = self.tensors(stage, step)
                if one.keys() != other.keys() or any(one[name].digest != other[name].digest for name in one):
                    return False
        return not any(self.settings_apart(step) for step in range(1, self.length + 1))

    def settings_apart(self, step: int) -> dict[str, list[tuple[str, object, object]]]:
        """Return the settings that differ at a step: setting -> (parameter, value, the other's value)."""
        one, other = (side.run.first.steps[step - 1] for side in (self.one, self.other))
        result: dict[str, list[tuple[str, object, object]]] = {}
        for name, settings in one.settings.items():
            others = other.settings.get(self.names.get(name, ""))
            if others is None:
                continue
            for key in {**settings, **others}:
                mine, theirs = settings.get(key), others.get(key)
                if not same_number(mine, theirs):
                    result.setdefault(key, []).append((name, mine, theirs))
        return result

    @cached_property
    def begins(self) -> int:
        """The first step at which a bit of a gradient differs."""
        steps = range(1, self.length + 1)
        return next((step for step in steps if any(each[0].digest != each[1].digest for each in self.both(step))), 0)

    def both(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each gradient of a step of both sides."""
        one, other = self.tensors("gradients", step)
        yield from ((value, other[name]) for name, value in one.items() if name in other)

    def rounding(self, stage: str, step: int, name: str) -> float:
        """Return how far rounding takes a tensor, as a share of its size."""
        sizes, typical = self.measured(stage, step + AHEAD if step > self.begins else step)  # rounding begins small
        dtype = next(iter(self.one.run.first.dtypes), "float32")
        return max(sizes.get(name.partition(RANK)[0], 0.0), typical, EPSILONS.get(dtype, EPSILONS["float32"]) / 2)

    def measured(self, stage: str, last: int) -> tuple[dict[str, float], float]:
        """Return the largest distance of each tensor in the runs that measure rounding, up to a step; their median."""
        key = (stage, last)
        if key not in self._cache:
            first_step = int(stage not in STATE)
            sizes = dict(self.measured(stage, last - 1)[0]) if last > first_step else {}
            other_names = {theirs: mine for mine, theirs in self.names.items()}
            for run, changed, first in self.measures:
                if first_step <= last <= min(run.length, changed.length):
                    for name, value in run_distances(run, changed, stage, last).items():
                        mine = name if first else other_names.get(name, name)
                        sizes[mine] = max(sizes.get(mine, 0.0), value)
            finite = [value for value in sizes.values() if math.isfinite(value)]
            self._cache[key] = sizes, median(finite) if finite else 0.0
        return self._cache[key]

    @cached_property
    def _cache(self) -> dict[tuple[str, int], tuple[dict[str, float], float]]:
        return {}

    def forget(self) -> None:
        """Measure rounding anew: there is another run."""
        for name in ("_cache", "measures", "first_difference"):
            self.__dict__.pop(name, None)

    def apart(self, stage: str, step: int) -> Iterator[Apart]:
        """Yield how far each tensor is apart that both sides have."""
        one, other = self.tensors(stage, step)
        for name, value in one.items():
            if name in other:
                yield Apart(stage, name, value.distance(other[name]), self.rounding(stage, step, name))

    def real(self, stage: str, step: int) -> list[Apart]:
        """Return the tensors whose difference is more than rounding."""
        return [each for each in self.apart(stage, step) if each.real]

    def missing(self, step: int) -> tuple[list[str], list[str]]:
        """Return the parameters that have a gradient on one side only: on the first one, on the second one."""
        one, other = self.tensors("gradients", step)
        return [name for name in one if name not in other], [name for name in other if name not in one]

    @cached_property
    def first_difference(self) -> int | None:
        """The first step at which something differs by more than rounding; 0: the initial state; None: none does."""
        if any(self.real(stage, 0) for stage in STATE):
            return 0
        for step in range(1, self.length + 1):
            if self.settings_apart(step) or any(self.missing(step)):
                return step
            if any(self.real(stage, step) for stage in STAGES):
                return step
        return None

    def largest(self, stage: str, step: int) -> float:
        """Return the distance of all tensors together, as a share of their size."""
        return together(*self.tensors(stage, step))

    def largest_rounding(self, stage: str, step: int) -> float:
        """Return the same distance between the runs that measure rounding."""
        runs = [(run, changed) for run, changed, _ in self.measures if min(run.length, changed.length) >= step]
        pairs = [(tensors_of(run, stage, step), tensors_of(changed, stage, step)) for run, changed in runs]
        return max((together(*pair) for pair in pairs), default=0.0)


def tensors_of(run: Run, stage: str, step: int) -> Tensors:
    holder: object = run.first.steps[step - 1] if step else run.first
    tensors: Tensors = getattr(holder, stage)
    return tensors


def alike(norms: Sequence[float]) -> bool:
    return max(norms) - min(norms) <= ALIKE * max(norms)


def normalised(run: Run) -> bool:
    """Check whether the optimizer gets gradients of the same norm in each step, and not as backward() made them."""
    steps = run.first.steps[: run.length]
    changed = any(not alike([step.norm, step.unclipped_norm]) for step in steps)
    return len(steps) > 1 and changed and alike([step.norm for step in steps])


def buffers_of_ranks(run: Run, step: int) -> Tensors:
    """Return the buffers of all ranks; the names of the others than the first end with their ranks."""
    named: Tensors = {}
    for rank in run.ranks:
        buffers = rank.steps[step - 1].buffers if step else rank.buffers
        named |= {
            f"{name}{f'{RANK}{rank.rank})' if rank is not run.first else ''}": value for name, value in buffers.items()
        }
    return named


def run_distances(one: Run, other: Run, stage: str, step: int) -> dict[str, float]:
    first, second = tensors_of(one, stage, step), tensors_of(other, stage, step)
    return {name: first[name].distance(second[name]) for name in first if name in second}


def together(one: Tensors, other: Tensors) -> float:
    pairs = [(one[name], other[name]) for name in one if name in other]
    size = math.sqrt(sum(max(a.norm, b.norm) ** 2 for a, b in pairs))
    distance = math.sqrt(sum((a.distance(b) * max(a.norm, b.norm)) ** 2 for a, b in pairs))
    return distance / size if size else 0.0


def same_number(one: object, other: object) -> bool:
    """Check whether two settings are the same, but for the rounding of a schedule's arithmetic."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-300)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(same_number, one, other))
    return one == other or (one is None and other is False) or (other is None and one is False)


def aligned(one: Run, other: Run) -> dict[str, str]:
    """Return the parameters of the second run by the names of the first one."""
    first, second = (
        list(dict.fromkeys(chain(run.first.weights, *(step.weights for step in run.first.steps[:4]))))
        for run in (one, other)
    )
    names = aligned_names(first, second)
    left = [name for name in first if name not in names], [name for name in second if name not in names.values()]
    if len(left[0]) == len(left[1]):  # other names for the same network: the order decides
        names |= dict(zip(*left, strict=True))
    return names


def aligned_names(first: list[str], second: list[str]) -> dict[str, str]:
    """Return the names of `second` by those of `first`: the same, or one the end of the other."""
    names = {name: name for name in first if name in set(second)}
    left = [name for name in second if name not in names]
    for name in first:
        if name not in names:
            ends = [each for each in left if each.endswith(f".{name}") or name.endswith(f".{each}")]
            if len(ends) == 1:
                names[name] = ends[0]
                left.remove(ends[0])
    return names


def unlike(side: Side, again: Run) -> str | None:
    """Return in what a program's further run differs from its first one by more than rounding; None: in nothing.

    A run whose last bits were flipped starts from weights that differ in their last place. Samples and random numbers
    do not depend on them. Its gradients show how sensitive the training is, if the program repeats its bits otherwise.
    """
    run, repeats = side.run, side.again is not None and differs_from_itself(side) is None
    first, second = run.first, again.first
    if any(
        value.distance(second.weights.get(name, value)) > LAST_PLACE * _epsilon(run)
        for name, value in first.weights.items()
    ):
        return "initial weights"
    for step in range(1, min(run.length, again.length) + 1):
        if run.samples(step) != again.samples(step):
            return f"samples of step {step}"
        if [each.random for each in run.passes(step) if each.drawn] != [
            each.random for each in again.passes(step) if each.drawn
        ]:
            return f"random numbers of step {step}"
        if step == 1 and not repeats:
            apart = together(first.steps[0].gradients, second.steps[0].gradients)
            if apart > min(0.25, FIRST_STEP * _epsilon(run)):
                return "gradients of step 1"
    return None


def _epsilon(run: Run) -> float:
    """Return the last place of the coarsest type that a run computes in."""
    types = {*run.first.dtypes, *(each.autocast for each in run.first.steps[0].passes if each.autocast)}
    return max((EPSILONS[name] for name in types if name in EPSILONS), default=EPSILONS["float32"])


def differs_from_itself(side: Side) -> int | None:
    """Return the first step at which a program's second run has other bits than its first; 0: its initial state."""
    if side.again is None:
        return None
    for step in range(min(side.run.length, side.again.length) + 1):
        for stage in STAGES if step else STATE:
            if any(run_distances(side.run, side.again, stage, step).values()):
                return step
    return None


def agree(steps: list[Step], stage: str) -> list[str]:
    """Return the tensors of a stage that are not the same on all ranks."""
    first: Mapping[str, object] = getattr(steps[0], stage)
    odd = []
    for name in first:
        digests = {getattr(step, stage)[name].digest for step in steps if name in getattr(step, stage)}
        if len(digests) > 1:
            odd.append(name)
    return odd
