"""What is logged under one name: the values of pieces, steps and epochs, and what they are together on all ranks."""

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.arithmetic.exact_total import ExactTotal

LOG = logging.getLogger("lockstep")


Number = float | Tensor  # a tensor on a device whose values are copied to the host only when they are read
PIECE, STEP, EPOCH = "piece", "step", "epoch"  # what a value was logged for
WHOLE = -1  # the place of a value that is of a whole step, among those of pieces
MOST_WAITING = 1024  # values of an epoch that are not yet added up
UNEQUAL = "unequal"  # in place of a digest: ranks have logged other values


class Key(NamedTuple):
    """What is logged under one name by one hook. A rank that has not logged it needs this to add it.

    Attributes:
        fx: the hook that logs.
        name: the name.
        reduction: `mean`, `sum`, `min` or `max`.
        kind: `PIECE`, `STEP` or `EPOCH`.
        dtype: dtype of the result.
        options: options of `log`.
        sync_dist: whether the module asks for a reduction over ranks.
    """

    fx: str
    name: str
    reduction: str
    kind: str
    dtype: torch.dtype
    options: dict[str, Any]
    sync_dist: bool


class Logged(NamedTuple):
    """The values that one rank has logged under one key in an evaluation, or outside of steps.

    Attributes:
        key: the key. Its kind is `EPOCH` for one value of the whole evaluation, logged at its start or end, and `PIECE`
            for values of batches.
        value: for `mean` the sum of the values, each times the samples of its batch; else the sum, minimum or maximum.
        weight: for `mean` the samples in `value`; else 1.
    """

    key: Key
    value: float
    weight: float


class Part(NamedTuple):
    """What one rank has logged under one key since its epoch began.

    Attributes:
        key: the key; None if it comes from a checkpoint.
        total: the sum of the values; of means each times its weight.
        weight: the sum of the weights.
        local: of a value of whole steps, the same sum with the samples of this rank as weights.
        local_weight: the sum of these.
        lowest: the smallest value.
        highest: the largest value.
        digest: of a value of whole steps, a hash of the values.
    """

    key: Any
    total: ExactTotal
    weight: float
    local: ExactTotal
    local_weight: float
    lowest: float
    highest: float
    digest: str


class Record:
    """The values that this rank logs under one key.

    Args:
        key: the key.
        arguments: the arguments of `log`, which must be the same in each call.
        epoch: whether the value of an epoch is wanted.

    Attributes:
        key: the argument.
        arguments: the argument.
        step: the number of the last step that logged a value.
        latest: the values of this step, by piece: the number of the pass that logged them, and for each value its
            weight, its weight on this rank, and itself.
    """

    def __init__(self, key: Key, arguments: dict[str, Any], epoch: bool) -> None:
        self.key, self.arguments, self.epoch = key, arguments, epoch
        self.step = -1
        self.latest: dict[int, tuple[int, list[tuple[float, float, Number]]]] = {}
        self._latest_waits = False  # whether `latest` is still to be added to the epoch's values
        self._waiting: list[tuple[float, float, Number]] = []
        self._total, self._local = ExactTotal(), ExactTotal()
        self._weight = self._local_weight = 0.0
        self._lowest, self._highest = math.inf, -math.inf
        self._digest = ""

    def add(self, step: int, piece: int, call: int, weight: float, local_weight: float, value: Number) -> None:
        """Add a value.

        Args:
            step: the number of its step; -1 outside of steps.
            piece: the number of its piece, or `WHOLE`.
            call: the number of the pass. A later pass of a piece replaces the values of an earlier one.
            weight: the weight of the value in a mean.
            local_weight: its weight where ranks have logged other values.
            value: the value.
        """
        if step != self.step:
            self._end_step()
            self.step, self.latest = step, {}
        if piece not in self.latest or self.latest[piece][0] != call:
            self.latest[piece] = call, []
        self.latest[piece][1].append((weight, local_weight, value))
        self._latest_waits = True

    def _end_step(self) -> None:
        """Move the values of the last step to those of the epoch."""
        if self.epoch and self._latest_waits:
            for _, values in self.latest.values():
                self._waiting += values
            if len(self._waiting) >= MOST_WAITING:
                self._add_up()
        self._latest_waits = False

    def last_values(self) -> dict[int, tuple[float, float, float]]:
        """Return the last value of each piece of the last step with its weights; see `latest`."""
        last = [values[-1] for _, values in self.latest.values()]
        numbers = on_host([value for _, _, value in last])
        return {
            piece: (weight, local, number)
            for piece, (weight, local, _), number in zip(self.latest, last, numbers, strict=True)
        }

    def part(self) -> Part:
        """Return what this rank has logged since the epoch began."""
        self._end_step()
        self._add_up()
        sums = self._total, self._weight, self._local, self._local_weight
        return Part(self.key, *sums, self._lowest, self._highest, self._digest)

    def _add_up(self) -> None:
        """Add the values that wait to the sums, without rounding, so that their order does not matter."""
        if not self._waiting:
            return
        weights, local_weights, values = zip(*self._waiting, strict=True)
        self._waiting, numbers = [], on_host(values)
        is_mean = self.key.reduction == "mean"
        self._total.add(products(weights, numbers) if is_mean else numbers)
        self._weight += sum(weights)
        self._lowest = worst(min, (self._lowest, *numbers))
        self._highest = worst(max, (self._highest, *numbers))
        if self.key.kind == STEP:
            counted = [number for weight, number in zip(local_weights, numbers, strict=True) if weight]
            self._local.add(products(local_weights, numbers) if is_mean else counted)
            self._local_weight += sum(local_weights)
            content = self._digest + np.asarray(numbers).tobytes().hex()
            self._digest = hashlib.sha256(content.encode()).hexdigest()

    def restore(self, part: Part, takes_all: bool) -> None:
        """Continue the sums of an epoch from a checkpoint.

        Args:
            part: what all ranks had logged together.
            takes_all: whether this rank takes the values that each rank has for itself. One of them does.
        """
        if takes_all or self.key.kind == STEP:
            self._total, self._weight = part.total, part.weight
            self._lowest, self._highest = part.lowest, part.highest
            self._digest = part.digest if takes_all or part.digest != UNEQUAL else ""
        if takes_all:
            self._local, self._local_weight = part.local, part.local_weight


