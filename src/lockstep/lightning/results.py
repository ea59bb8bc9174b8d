"""The values that `self.log` gets. They are reduced so that every sample counts once on any layout.

This builds on Lightning's private `_ResultCollection`, which stores logged values: on its `log`, and on `value`,
`cumulated_batch_size`, `_forward_cache` and `_computed` of its entries. tests/test_promise_5_evaluation.py and
tests/step/test_logged_values.py fail when they change.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

from lockstep.arithmetic.exact_total import ExactTotal
from lockstep.lightning.logged_values import (
    EPOCH,
    PIECE,
    STEP,
    WHOLE,
    Key,
    Logged,
    Part,
    Record,
    dtype_of,
    merge,
    name_once,
    reduced,
    value_of_epoch,
    value_of_step,
)
from lockstep.step.batch import StepBatch

LOG = logging.getLogger("lockstep")
NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}  # the neutral element of each reduction
SENT = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute")


class EvaluationLogs(_ResultCollection):
    """Store the logged values of an evaluation in float64 and reduce them over the ranks at its end.

    torchmetrics objects reduce themselves. Lightning handles values with `sync_dist_group`, with `rank_zero_only` those
    of hooks, and values per step (`on_step=True`), which come from rank zero's batches.

    Attributes:
        uncertain: the names of values that are others on one device, each with the hook that logs it.
        speaks: whether a line names them: on rank zero.
    """

    speaks = True

    def __init__(self) -> None:
        super().__init__(training=False)
        self._logged: dict[str, Key] = {}
        self._noticed: set[str] = set()
        self.uncertain: dict[str, str] = {}

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Store a value; the arguments are those of `self.log`, after `fx`, the hook that logs."""
        if not fx.startswith("on_"):  # `validation_step`: its value is that of all ranks' samples
            options["rank_zero_only"] = False
        adds_number = options.get("add_dataloader_idx", True) and self.dataloader_idx is not None
        if options.get("rank_zero_only"):
            suffix = self.DATALOADER_SUFFIX.format(self.dataloader_idx) if adds_number else ""
            self.uncertain[f"{name}{suffix}"] = fx
        by_lightning = options.get("rank_zero_only") or options.get("sync_dist_group") is not None
        if isinstance(value, Tensor) and options.get("on_epoch", True) and not by_lightning:
            by_batch = "_batch_" in fx or not fx.startswith("on_") or options.get("batch_size") is not None
            key = f"{fx}.{name}.{self.dataloader_idx}" if adds_number else f"{fx}.{name}"
            sent, sync_dist = _sent(options), bool(options.get("sync_dist"))
            dtype, value, options = dtype_of(value), value.double(), {**options, "sync_dist": False}
            super().log(fx, name, value, **options)
            item = self[key]
            kind = PIECE if by_batch else EPOCH
            self._logged[key] = Key(fx, item.meta.name, item.meta.reduce_fx.__name__, kind, dtype, sent, sync_dist)
            return
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
            about = one.key
            if about.kind == PIECE and not any(count for count, each in ranks if key in each):
                self.pop(key, None)  # a rank without samples has logged it for its dummy sample
                continue
            if key not in self or self[key].has_reset:
                neutral = torch.tensor(NEUTRAL[about.reduction], dtype=torch.float64)
                options = {**about.options, "reduce_fx": about.reduction, "sync_dist_fn": sync_dist_fn}
                super().log(about.fx, about.name, neutral, batch_size=0, **options)
            item = self[key]
            logged = [(count, each[key]) for count, each in ranks if key in each]
            result, certain = reduced(logged)
            item._computed = torch.tensor(result, dtype=about.dtype, device=item.value.device)
            if not certain:
                self.uncertain[self._forked_name(item, False)[0]] = about.fx
                if self.speaks:
                    name_once(about, self._noticed)

    def _local_logs(self) -> dict[str, Logged]:
        """Return the logged values of this rank, by key."""
        logs = {}
        for key, item in self.valid_items():
            if key in self._logged and item.is_tensor:
                weight = float(item.cumulated_batch_size) if item.meta.is_mean_reduction else 1.0
                logs[key] = Logged(self._logged[key], float(item.value), weight)
        return logs


