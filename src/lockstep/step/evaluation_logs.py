"""The values that `self.log` gets. They are reduced so that every sample counts once on any layout.

This builds on Lightning's private `_ResultCollection`, which stores logged values: on its `log`, and on `value`,
`cumulated_batch_size`, `_forward_cache` and `_computed` of its entries. tests/test_promise_5_evaluation.py and
tests/step/test_logged_values.py fail when they change.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lockstep.arithmetic.exact_total import ExactTotal
from lockstep.step.batch import StepBatch

LOG = logging.getLogger("lockstep")
NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}  # the neutral element of each reduction
SENT = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute")


class Logged(NamedTuple):
    """The values that one rank has logged under one name.

    Attributes:
        fx: the hook that logged them.
        name: the name that they were logged under.
        value: for `mean` the sum of the values, each times the samples of its batch; else the sum, minimum or maximum.
        weight: for `mean` the samples in `value`; else 1.
        reduction: `mean`, `sum`, `min` or `max`.
        by_batch: whether the values were logged for batches. If not, one value was logged for the whole evaluation, at
            its start or end.
        sync_dist: whether the module asked for a reduction over ranks.
        dtype: dtype of the result.
        options: options of `log`. A rank that has not logged this name needs them to add it.
    """

    fx: str
    name: str
    value: float
    weight: float
    reduction: str
    by_batch: bool
    sync_dist: bool
    dtype: torch.dtype
    options: dict[str, Any]


class EvaluationLogs(_ResultCollection):
    """Store the logged values of an evaluation in float64 and reduce them over the ranks at its end.

    torchmetrics objects reduce themselves. Lightning handles values with `rank_zero_only` or `sync_dist_group`, and
    values per step (`on_step=True`), which come from rank zero's batches.

    Attributes:
        uncertain: the names of values that are others on one device, each with the hook that logs it.
    """

    def __init__(self) -> None:
        super().__init__(training=False)
        self._logged: dict[str, tuple[bool, bool, torch.dtype, dict[str, Any]]] = {}
        self._noticed: set[str] = set()
        self.uncertain: dict[str, str] = {}

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Store a value; the arguments are those of `self.log`, after `fx`, the hook that logs."""
        if options.get("rank_zero_only"):
            self.uncertain[name] = fx
        by_lightning = options.get("rank_zero_only") or options.get("sync_dist_group") is not None
        if isinstance(value, Tensor) and options.get("on_epoch", True) and not by_lightning:
            by_batch = "_batch_" in fx or not fx.startswith("on_") or options.get("batch_size") is not None
            dtype = dtype_of(value)
            sent = {option: options[option] for option in SENT if option in options}
            self._logged[f"{fx}.{name}"] = by_batch, bool(options.get("sync_dist")), dtype, sent
            value, options = value.double(), {**options, "sync_dist": False}
        super().log(fx, name, value, **options)

    def reduce(self, gather: Callable[[Any], list[Any]], samples: int, sync_dist_fn: Any) -> None:
        """Replace the values of this rank by the reduction over all ranks. Every rank calls this.

        Args:
            gather: takes an object and returns the objects of all ranks, in rank order.
            samples: number of samples that this rank has evaluated.
            sync_dist_fn: see `log`.
        """
        ranks: list[tuple[int, dict[str, Logged]]] = gather((samples, self._local_logs()))
        for key, one in {key: one for _, logged in reversed(ranks) for key, one in logged.items()}.items():
            if key not in self or self[key].has_reset:
                neutral = torch.tensor(NEUTRAL[one.reduction], dtype=torch.float64)
                options = {**one.options, "reduce_fx": one.reduction, "sync_dist_fn": sync_dist_fn}
                super().log(one.fx, one.name, neutral, batch_size=0, **options)
            item = self[key]
            logged = [(count, each[key]) for count, each in ranks if key in each]
            result, certain = reduced(logged)
            item._computed = torch.tensor(result, dtype=one.dtype, device=item.value.device)
            if not certain:
                self.uncertain[one.name] = one.fx
                name_once(one, self._noticed)

    def _local_logs(self) -> dict[str, Logged]:
        """Return the logged values of this rank, by key."""
        logs = {}
        for key, item in self.valid_items():
            if key in self._logged and item.is_tensor:
                by_batch, sync_dist, dtype, options = self._logged[key]
                weight = float(item.cumulated_batch_size) if item.meta.is_mean_reduction else 1.0
                about = item.meta.reduce_fx.__name__, by_batch, sync_dist, dtype, options
                logs[key] = Logged(item.meta.fx, item.meta.name, float(item.value), weight, *about)
        return logs


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