def on_host(values: Sequence[Number]) -> list[float]:
    """Return numbers as Python's, by one copy from the device."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    numbers = iter(torch.stack([each.double() for each in tensors]).tolist() if tensors else ())
    return [next(numbers) if isinstance(value, Tensor) else value for value in values]


def products(weights: Sequence[float], numbers: Sequence[float]) -> list[float]:
    """Return numbers multiplied by their weights, without those of weight 0, which may be nan."""
    return [weight * number for weight, number in zip(weights, numbers, strict=True) if weight]


def worst(choose: Callable[[Sequence[float]], float], numbers: Sequence[float]) -> float:
    """Return the smallest or largest number; nan if one is nan, whatever their order is."""
    return math.nan if any(map(math.isnan, numbers)) else choose(numbers)


def dtype_of(value: Tensor) -> torch.dtype:
    """Return the dtype in which a logged value is shown: at least float32, and torch's default."""
    return torch.promote_types(value.dtype, torch.promote_types(torch.get_default_dtype(), torch.float32))


def merge(parts: Sequence[Part]) -> Part:
    """Return the parts of several ranks as one."""
    total, local = ExactTotal(), ExactTotal()
    shared = parts[0].key.kind == STEP  # then each rank's total is that of the whole steps
    for part in parts[:1] if shared else parts:
        total.merge(part.total)
    for part in parts:
        local.merge(part.local)
    return Part(
        parts[0].key,
        total,
        parts[0].weight if shared else sum(part.weight for part in parts),
        local,
        sum(part.local_weight for part in parts),
        worst(min, [part.lowest for part in parts]),
        worst(max, [part.highest for part in parts]),
        parts[0].digest if len({part.digest for part in parts}) == 1 else UNEQUAL,
    )


