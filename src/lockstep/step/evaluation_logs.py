"""The values that `self.log` gets. Those of an evaluation are reduced so that every sample counts once on any layout.

This builds on Lightning's private `_ResultCollection`, which stores logged values: on its `log`, and on `value`,
`cumulated_batch_size` and `_computed` of its entries. tests/test_promise_5_evaluation.py fails when they change.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

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
    """

    def __init__(self) -> None:
        super().__init__(training=False)
        self._logged: dict[str, tuple[bool, bool, torch.dtype, dict[str, Any]]] = {}
        self._noticed: set[str] = set()

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Store a value; the arguments are those of `self.log`, after `fx`, the hook that logs."""
        by_lightning = options.get("rank_zero_only") or options.get("sync_dist_group") is not None
        if isinstance(value, Tensor) and options.get("on_epoch", True) and not by_lightning:
            by_batch = "_batch_" in fx or not fx.startswith("on_") or options.get("batch_size") is not None
            dtype = torch.promote_types(value.dtype, torch.promote_types(torch.get_default_dtype(), torch.float32))
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
            result, exact = reduced(logged)
            item._computed = torch.tensor(result, dtype=one.dtype, device=item.value.device)
            if not exact and key not in self._noticed:
                self._noticed.add(key)
                LOG.warning(
                    "%s, logged in %s, differs between ranks and is reported as their %s%s: to get the value of one "
                    "device, log it in %s, or log a torchmetrics metric",
                    *(one.name, one.fx, one.reduction, ", weighted by samples" * (one.reduction == "mean")),
                    "test_step" if "test" in one.fx else "validation_step",
                )

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


class TrainingLogs(_ResultCollection):
    """Store the logged values of training. A line names those whose `sync_dist=True` has no effect.

    Args:
        noticed: names of values that a line has named already.

    Attributes:
        noticed: the argument.
    """

    def __init__(self, noticed: set[str] | None = None) -> None:
        super().__init__(training=True)
        self.noticed = set() if noticed is None else noticed

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Store a value; the arguments are those of `self.log`, after `fx`, the hook that logs."""
        # Of a step's value, the strategy's `reduce` reduces nothing inside a micro-batch.
        if fx == "training_step" and options.get("sync_dist") and options.get("on_step") and name not in self.noticed:
            self.noticed.add(name)
            LOG.warning(
                "%s, logged in training_step: sync_dist=True has no effect on the value of a step, which is of one "
                "piece, since ranks may have unequal numbers of pieces: return the number beside the loss to get "
                "its mean over all samples",
                name,
            )
        super().log(fx, name, value, **options)


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
        certain = one.sync_dist
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
