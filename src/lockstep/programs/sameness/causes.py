"""Name the cause of a difference: what two programs did differently in the step where their results part.

Each function looks for one kind of mistake. It gets the pair and the step, and returns causes, or nothing. They are
called in the order in which a step computes; what explains all that comes later ends the search.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.programs.sameness.judging import MARGIN, Pair, agree, same_number
from lockstep.programs.sameness.recorded import Pass, Run, Step
from lockstep.text import join_names, plural

BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LazyBatchNorm1d", "LazyBatchNorm2d", "LazyBatchNorm3d")
MOST_CALLS = 32  # of a schedule for one step
DISTINCT = 1e-4  # a share of the size, below which a factor is 1: a program's loss is printed with fewer digits


@dataclass(frozen=True)
class Cause:
    """A cause: its name, what the sides do, and what to change. `final`: it explains all that follows."""

    kind: str
    text: str
    change: str
    final: bool = True


@dataclass(frozen=True)
class View:
    """The step where two sides part, from both sides."""

    pair: Pair
    step: int  # 0: the initial state

    @property
    def shown(self) -> int:
        """The number of that step since the runs began."""
        return self.step + self.pair.start

    @property
    def runs(self) -> tuple[Run, Run]:
        return self.pair.one.run, self.pair.other.run

    def steps(self, side: int) -> list[Step]:
        return self.runs[side].at(self.step)

    def passes(self, side: int) -> list[Pass]:
        return [*self.runs[side].passes(self.step)]

    def samples(self, side: int) -> Counter[int]:
        return self.runs[side].samples(self.step)


DIVIDE_ONCE = "divide by the world size once: DistributedDataParallel does so already"
REDUCERS = {"DistributedDataParallel", "FullyShardedDataParallel"}  # average gradients in the backward pass
LABELS = ("the first", "the second")


def causes(pair: Pair, step: int) -> list[Cause]:
    """Return the causes of the difference that begins at a step."""
    view = View(pair, step)
    result: list[Cause] = []
    for search in SEARCHES if step else AT_START:
        if search not in LAST or not result:
            result += search(view)
        if any(cause.final for cause in result):
            break
    return result


# --- among the ranks of a side ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AmongRanks:
    """Search for a fault among the ranks of one side, which the other side has not.

    Attributes:
        fault: a function of a side's run and the step. Return what differs among ranks, or nothing.
        text: a function of the run and the fault; what this side's ranks do.
    """

    kind: str
    fault: Callable[[Run, int], Sequence[object]]
    text: Callable[[Run, Sequence[Any]], str]
    change: str

    def __call__(self, view: View) -> list[Cause]:
        faults = [self.fault(run, view.step) if len(run.ranks) > 1 else () for run in view.runs]
        alike = all(faults) and len(view.runs[0].ranks) == len(view.runs[1].ranks)
        side = next((side for side in (0, 1) if faults[side]), None)
        if side is None or alike:
            return []
        return [Cause(self.kind, f"{LABELS[side]}'s {self.text(view.runs[side], faults[side])}", self.change)]


def _odd_start(run: Run, _: int) -> list[str]:
    first = run.first.weights
    return [
        name for name in first if len({rank.weights[name].digest for rank in run.ranks if name in rank.weights}) > 1
    ]


def _shared_samples(run: Run, step: int) -> Sequence[int]:
    """Return the samples of each rank if they are the same on all of them."""
    parts = [sorted(sample for each in rank.passes for sample in each.samples) for rank in run.at(step)]
    return parts[0] if all(part == parts[0] for part in parts) else ()


def _odd_gradients(run: Run, step: int) -> Sequence[str]:
    return agree(run.at(step), "gradients")


def _of_gradients(run: Run, odd: Sequence[str]) -> str:
    why = "the ranks' gradients are never averaged" if run.first.group else "no process group: each rank trains alone"
    return f"ranks step with different gradients ({join_names(odd)}): {why}"


ranks_apart_at_start = AmongRanks(
    "ranks start apart",
    _odd_start,
    lambda run, odd: f"ranks start from different weights ({join_names(odd)})",
    "seed all ranks alike before the network is built, or broadcast rank 0's weights",
)
same_on_each_rank = AmongRanks(
    "same samples on each rank",
    _shared_samples,
    lambda run, _: f"{len(run.ranks)} ranks all train on the same samples",
    "a DistributedSampler for the training data",
)
ranks_apart = AmongRanks(
    "gradients not averaged",
    _odd_gradients,
    _of_gradients,
    "DistributedDataParallel, or all_reduce before the step",
)


# --- before the first step --------------------------------------------------------------------------------------------


def initial_state(view: View) -> list[Cause]:
    weights, buffers = (view.pair.real(stage, 0) for stage in ("weights", "buffers"))
    both = [*weights, *buffers]
    total = sum(1 for stage in ("weights", "buffers") for _ in view.pair.apart(stage, 0))
    names = join_names([each.name for each in both])
    which = "all weights" if len(both) == total else names
    what = f"the initial state is another one: {which} differ{'s' if len(both) == 1 else ''}"
    change = "the same seed before the network is built, or load the same checkpoint"
    if len(both) < total / 2:
        change = f"the initialization of {names}, or the checkpoint that is loaded into it"
    return [Cause("initial state", f"{what} before the first step", change)]


def other_types(view: View) -> list[Cause]:
    one, other = (run.first.dtypes for run in view.runs)
    if one != other:
        shown = [", ".join(sorted(each)) for each in (one, other)]
        if shown[0] != shown[1]:
            return [
                Cause("precision", f"the weights are {shown[0]} in the first, {shown[1]} in the second", "one dtype")
            ]
    return []


# --- the settings of a step -------------------------------------------------------------------------------------------


def optimizers(view: View) -> list[Cause]:
    one, other = (view.steps(side)[0].optimizer for side in (0, 1))
    if one != other:
        return [Cause("optimizer", f"{one} in the first, {other} in the second", "the same optimizer")]
    return []


def schedules(view: View) -> list[Cause]:
    apart = view.pair.settings_apart(view.step)
    if "lr" not in apart:
        return []
    name, mine, theirs = apart["lr"][0]
    rates = [[step.settings.get(each, {}).get("lr") for step in run.first.steps] for run, each in _named(view, name)]
    for side in (1, 0):
        fast, slow = rates[side], rates[1 - side]
        for calls in range(2, MOST_CALLS):
            if any(_stepped_more(fast, slow, calls, before) for before in range(calls + 1)):
                run = view.runs[side]
                per = {run.micro_batches: "micro-batch", len(run.ranks): "process"}.get(calls)
                counted = f"once per {per}" if per else f"{calls} times per step"
                what = f"{LABELS[side]} steps its schedule {counted}: {calls} times in an optimizer step"
                change = "call scheduler.step() once after each optimizer step"
                return [Cause("schedule", what, change, final=False)]
    ratio = ""
    if isinstance(mine, float) and isinstance(theirs, float) and mine:
        ratio = f", {theirs / mine:.4g} times"
    since = "from the first step on" if view.shown == 1 else f"from step {view.shown} on"
    what = f"the learning rate of {_parameters(apart['lr'])} is {_show(theirs)}, not {_show(mine)}{ratio}, {since}"
    kind = "learning rate" if view.step == 1 else "schedule"
    change = "the learning rate" if view.step == 1 else "the schedule: its length, or when its step() is called"
    return [Cause(kind, what, change, final=False)]


def _stepped_more(fast: Sequence[object], slow: Sequence[object], calls: int, before: int) -> bool:
    """Check whether one schedule is the other one, stepped `calls` times per step, `before` times before the first."""
    places = [calls * at + before for at in range(len(fast)) if calls * at + before < len(slow)]
    same = len(places) > 1 and all(same_number(fast[at], slow[place]) for at, place in enumerate(places))
    return same and len({str(slow[place]) for place in places}) > 1


def _named(view: View, name: str) -> Iterable[tuple[Run, str]]:
    return zip(view.runs, (name, view.pair.names.get(name, name)), strict=True)


def settings(view: View) -> list[Cause]:
    result = []
    for key, apart in view.pair.settings_apart(view.step).items():
        if key != "lr":
            _, mine, theirs = apart[0]
            total = len(view.steps(0)[0].settings)
            which = "all parameters" if len(apart) == total else _parameters(apart)
            what = f"{key} of {which} is {_show(theirs)}, not {_show(mine)}"
            kind = "weight decay" if key == "weight_decay" else "settings"
            change = f"the parameter groups: {key}" if len(apart) < total else key
            result.append(Cause(kind, what, change, final=False))
    return result


def _parameters(apart: Sequence[tuple[str, object, object]]) -> str:
    return join_names([name for name, _, _ in apart])


def _show(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "absent" if value is None else str(value)


def frozen(view: View) -> list[Cause]:
    steps = view.steps(0)[0], view.steps(1)[0]
    names = view.pair.names
    back = {theirs: mine for mine, theirs in names.items()}
    result: list[Cause] = []
    for kind, one, other in (
        ("needs no gradient (requires_grad=False)", steps[0].frozen, steps[1].frozen),
        ("is in no optimizer", steps[0].idle, steps[1].idle),
    ):
        mine, theirs = set(one), {back.get(name, name) for name in other}
        for side, odd in ((0, mine - theirs), (1, theirs - mine)):
            odd = {name for name in odd if not result or name not in result[0].text}
            if odd:
                what = f"in {LABELS[side]} {join_names(sorted(odd))} {kind}"
                result.append(Cause("frozen", what, "requires_grad, and the parameters that the optimizer gets", False))
    if not result:
        for side, alone in enumerate(view.pair.missing(view.step)):
            if alone:
                what = f"only {LABELS[side]} has gradients of {join_names(alone)}"
                change = "detach(), no_grad() and requires_grad on the way to these parameters"
                result.append(Cause("frozen", what, change, final=False))
    return result


# --- the samples ------------------------------------------------------------------------------------------------------


def ranks_share_samples(view: View) -> list[Cause]:
    same = view.samples(0) == view.samples(1)  # a data set may have each sample several times
    return [] if same else same_on_each_rank(view)


def samples(view: View) -> list[Cause]:
    one, other = view.samples(0), view.samples(1)
    if not one or not other:
        return []
    if one == other:
        return _other_inputs(view)
    counts = [sum(each.values()) for each in (one, other)]
    sizes = [Counter(sum(run.samples(step).values()) for step in range(1, run.length + 1)) for run in view.runs]
    usual = [size.most_common(1)[0][0] for size in sizes]
    by_step = [[frozenset(run.samples(step).items()) for step in range(1, run.length + 1)] for run in view.runs]
    at = view.step - 1
    for side in (0, 1):  # the other side leaves out a short step
        mine, theirs = by_step[side], by_step[1 - side]
        short = counts[side] < usual[side] or len(view.runs[side].first.steps) == at + 1
        if short and at + 1 < len(mine) and theirs[at] == mine[at + 1]:
            what = f"{LABELS[1 - side]} leaves out the short last step of an epoch, {plural(counts[side], 'sample')}"
            return [Cause("samples lost", what, "drop_last, and how the data set is divided among ranks")]
    shapes = [{each.inputs.partition(",")[2] for each in view.passes(side)} for side in (0, 1)]
    alone = [
        len({each.inputs.partition(",")[2] for at in range(1, view.pair.length + 1) for each in run.passes(at)})
        for run in view.runs
    ]
    if not set(one) & set(other) and shapes[0] != shapes[1] and alone == [1, 1]:  # else it is padding
        what = (
            f"the network's input is {view.passes(0)[0].inputs} in the first, {view.passes(1)[0].inputs} in the second"
        )
        return [Cause("inputs", what, "the size of a sample, or the batch size where it is a later dimension")]
    if usual[0] != usual[1]:
        what = f"a step of the first has {usual[0]} samples, one of the second {usual[1]}"
        change = "the batch size: samples of a micro-batch x micro-batches x processes must be the same"
        return [Cause("batch size", what, change)]
    repeated = [sum(each.values()) - len(each) for each in (one, other)]
    if repeated[0] != repeated[1] and set(one) & set(other):
        side = int(repeated[1] > repeated[0])
        what = f"{LABELS[side]} has {plural(repeated[side], 'sample')} twice in this step"
        return [Cause("samples repeated", what, "how the sampler divides the data: it pads, or draws with replacement")]
    for side in (0, 1):
        period = _period(by_step[side])
        if period and _period(by_step[1 - side]) != period and at >= period:
            what = f"{LABELS[side]} has the same order of samples in each epoch: step {view.shown} "
            what += f"repeats {view.shown - period}"
            change = "call sampler.set_epoch(epoch) (DistributedSampler) before each epoch, or a generator that goes on"
            return [Cause("order of samples", what, change)]
    whole = [Counter[int]() for _ in (0, 1)]
    for side, run in enumerate(view.runs):
        for step in range(1, view.pair.length + 1):
            whole[side] += run.samples(step)
    shared = len(set(whole[0]) & set(whole[1])) / max(1, min(len(whole[0]), len(whole[1])))
    if set(other) < set(one) or set(one) < set(other):
        more = int(len(other) > len(one))
        extra = set(one) ^ set(other)
        before = Counter(each for step in range(1, view.step) for each in view.runs[more].samples(step))
        if all(before[each] for each in extra):
            what = f"{LABELS[more]} repeats {plural(len(extra), 'sample')} at the end of an epoch"
            change = "DistributedSampler pads to equal shares: weight the samples, or another size of the data set"
            return [Cause("samples repeated", what, change)]
        side = int(len(other) < len(one))
        what = f"{LABELS[side]} loses {plural(abs(len(one) - len(other)), 'sample')} of this step"
        return [Cause("samples lost", what, "drop_last, and how the data set is divided among ranks")]
    if shared > 0.05:
        what = f"the samples come in another order: step {view.shown} has {len(one - other)} others of {counts[0]}"
        return [Cause("order of samples", what, "shuffle, the sampler's seed, and set_epoch")]
    what = f"no sample of the first is one of the second in {plural(view.pair.length, 'step')}"
    return [Cause("samples", what, "the data, and the seed of shuffling and augmentation (workers have their own)")]


def _period(steps: Sequence[frozenset[tuple[int, int]]]) -> int:
    """Return after how many steps the samples repeat, all that follow; 0: they do not."""
    for period in range(1, len(steps)):
        if all(steps[at] == steps[at - period] for at in range(period, len(steps))):
            return period
    return 0


def _other_inputs(view: View) -> list[Cause]:
    """Compare the labels of the same samples, and what else the network gets with them."""
    rows: list[set[tuple[int, str, int]]] = [set(), set()]
    for side in (0, 1):
        for each in view.passes(side):
            for name, values in each.others.items():
                if len(values) == len(each.samples):
                    rows[side] |= {(sample, name, value) for sample, value in zip(each.samples, values, strict=True)}
    shared = {name for _, name, _ in rows[0]} & {name for _, name, _ in rows[1]}
    odd = {name for _, name, _ in rows[0] ^ rows[1]} & shared
    if odd:
        what = f"the same samples come with another {join_names(sorted(odd))}"
        return [Cause("labels", what, "how these inputs are made: labels, masks, padding")]
    return []


# --- the forward pass -------------------------------------------------------------------------------------------------


def modes(view: View) -> list[Cause]:
    result = []
    trains = [{each.training for each in view.passes(side)} for side in (0, 1)]
    if trains[0] and trains[1] and trains[0] != trains[1]:
        side = int(False in trains[1])
        what = f"{LABELS[side]} trains in evaluation mode: dropout is off, BatchNorm uses its running statistics"
        return [Cause("evaluation mode", what, "model.train() after each validation, before the next step")]
    parts = [_largest(view.passes(side)) for side in (0, 1)]
    if parts[0] != parts[1]:
        side = int(sum(parts[1].values()) > sum(parts[0].values()))
        odd = [f"{count} {name}" for name, count in parts[side].items() if parts[1 - side].get(name) != count]
        what = f"in {LABELS[side]} {join_names(odd)} are in evaluation mode"
        return [Cause("evaluation mode", what, "which parts are set to eval(), and when")]
    casts = [sorted({each.autocast or "none" for each in view.passes(side)}) for side in (0, 1)]
    if casts[0] and casts[1] and casts[0] != casts[1]:
        what = f"autocast is {join_names(casts[0])} in the first, {join_names(casts[1])} in the second"
        result.append(Cause("precision", what, "the same precision on both sides"))
    return result


def _largest(passes: Iterable[Pass]) -> dict[str, int]:
    most: dict[str, int] = {}
    for each in passes:
        for name, count in each.evaluating.items():
            most[name] = max(most.get(name, 0), count)
    return most


def outputs_apart(view: View) -> float | None:
    """Return how far the outputs of the same samples are apart, beyond rounding; None: nothing can be compared."""
    pair = view.pair
    apart = _outputs_apart(*(view.passes(side) for side in (0, 1)))
    if apart is None:
        return None
    measured = [0.0]
    for side in (pair.one, pair.other):
        for run in (*side.flipped, *([side.again] if side.again else [])):
            if run.length >= view.step:
                measured.append(_outputs_apart([*side.run.passes(view.step)], [*run.passes(view.step)]) or 0.0)
    return apart if apart > MARGIN * max(*measured, 1e-7) else 0.0


def _outputs_apart(one: Sequence[Pass], other: Sequence[Pass]) -> float | None:
    rows = [_rows(one), _rows(other)]
    shared = rows[0].keys() & rows[1].keys()
    if not shared:
        return None
    first, second = (np.array([side[key] for key in shared]) for side in rows)
    size = float(np.sqrt((first[:, 0] ** 2).mean()))
    return float(np.abs(first - second).max()) / size if size else 0.0


def _rows(passes: Sequence[Pass]) -> dict[int, tuple[float, float]]:
    rows: dict[int, tuple[float, float]] = {}
    for each in passes:
        if each.outputs is not None:
            for sample, row in zip(each.samples, each.outputs, strict=False):
                rows[sample] = (float(row[0]), float(row[1]))
    return rows


def forward(view: View) -> list[Cause]:
    """Name what makes a sample's output depend on more than the sample and the weights."""
    apart = outputs_apart(view)
    if apart == 0.0:
        return []
    drawn = any(each.drawn for side in (0, 1) for each in view.passes(side))
    norms = [sum(run.first.modules.get(name, 0) for name in BATCH_NORMS) for run in view.runs]
    norms_train = any(
        each.training and sum(each.evaluating.get(name, 0) for name in BATCH_NORMS) < max(norms)
        for side in (0, 1)
        for each in view.passes(side)
    )
    sizes = [sorted({len(each.samples) for each in view.passes(side)}) for side in (0, 1)]
    synced = [run.first.modules.get("SyncBatchNorm", 0) for run in view.runs]
    result = []
    parts_differ = sizes[0] != sizes[1] or len(view.passes(0)) != len(view.passes(1)) or synced[0] != synced[1]
    if any(norms) and norms_train and parts_differ:
        shown = " and ".join(str(each[0]) for each in sizes if each)
        what = f"BatchNorm takes its statistics of each process's micro-batch: of {shown} samples in the two programs"
        change = "torch.nn.SyncBatchNorm.convert_sync_batchnorm over ranks; micro-batches of one size, or another norm"
        result.append(Cause("BatchNorm", what, change))
    if drawn:
        result += _noise(view)
    if not result and apart:
        what = f"the network computes other outputs for the same samples and weights, by {apart:.1e} of their size"
        result.append(Cause("network", what, "the code of the forward pass, and what it reads beside its inputs"))
    return result