class TrainingLogs(_ResultCollection):
    """Store what training logs, and reduce it over the pieces of a step or an epoch and over the ranks.

    A value of `training_step` is one of its piece, and a mean is weighted by samples. Values are added without
    rounding, so the result has the same bits in any order, on any layout with the same pieces.

    Attributes:
        alone: whether this process has all pieces. Then values are reduced when they are read. If not, they are reduced
            in steps in which all ranks call `reduce`, and reads between them get the values of the last one.
        uncertain: the names of values that are others on one device, each with the hook that logs it.
    """

    def __init__(self) -> None:
        super().__init__(training=True)
        self.alone = True
        self._unread = {True: False, False: False}  # of a step's values and of an epoch's: whether one is not reduced
        self.uncertain: dict[str, str] = {}
        self._noticed: set[str] = set()
        self._records: dict[str, Record] = {}
        self._restored: dict[str, Part] = {}
        self._takes_restored = False
        self._piece: tuple[int, int] | None = None  # number and samples of the piece that is computed
        self._call = 0  # counts the passes
        self._samples = 0  # that this rank has trained on since the epoch began

    @property
    def unread(self) -> bool:
        """Whether a step's values were logged since they were last reduced."""
        return self._unread[True]

    # --- logging ---

    @contextmanager
    def of_piece(self, piece: int, size: int, forward: bool = False) -> Iterator[None]:
        """Return the context of a piece's pass, which logs values of the piece.

        Args:
            piece: its number.
            size: its samples.
            forward: whether the values replace those of an earlier pass of the piece, which an optimizer may repeat.
        """
        self._call += forward
        before, self._piece = self._piece, (piece, size)
        try:
            yield
        finally:
            self._piece = before

    def end_step(self, samples: int) -> None:
        """Count the samples of a step."""
        self._samples += samples

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Store a value; the arguments are those of `self.log`, after `fx`, the hook that logs."""
        if options.get("rank_zero_only") or options.get("sync_dist_group") is not None:
            self.uncertain[name] = fx
            super().log(fx, name, value, **options)
            return
        weight, record = options.pop("batch_size", None), self._records.get(f"{fx}.{name}")
        number = value
        if not isinstance(value, Tensor):  # a torchmetrics object, which reduces itself over an epoch
            super().log(fx, name, value, **options)
            number = value._forward_cache
            if not options.get("on_step") or not isinstance(number, Tensor) or number.numel() != 1:
                return
        if isinstance(value, Tensor) and (record is None or record.arguments != options):  # Lightning checks them
            super().log(fx, name, value, **{**options, "sync_dist": False, "batch_size": 1})
        if record is None:
            record = self._new_record(fx, name, value, number, options)
        self._add(record, number, weight)
        self[f"{fx}.{name}"].has_reset = False
        self._unread[True] = self._unread[False] = True

    def _new_record(self, fx: str, name: str, value: Any, number: Tensor, options: dict[str, Any]) -> Record:
        """Return a new record of a key that `super().log` has checked, with what a checkpoint has of it."""
        key, batch = f"{fx}.{name}", self.batch
        kind = PIECE if self._piece else STEP if isinstance(batch, StepBatch) else EPOCH
        reduction = self[key].meta.reduce_fx.__name__ if isinstance(value, Tensor) else "mean"
        sent = {option: options[option] for option in SENT if option in options}
        about = Key(fx, name, reduction, kind, dtype_of(number), sent, bool(options.get("sync_dist")))
        record = Record(about, options, isinstance(value, Tensor) and bool(options.get("on_epoch", True)))
        if key in self._restored:
            record.restore(self._restored.pop(key), self._takes_restored)
        self._records[key] = record
        return record

    def _add(self, record: Record, number: Tensor, weight: float | None) -> None:
        """Add a value to a record; `weight` is the `batch_size` of the call, or None."""
        number = number.detach()
        value = number.item() if number.device.type == "cpu" else number.clone()  # else it may change until it is read
        if self._piece is not None:
            piece, size = self._piece
            weight = size if weight is None else weight
            record.add(self.batch.step if self.batch else 0, piece, self._call, weight, weight, value)
        elif isinstance(self.batch, StepBatch):
            weight, local = (self.batch.samples, self.batch.num_local_samples) if weight is None else (weight, weight)
            record.add(self.batch.step, WHOLE, -1, weight, local, value)
        else:
            weight = 1 if weight is None else weight
            record.add(-1, WHOLE, -1, weight, weight, value)

    # --- reading ---

    def reduce(self, gather: Callable[[Any], list[Any]], on_step: bool) -> None:
        """Replace the values of this rank by those of all ranks. Every rank calls this.

        Args:
            gather: takes an object and returns the objects of all ranks, in rank order.
            on_step: reduce the values of the last step; else those since the epoch began.
        """
        self._unread[on_step] = False
        values: list[tuple[str, Key, float, bool]] = []
        if on_step:
            steps: list[dict[str, Any]] = gather(
                {
                    key: (record.key, record.step, record.last_values())
                    for key, record in self._records.items()
                    if record.arguments.get("on_step")
                }
            )
            for key in dict.fromkeys(key for each in steps for key in each):
                of_ranks = [each[key] for each in steps if key in each]
                newest = max(step for _, step, _ in of_ranks)
                logged = [numbers for _, step, numbers in of_ranks if step == newest]
                values.append((key, of_ranks[0][0], *value_of_step(of_ranks[0][0], logged, len(steps))))
        else:
            parts = {key: record.part() for key, record in self._records.items() if record.epoch}
            ranks: list[tuple[int, dict[str, Part]]] = gather((self._samples, parts))
            for key in dict.fromkeys(key for _, each in ranks for key in each):
                pairs = [(samples, each.get(key)) for samples, each in ranks]
                about = next(part.key for _, part in pairs if part is not None)
                values.append((key, about, *value_of_epoch(about, pairs)))
        for key, about, value, certain in values:
            item = self._item(key, about)
            result = torch.tensor(value, dtype=about.dtype, device=item.value.device)
            setattr(item, "_forward_cache" if on_step else "_computed", result)
            if not certain:
                self.uncertain[about.name] = about.fx
                name_once(about, self._noticed)

    def _item(self, key: str, about: Key) -> Any:
        """Return the entry of a key in this collection. A rank that has not logged it adds it."""
        if key not in self or self[key].has_reset:
            if about.options.get("metric_attribute") is None:
                zero = torch.zeros((), dtype=about.dtype)
                super().log(about.fx, about.name, zero, batch_size=1, reduce_fx=about.reduction, **about.options)
            self[key].has_reset = False
        return self[key]

    def _get_cache(self, result_metric: Any, on_step: bool) -> Tensor | None:  # type: ignore[override]
        """Return the value of the last step or of the epoch. Those of torchmetrics objects are Lightning's."""
        meta = result_metric.meta
        record = self._records.get(f"{meta.fx}.{meta.name}")
        if record is None or not (on_step or record.epoch):
            return super()._get_cache(result_metric, on_step)
        if not (meta.on_step if on_step else meta.on_epoch):
            return None
        value: Tensor | None = result_metric._forward_cache if on_step else result_metric._computed
        return value

    def metrics(self, on_step: bool) -> Any:
        """Return what is logged, as Lightning does."""
        if self.alone and self._unread[on_step]:
            self.reduce(lambda value: [value], on_step)
        return super().metrics(on_step)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Forget what was logged. Lightning calls this with the name of a hook when the hook changes in a first step.

        That would drop the values of earlier pieces, and these values end with their epoch, so it is left out.
        """
        if fx is None:
            self._records, self._samples = {}, 0
            super().reset(metrics, fx)

    # --- checkpoints ---

    def state(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Return what all ranks have logged since the epoch began, as plain data. Every rank calls this."""
        parts = {key: record.part() for key, record in self._records.items() if record.epoch}
        ranks: list[dict[str, Part]] = gather({key: part for key, part in parts.items() if part.key.kind != EPOCH})
        keys = dict.fromkeys(key for each in ranks for key in each)
        merged = {key: merge([each[key] for each in ranks if key in each]) for key in keys}
        return {
            key: [
                *(hex(part.total.units), part.total.broken, part.weight),
                *(hex(part.local.units), part.local.broken, part.local_weight),
                *(part.lowest, part.highest, part.digest),
            ]
            for key, part in merged.items()
        }

    def restore(self, state: Mapping[str, Any], takes_all: bool) -> None:
        """Continue the sums of an epoch from the result of `state`; see `Record.restore`."""
        self._restored, self._takes_restored = {}, takes_all
        for key, (units, broken, weight, local_units, local_broken, local_weight, *others) in state.items():
            total, local = ExactTotal(int(units, 16), broken), ExactTotal(int(local_units, 16), local_broken)
            self._restored[key] = Part(None, total, weight, local, local_weight, *others)


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
            options = about.reduction, False, about.sync_dist, about.dtype, about.options
            logged.append(
                (samples, Logged(about.fx, about.name, value * weight if is_mean else value, weight, *options))
            )
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