class TrainingLogs(_ResultCollection):
    """Store what training logs, and reduce it over the pieces of a step or an epoch and over the ranks.

    A value of `training_step` is one of its piece, and a mean is weighted by samples. Values are added without
    rounding, so the result has the same bits in any order, on any layout with the same pieces.

    Attributes:
        alone: whether this process has all pieces. Then values are reduced when they are read. If not, they are reduced
            in steps in which all ranks call `reduce`, and reads between them get the values of the last one.
        uncertain: the names of values that are others on one device, each with the hook that logs it.
        speaks: whether a line names them: on rank zero.
    """

    speaks = True

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
        if self._piece is not None:  # `training_step`: its value is that of all ranks' samples
            options["rank_zero_only"] = False
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
        if record is None and isinstance(value, Tensor):
            self.pop(f"{fx}.{name}", None)  # `_item` may have added it for another rank, with fewer options
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
        sent = _sent(options)
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
            ranks: list[tuple[int, dict[str, Part]]] = gather((self._samples, self._parts()))
            for key in dict.fromkeys(key for _, each in ranks for key in each):
                pairs = [(samples, each.get(key)) for samples, each in ranks]
                if about := next((part.key for _, part in pairs if part and part.key), None):  # logged since a resume
                    pairs = [(samples, part and part._replace(key=about)) for samples, part in pairs]
                    values.append((key, about, *value_of_epoch(about, pairs)))
        for key, about, value, certain in values:
            item = self._item(key, about)
            result = torch.tensor(value, dtype=about.dtype, device=item.value.device)
            setattr(item, "_forward_cache" if on_step else "_computed", result)
            if not certain:
                self.uncertain[about.name] = about.fx
                if self.speaks:
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

    def _parts(self) -> dict[str, Part]:
        """Return what this rank has logged since the epoch began, and what a checkpoint has of what it has not since.

        A rank that has no sample in the rest of the epoch logs nothing more, and may be the one that takes the sums.
        """
        waiting = self._restored if self._takes_restored else {}
        return waiting | {key: record.part() for key, record in self._records.items() if record.epoch}

    def state(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Return what all ranks have logged since the epoch began, as plain data. Every rank calls this."""
        parts = {key: part for key, part in self._parts().items() if not part.key or part.key.kind != EPOCH}
        ranks: list[dict[str, Part]] = gather(parts)
        merged: dict[str, Part] = {}
        for key in dict.fromkeys(key for each in ranks for key in each):
            logged = [each[key] for each in ranks if key in each]
            about = next((part.key for part in logged if part.key), None)
            merged[key] = merge([part._replace(key=about) for part in logged]) if about else logged[0]
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


def _sent(options: Mapping[str, Any]) -> dict[str, Any]:
    return {option: options[option] for option in SENT if option in options}


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
    for key, item in results.valid_items():
        if not item.is_tensor and item.meta.on_epoch:
            logged[key] = {name: getattr(item.meta, name) for name in ("fx", "name", "reduce_fx", *SENT)}
            if item.meta.add_dataloader_idx and item.meta.dataloader_idx is not None:  # `log` adds it again
                logged[key]["fx"] = item.meta.fx.removesuffix(f".{item.meta.dataloader_idx}")
            logged[key] |= {"sync_dist": item.meta.sync.should, "rank_zero_only": item.meta.sync.rank_zero_only}
    for key, options in {key: each for rank in gather(logged) for key, each in rank.items()}.items():
        if key not in logged:
            metric = module.get_submodule(options["metric_attribute"])
            results.log(value=metric, sync_dist_fn=sync_dist_fn, **options)
        results[key] = results.pop(key)