def _noise(view: View) -> list[Cause]:
    states = [[[each.random for each in step.passes if each.drawn] for step in view.steps(side)] for side in (0, 1)]
    if states[0] == states[1]:
        return []
    equal = [len(side) > 1 and all(rank == side[0] for rank in side) for side in states]
    if equal[0] != equal[1]:
        side = int(equal[1])
        if len(states[1 - side]) == len(states[side]):
            other = f"; {LABELS[1 - side]} seeds each rank differently"
        else:
            other = ""
        what = f"{LABELS[side]} draws the same noise on each rank (dropout, augmentation on the device){other}"
        return [Cause("noise", what, "another seed on each rank after the network is built: manual_seed(seed + rank)")]
    if len(states[0]) == len(states[1]):
        if [rank[:1] for rank in states[0]][:1] == [rank[:1] for rank in states[1]][:1] and len(states[0]) > 1:
            what = "the ranks' random numbers differ: the two programs seed their ranks in different ways"
        else:
            what = "the forward pass draws other random numbers (dropout): another seed, or other draws before it"
        return [Cause("noise", what, "the same seed, and the same draws before the first step")]
    what = (
        "the forward pass draws random numbers (dropout) per process and micro-batch, so no two layouts draw the same"
    )
    return [Cause("noise", what, "compare with dropout 0, or draw what belongs to a sample by a key of the sample")]