def name_once(about: Any, noticed: set[str]) -> None:
    """Name a value of several ranks in one line that one device would have otherwise.

    Args:
        about: a `Key` or `Logged`.
        noticed: the names that have such a line. The new one is added.
    """
    if about.name in noticed or getattr(rank_zero_only, "rank", 0):
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
    one = logged[0][1]
    numbers = torch.tensor([each.value for _, each in logged], dtype=torch.float64)
    weights = torch.tensor([each.weight for _, each in logged], dtype=torch.float64)
    certain = True
    if not one.by_batch:  # one value per rank; ranks without a sample are left out
        samples = torch.tensor([count for count, _ in logged], dtype=torch.float64)
        counts = samples > 0 if samples.any() else samples == 0
        numbers, weights, samples = (numbers / weights)[counts], weights[counts], samples[counts].clamp(min=1)
        same = bool(torch.isclose(numbers, numbers[:1], rtol=0, atol=0, equal_nan=True).all())
        if same and not (one.sync_dist and one.reduction == "sum"):
            return float(numbers[0]), True
        certain = one.sync_dist and one.reduction != "mean"  # a mean of means is not the mean over samples
        numbers, weights = (numbers * samples, samples) if one.reduction == "mean" else (numbers, weights)
    if one.reduction == "mean":
        return float(numbers.sum() / weights.sum()), certain
    return float(getattr(numbers, one.reduction)()), certain


def add_missing_metrics(
    results: _ResultCollection, gather: Callable[[Any], list[Any]], module: Any, sync_dist_fn: Any
) -> None:
    """Log the torchmetrics objects that other ranks have logged, and bring them into the same order on all ranks.

    Every rank calls this.

    Args:
        results: what this rank has logged.
        gather: see `EvaluationLogs.reduce`.
        module: the LightningModule, whose attributes the metrics are.
        sync_dist_fn: see `log`.
    """
    logged = {}
    for key, item in results.items():
        if not item.is_tensor and not item.has_reset and item.meta.on_epoch:
            logged[key] = {name: getattr(item.meta, name) for name in ("fx", "name", "reduce_fx", *SENT)}
            logged[key] |= {"sync_dist": item.meta.sync.should, "rank_zero_only": item.meta.sync.rank_zero_only}
    for key, options in {key: each for rank in gather(logged) for key, each in rank.items()}.items():
        if key not in logged:
            metric = module.get_submodule(options["metric_attribute"])
            results.log(value=metric, sync_dist_fn=sync_dist_fn, **options)
        results[key] = results.pop(key)
