"""The verdict on two programs: one line, the evidence, and a page."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.programs.sameness.causes import LABELS, Cause, causes
from lockstep.programs.sameness.judging import SHOWN, STAGES, STATE, Pair, differs_from_itself, unlike
from lockstep.programs.sameness.recorded import Run, Side, Tensor
from lockstep.text import join_names, plural

SMALL = 0.05  # a difference up to this share of the size, without a cause, may be rounding that has grown
HIDES = 0.1  # a share of the gradients' size: larger rounding hides a mistake
FURTHER = 2  # further runs that measure rounding then


@dataclass
class Verdict:
    """Whether two programs are the same.

    Attributes:
        code: the exit code: 0 the same, 1 different.
        line: the verdict.
        step: the first step with a difference that is more than rounding; 0: the initial state.
        causes: what makes the difference.
        notes: what else a reader should know.
        rows: per step: losses, distances, what rounding does.
    """

    code: int
    line: str
    step: int | None = None
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        lines = [self.line]
        for cause in self.causes:
            lines += [f"cause: {cause.text}", f"change: {cause.change}"]
        return "\n".join([*lines, *self.notes])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(pair: Pair, measure: Callable[[], bool] = lambda: False) -> Verdict:
    """Decide whether two programs are the same.

    Args:
        pair: the programs, with the runs that measure rounding.
        measure: adds one more run that measures rounding to the pair, and returns whether it could. It is called if a
            small difference without a cause decides.
    """
    notes = [*_notes(pair)]
    if pair.same_bits:
        line = f"same bits over {plural(pair.length, 'step')}"
        return Verdict(0, line, notes=notes, rows=rows(pair))
    selves = [(side, differs_from_itself(side)) for side in (pair.one, pair.other)]
    notes[:0] = [_itself(pair.start, number, side, at) for number, (side, at) in enumerate(selves) if at is not None]
    unsteady = [_unlike(side) for side in (pair.one, pair.other)]
    if any(unsteady):
        return _unsteady(pair, unsteady, notes)
    for further in range(FURTHER + 1):
        step = pair.first_difference
        named = causes(pair, step) if step is not None else []
        is_clear = step is None or _named(named) or max(pair.largest(each, step) for each in SHOWN) > SMALL
        if is_clear or further == FURTHER or not measure():
            break
    lengths = pair.one.run.length, pair.other.run.length
    if step is None and lengths[0] != lengths[1]:
        return _shorter(pair, notes)
    if step is None:
        return Verdict(0, _rounding_line(pair), notes=_unseen(pair) + notes, rows=rows(pair))
    return Verdict(1, _line(pair, step), step + pair.start, named, notes, rows(pair))


def _unlike(side: Side) -> str | None:
    """Return in what a program differs from itself by more than rounding; None: in nothing that was seen."""
    others = [*([side.again] if side.again else []), *side.flipped]
    return next((what for what in (unlike(side, other) for other in others) if what), None)


def _unsteady(pair: Pair, unsteady: list[str | None], notes: list[str]) -> Verdict:
    odd = [number for number, what in enumerate(unsteady) if what]
    who = "both programs differ from themselves" if len(odd) == 2 else f"{LABELS[odd[0]]} program differs from itself"
    line = f"different: {who} when run again, in the {unsteady[odd[0]]}"
    what = f"{who}: each run draws other numbers"
    change = "seed torch, numpy and random, and the loader's generator and workers"
    return Verdict(1, line, None, [Cause("nondeterminism", what, change)], notes, rows(pair))


def _named(named: list[Cause]) -> bool:
    return any(cause.kind not in ("not named", "update", "buffers", "network") for cause in named)


def _itself(start: int, number: int, side: Side, at: int) -> str:
    where = "in its initial state" if at == 0 else f"from step {at + start} on"
    far = Pair(side, Side(side.name, side.again or side.run))
    size = max(far.largest(stage, max(at, 1)) for stage in SHOWN)
    return f"{LABELS[number]} program differs from itself {where}, by {size:.0e} of the size"


def _rounding_line(pair: Pair) -> str:
    last, start = pair.length, pair.start
    begins = next((step for step in range(1, last + 1) if pair.largest("gradients", step)), last)
    ours, measured = pair.largest("weights", last), pair.largest_rounding("weights", last)
    return (
        f"same up to rounding over {plural(last, 'step')}: gradients differ by {pair.largest('gradients', begins):.0e} "
        f"of their size at step {begins + start}, weights by {ours:.0e} at step {last + start}; one flipped "
        f"bit of each weight makes {pair.largest_rounding('gradients', begins):.0e} and {measured:.0e}"
    )


def _unseen(pair: Pair) -> list[str]:
    """Say from which step on rounding is so large that it hides other differences."""
    steps = range(1, pair.length + 1)
    first = next((step for step in steps if pair.largest_rounding("gradients", step) > HIDES), None)
    if first is None:
        return []
    return [
        f"rounding alone changes the gradients by more than {HIDES:.0%} from step {first + pair.start} on, "
        "which hides what else differs there: compare with a smaller learning rate, or in float64"
    ]


def _shorter(pair: Pair, notes: list[str]) -> Verdict:
    one, other = pair.one.run.length, pair.other.run.length
    program, few, many = f"{LABELS[other < one]} program", min(one, other), max(one, other)
    line = f"different: {program} takes {plural(few, 'step')}, the other one {many} or more"
    what = f"{program} ends after {plural(few, 'step')}; those are the same in both"
    cause = Cause("number of steps", what, "epochs, drop_last, and how the samples are divided among ranks")
    return Verdict(1, line, few + 1 + pair.start, [cause], notes, rows(pair))


def _line(pair: Pair, step: int) -> str:
    where = f"from step {step + pair.start}" if step or pair.start else "before the first step"
    return f"different {where}: {_what(pair, step)}"


def _what(pair: Pair, step: int) -> str:
    """Return the first tensor that differs at a step, and by how much."""
    if step:
        for side, names in enumerate(pair.missing(step)):
            if names:
                return f"only {LABELS[side]} has gradients of {join_names(names)}"
    for stage in STAGES if step else STATE:
        odd = pair.real(stage, step)
        if odd:
            one, other = pair.tensors(stage, step)
            shown = max(odd, key=lambda each: one[each.name].norm)
            a, b = one[shown.name], other[shown.name]
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            kind = "gradients before clipping" if stage == "unclipped" else stage
            ratios = [_ratio(one[each.name], other[each.name]) for each in odd]
            ratio = _ratio(a, b)
            if ratio and abs(ratio - 1) > 1e-3 and all(each and abs(each / ratio - 1) < 1e-3 for each in ratios):
                return f"{kind} of {shown.name}{more} are {ratio:.3f} times as large"
            return f"{kind} of {shown.name}{more} differ by {shown.distance:.0e} of their size"
    apart = pair.settings_apart(step)
    key, ((name, mine, theirs), *_) = next(iter(apart.items()))
    return f"{key} of {name} is {theirs}, not {mine}"


def _ratio(one: Tensor, other: Tensor) -> float | None:
    """Return by which factor a tensor is another one; None: it is no multiple of it."""
    ratio, rest = one.multiple(other)
    return ratio if rest < 1e-3 else None


def _notes(pair: Pair) -> list[str]:
    notes = []
    runs = pair.one.run, pair.other.run
    for number, run in enumerate(runs):
        label = f"{LABELS[number]} program"
        optimizers = {step.optimizer for step in run.first.steps}
        if len(optimizers) > 1:
            notes.append(f"{label} has {len(optimizers)} optimizers: each call of step() counts as a step")
        if len(run.ranks) < run.first.world:
            notes.append(f"{label}: {len(run.ranks)} of {run.first.world} ranks could be recorded")
        if run.others:
            more = f"{run.others} more process{'es' * (run.others > 1)}"
            notes.append(f"{label}: {more} took steps without a rank of its own: only the first one is compared")
        if "OptimizedModule" in run.first.wrappers:
            notes.append(f"{label} is compiled: only what enters and leaves the compiled module is seen")
        if not any(step.norm for step in run.first.steps):
            notes.append(f"{label} trains nothing: all its gradients are 0")
        if error := next((rank.error for rank in run.ranks if rank.error), None):
            notes.append(f"{label}: recording ended early: {' '.join(error.split())[-160:]}")
    differing = [
        f"{key} ({runs[0].first.facts.get(key)}, {runs[1].first.facts.get(key)})"
        for key in runs[0].first.facts
        if runs[0].first.facts.get(key) != runs[1].first.facts.get(key)
    ]
    if differing:
        notes.append(f"the programs also differ in {join_names(differing, 6)}")
    layouts = [_layout(run) for run in runs]
    if layouts[0] != layouts[1]:
        notes.append(f"layouts: {layouts[0]}; {layouts[1]}")
    return notes


def _layout(run: Run) -> str:
    counts = [len(each.samples) for each in run.passes(1)]
    size = f" of {counts[0]} samples" if counts and len(set(counts)) == 1 and counts[0] else ""
    many = len(run.ranks) > 1, run.micro_batches > 1
    processes = f"{len(run.ranks)} process{'es' * many[0]}"
    return f"{processes} x {run.micro_batches} micro-batch{'es' * many[1]}{size}"


def rows(pair: Pair) -> list[dict[str, Any]]:
    """Return a row for each step: losses, distances, what rounding does."""
    result = []
    for step in range(1, pair.length + 1):
        row: dict[str, Any] = {"step": step + pair.start}
        row["losses"] = [run.loss(step) for run in (pair.one.run, pair.other.run)]
        for stage in SHOWN:
            row[stage] = pair.largest(stage, step)
            row[f"{stage}, rounding"] = pair.largest_rounding(stage, step)
        row["samples"] = [sum(run.samples(step).values()) for run in (pair.one.run, pair.other.run)]
        result.append(row)
    return result