def value_of_step(
    about: Key, logged: Sequence[dict[int, tuple[float, float, float]]], ranks: int
) -> tuple[float, bool]:
    """Return the value of a step, and whether one device would certainly get the same.

    Args:
        about: the key.
        logged: for each rank that has logged a value, the result of `Record.last_values`.
        ranks: number of ranks.
    """
    values = list({piece: value for each in reversed(logged) for piece, value in each.items()}.values())
    weights, certain = [weight for weight, _, _ in values], True
    if about.kind == STEP:
        values = [each[WHOLE] for each in logged]
        if len({number for _, _, number in values}) == 1 or all(math.isnan(number) for _, _, number in values):
            return values[0][2], len(logged) == ranks
        values = [each for each in values if each[1]] or values
        weights, certain = [local for _, local, _ in values], False
    numbers = [number for _, _, number in values]
    if about.reduction in ("min", "max"):
        return worst(min if about.reduction == "min" else max, numbers), certain
    total, is_mean = ExactTotal(), about.reduction == "mean"
    total.add(products(weights, numbers) if is_mean else numbers)
    return total.over(sum(weights) if is_mean else 1), certain


def value_of_epoch(about: Key, ranks: Sequence[tuple[int, Part | None]]) -> tuple[float, bool]:
    """Return the value of an epoch, and whether one device would certainly get the same.

    Args:
        about: the key.
        ranks: for each rank, the samples that it has trained on, and what it has logged.
    """
    pairs = [(samples, part) for samples, part in ranks if part is not None]
    whole, certain = merge([part for _, part in pairs]), True
    if about.kind == EPOCH:
        is_mean, logged = about.reduction == "mean", []
        for samples, part in pairs:
            value, weight = one_value(about, part), part.weight if is_mean else 1.0
            logged.append((samples, Logged(about, value * weight if is_mean else value, weight)))
        return reduced(logged)
    if about.kind == STEP:
        certain = len(pairs) == len(ranks) and whole.digest != UNEQUAL
        if whole.digest == UNEQUAL:
            whole = whole._replace(total=whole.local, weight=whole.local_weight)
    else:
        certain = all(part is not None for samples, part in ranks if samples)
    return one_value(about, whole), certain


def one_value(about: Key, part: Part) -> float:
    """Return the value of an epoch by one part."""
    if about.reduction in ("min", "max"):
        return part.lowest if about.reduction == "min" else part.highest
    return part.total.over(part.weight if about.reduction == "mean" else 1)


def differs(name: str, fx: str) -> str:
    """Return text that says that a value differs between ranks."""
    return f"{name}, logged in {fx}, differs between ranks"


def remedy(fx: str) -> str:
    """Return text that says how a value that a hook logs becomes that of one device."""
    step = next((f"{stage}_step" for stage in ("validation", "test") if stage in fx), "training_step")
    return f"to get the value of one device, log it in {step}, or log a torchmetrics metric"


def name_once(about: Key, noticed: set[str]) -> None:
    """Name, in one line, a value of several ranks that would be another one on one device.

    Args:
        about: its key.
        noticed: the names that have such a line. The new one is added.
    """
    if about.name in noticed:
        return
    noticed.add(about.name)
    weighted = ", weighted by samples" * (about.reduction == "mean")
    LOG.warning(
        f"{differs(about.name, about.fx)} and is reported as their {about.reduction}{weighted}: {remedy(about.fx)}"
    )


def reduced(logged: Sequence[tuple[int, Logged]]) -> tuple[float, bool]:
    """Reduce the values of several ranks under one name.

    Args:
        logged: for each rank, the number of samples that it has evaluated, and its values.

    Returns:
        The result, and whether one device would certainly get the same.
    """
    key = logged[0][1].key
    numbers = torch.tensor([each.value for _, each in logged], dtype=torch.float64)
    weights = torch.tensor([each.weight for _, each in logged], dtype=torch.float64)
    certain = True
    if key.kind == EPOCH:  # one value per rank; ranks without a sample are left out
        samples = torch.tensor([count for count, _ in logged], dtype=torch.float64)
        counts = samples > 0 if samples.any() else samples == 0
        numbers, weights, samples = (numbers / weights)[counts], weights[counts], samples[counts].clamp(min=1)
        same = bool(torch.isclose(numbers, numbers[:1], rtol=0, atol=0, equal_nan=True).all())
        if same and not (key.sync_dist and key.reduction == "sum"):
            return float(numbers[0]), True
        certain = key.sync_dist and key.reduction != "mean"  # a mean of means is not the mean over samples
        numbers, weights = (numbers * samples, samples) if key.reduction == "mean" else (numbers, weights)
    if key.reduction == "mean":
        return float(numbers.sum() / weights.sum()), certain
    return float(getattr(numbers, key.reduction)()), certain