# --- the gradient -----------------------------------------------------------------------------------------------------


def factor(view: View) -> tuple[float, list[str], bool] | None:
    """Return by which factor the gradients differ, of which parameters, and whether it is the same for all of them."""
    stage = "unclipped" if view.pair.real("unclipped", view.step) else "gradients"
    one, other = view.pair.tensors(stage, view.step)
    factors: dict[str, float] = {}
    for each in view.pair.apart(stage, view.step):
        a, b = one[each.name], other[each.name]
        if not a.sketch.any() or not math.isfinite(b.norm) or each.rounding > 0.1:
            continue
        ratio, rest = a.multiple(b)
        if rest > MARGIN * each.rounding:
            return None
        factors[each.name] = ratio
    odd = {name: value for name, value in factors.items() if abs(value - 1) > DISTINCT}
    if not odd:
        return None
    value = next(iter(odd.values()))
    if any(abs(each / value - 1) > DISTINCT for each in odd.values()):
        return None
    return value, [*odd], len(odd) == len(factors)


def scales(view: View) -> list[Cause]:
    """Name why all gradients are a multiple of the other side's."""
    made = factor(view)
    if made is None:
        return []
    value, names, all_of_them = made
    if not view.pair.real("unclipped", view.step):  # else it is the factor before clipping already
        shrunk = [(_clip_ratio(view.steps(side)[0]) or 1.0) if _clips(view, side) else 1.0 for side in (0, 1)]
        value *= shrunk[0] / shrunk[1]
    if abs(value - 1) <= DISTINCT:
        return []
    if not all_of_them:
        what = f"the gradients of {join_names(names)} are {value:.4g} times as large, the others are not"
        return [
            Cause("factor of some gradients", what, "what scales these parameters' gradients: hooks, a loss of theirs")
        ]
    clipped = _one_side_clips(view)
    if clipped:
        return clipped
    runs = view.runs
    backward = [len(view.steps(side)[0].losses) or 1 for side in (0, 1)]
    usual = [run.micro_batches for run in runs]
    if short := [side for side in (0, 1) if backward[side] < usual[side]]:
        side = short[0]
        what = (
            f"step {view.shown} of {LABELS[side]} has {backward[side]} of {usual[side]} micro-batches, and not "
            f"their weight: gradients are {value:.4g} times as large"
        )
        change = "divide the loss by the micro-batches that a step really has, and step after the last one"
        return [Cause("short last step", what, change)]
    losses = [run.loss(view.step) for run in runs]
    of_loss = losses[1] / losses[0] if losses[0] and losses[1] else None
    in_loss = of_loss is not None and abs(of_loss / value - 1) < 1e-3
    hidden = of_loss is None or abs(of_loss - 1) >= 1e-3  # else only the gradients differ, not the losses
    side = int(value > 1)  # whose gradients are larger
    large = value if side else 1 / value
    label, small = LABELS[side], LABELS[1 - side]
    ranks = [len(run.ranks) for run in runs]
    counts = [max((len(each.samples) for each in view.passes(side)), default=0), sum(view.samples(side).values())]
    explanations = (
        (
            _is(large, usual[side]) and usual[side] > 1 and (in_loss or hidden),
            "accumulation",
            f"the loss of {label} is not divided by its {usual[side]} accumulated micro-batches",
            f"loss = loss / {usual[side]} before backward()",
        ),
        (
            _is(large, usual[1 - side]) and usual[1 - side] > 1 and (in_loss or hidden),
            "divided twice",
            f"the loss of {small} is divided by its {usual[1 - side]} accumulated micro-batches twice",
            "divide once: the framework or the program, not both",
        ),
        (
            in_loss and counts[0] > 1 and any(_is(large, count) for count in (*counts, counts[1] // ranks[side])),
            "sum instead of mean",
            f"the loss of {label} is the sum over its {large:.0f} samples, not the mean",
            'reduction="mean", or divide by the number of samples',
        ),
        (
            _is(large, ranks[side]) and ranks[side] > 1,
            "world size",
            f"{label} adds the gradients of its {ranks[side]} ranks and does not divide, or multiplies by their number",
            DIVIDE_ONCE,
        ),
        (
            _is(large, ranks[1 - side]) and ranks[1 - side] > 1,
            "world size",
            f"{small} divides the mean over its {ranks[1 - side]} ranks by their number once more",
            DIVIDE_ONCE,
        ),
        (
            True,
            "factor",
            f"the {'loss' if in_loss else 'gradient'} of {label} is {large:.4g} times as large",
            "the loss: its reduction, weights and divisions" if in_loss else "what scales gradients after backward()",
        ),
    )
    return [Cause(kind, what, change) for holds, kind, what, change in explanations if holds][:1]


def _is(value: float, count: int) -> bool:
    return abs(value / count - 1) < DISTINCT if count else False


def clipping(view: View) -> list[Cause]:
    """Name gradients that are clipped on one side only, or before they are all added."""
    between = [_changed_between_passes(view.steps(side)) for side in (0, 1)]
    if between[0] != between[1]:
        side = int(between[1])
        what = f"{LABELS[side]} clips the gradient of each micro-batch, before the sum of the step is complete"
        return [Cause("clipping", what, "clip_grad_norm_ once, after the last backward() and before the step")]
    limits = [_clip_limit(run) for run in view.runs]
    norms = [view.steps(side)[0].norm for side in (0, 1)]
    for side in (0, 1):
        limit = limits[side]
        if limit and limits[1 - side] is None and abs(norms[side] / limit - 1) < 1e-3:
            other = view.steps(1 - side)
            after = [step.norms[-1][-1] for step in other if step.norms and step.norms[-1]]
            if len(other) > 1 and all(each and each > norms[1 - side] * 1.001 for each in after):
                what = (
                    f"{LABELS[1 - side]} clips the gradient of each rank to {limit:.4g}, before the mean over the ranks"
                )
                return [Cause("clipping", what, "clip_grad_norm_ after all ranks' gradients are averaged")]
    return _one_side_clips(view)


def _one_side_clips(view: View) -> list[Cause]:
    """Name a limit that one side lacks. A side whose gradients are below the limit need not clip them."""
    norms = [view.steps(side)[0].norm for side in (0, 1)]
    clips = [_clips(view, side) for side in (0, 1)]
    if clips[0] != clips[1]:
        side = int(clips[1])
        if norms[1 - side] <= norms[side] * 1.001:
            return []
        what = f"only {LABELS[side]} clips its gradients, here to the norm {norms[side]:.4g}"
        return [Cause("clipping", what, "clip_grad_norm_ on both sides, or on none")]
    if clips[0] and clips[1]:
        limits = [_clip_limit(run) for run in view.runs]
        if limits[0] and limits[1] and abs(limits[0] / limits[1] - 1) > 1e-3:
            what = f"gradients are clipped to the norm {limits[0]:.4g} in the first, {limits[1]:.4g} in the second"
            return [Cause("clipping", what, "one limit for clip_grad_norm_")]
    return []


def _clips(view: View, side: int) -> bool:
    """Check whether the gradients become smaller between the last backward pass and the step."""
    run = view.runs[side]
    whole = len(run.ranks) == 1 or bool(set(run.first.wrappers) & REDUCERS)  # else a rank has only its part before
    return whole and (_clip_ratio(view.steps(side)[0]) or 1.0) < 0.999


def _clip_ratio(step: Step) -> float | None:
    """Return the norm of the gradients that the optimizer gets, as a share of that after the last backward pass."""
    after = step.norms[-1][-1] if step.norms and step.norms[-1] else None
    return step.norm / after if after else None


def _clip_limit(run: Run) -> float | None:
    """Return the norm that several steps' gradients have exactly."""
    norms = Counter(
        round(step.norm, 5 - math.floor(math.log10(step.norm)) - 2) for step in run.first.steps if step.norm
    )
    if not norms:
        return None
    value, count = norms.most_common(1)[0]
    return value if count >= 2 and count >= len(run.first.steps) / 4 else None


def _changed_between_passes(steps: Sequence[Step]) -> bool:
    """Check whether something shrinks the gradients between two backward passes of a step."""
    for step in steps:
        for earlier, later in zip(step.norms, step.norms[1:], strict=False):
            if len(earlier) == 2 and earlier[1] and later[0] is not None and later[0] < earlier[1] * (1 - 1e-3):
                return later[0] > 0
    return False


def weighting(view: View) -> list[Cause]:
    """Name parts of unequal size that count alike."""
    for side in (1, 0):
        passes = view.passes(side)
        sizes = [each.counted if each.counted is not None else len(each.samples) for each in passes]
        if len(set(sizes)) > 1:
            what = "tokens that count" if any(each.counted is not None for each in passes) else "samples"
            parts = "ranks" if all(len(step.passes) == 1 for step in view.steps(side)) else "micro-batches"
            text = f"{parts} of {join_names(sizes, 4)} {what} have the same weight in the step of {LABELS[side]}"
            return [Cause("short last step", text, f"weight each part's loss by its number of {what}")]
    return []


# --- after the step ---------------------------------------------------------------------------------------------------


def buffers(view: View) -> list[Cause]:
    if view.pair.real("gradients", view.step) or view.pair.real("weights", view.step):
        return []
    odd = view.pair.real("buffers", view.step)
    if not odd:
        return []
    ranks = [bool(agree(view.steps(side), "buffers")) if len(view.runs[side].ranks) > 1 else False for side in (0, 1)]
    names = join_names([each.name for each in odd])
    why = f"; {LABELS[int(ranks[1])]}'s ranks have different ones" if any(ranks) else ""
    what = f"the buffers {names} differ, while gradients and weights are the same{why}"
    change = "how buffers are updated: once per step from the whole step, and all-reduced over the ranks"
    return [Cause("buffers", what, change)]


def update(view: View) -> list[Cause]:
    if view.pair.real("gradients", view.step):
        return []
    odd = view.pair.real("weights", view.step)
    if not odd:
        return []
    names = join_names([each.name for each in odd])
    what = f"the gradients are the same, and the step makes other weights of them: {names}"
    return [Cause("update", what, "the optimizer's state, and code that changes weights after the step")]


def gradient(view: View) -> list[Cause]:
    odd = view.pair.real("unclipped", view.step) or view.pair.real("gradients", view.step)
    if not odd:
        return []
    outputs = outputs_apart(view)
    same = "outputs of the network are the same, its gradients" if outputs == 0.0 else "gradients"
    what = f"the {same} differ in {join_names([each.name for each in odd])}: not by a factor"
    return [Cause("not named", what, "the loss and what comes between the network's output and the step")]


LAST = (update, gradient)  # if nothing else is known
AT_START: tuple[Callable[[View], list[Cause]], ...] = (other_types, ranks_apart_at_start, initial_state)
SEARCHES: tuple[Callable[[View], list[Cause]], ...] = (
    *(other_types, ranks_apart_at_start, optimizers, schedules, settings, frozen, ranks_share_samples, ranks_apart),
    *(samples, modes, clipping, forward, scales, weighting, buffers, update, gradient),
)
