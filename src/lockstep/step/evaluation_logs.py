"""What `self.log` gets in an evaluation, reduced over the ranks, so that every sample counts once on any layout.

Builds on Lightning's private `_ResultCollection`, which keeps what was logged: its `log`, and the `value`,
`cumulated_batch_size` and `_computed` of its entries. tests/test_promise_5_evaluation.py fails when they change.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

LOG = logging.getLogger("lockstep")
NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}  # by reduction: what changes nothing
SENT = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute")


class Logged(NamedTuple):
    """What one rank has logged under a name.

    Attributes:
        value: the sum of what was logged, each times its batch's samples, where the reduction is `mean`; else the sum,
            minimum or maximum.
        weight: samples that `value` counts; 1 where the reduction is another one.
        reduction: `mean`, `sum`, `min` or `max`.
        by_batch: whether `weight` counts samples; else the value was logged once, at the evaluation's start or end.
        sync_dist: whether the module asks for a reduction over ranks itself.
        dtype: of the result.
        options: of `log`, so that a rank that has not logged it can show it too.
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
    """Keeps what an evaluation logs, in float64, and reduces it over the ranks when the evaluation ends.

    A metric of torchmetrics reduces itself. What is logged with `rank_zero_only` or `sync_dist_group` is left to
    Lightning; so are values shown step by step (`on_step=True`), which are those of rank zero's batches.
    """

    def __init__(self) -> None:
        super().__init__(training=False)
        self._logged: dict[str, tuple[bool, bool, torch.dtype, dict[str, Any]]] = {}
        self._noticed: set[str] = set()

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        lightnings = options.get("rank_zero_only") or options.get("sync_dist_group") is not None
        if isinstance(value, Tensor) and options.get("on_epoch", True) and not lightnings:
            by_batch = "_batch_" in fx or not fx.startswith("on_") or options.get("batch_size") is not None
            dtype = torch.promote_types(value.dtype, torch.promote_types(torch.get_default_dtype(), torch.float32))
            sent = {option: options[option] for option in SENT if option in options}
            self._logged[f"{fx}.{name}"] = by_batch, bool(options.get("sync_dist")), dtype, sent
            value, options = value.double(), {**options, "sync_dist": False}
        super().log(fx, name, value, **options)

    def reduce(self, gather: Callable[[Any], list[Any]], samples: int, sync_dist_fn: Any) -> None:
        """Replace what this rank has logged by what all ranks have. Every rank calls it.

        Args:
            gather: returns the argument of every rank, in the order of the ranks.
            samples: how many this rank has evaluated.
            sync_dist_fn: as of `log`.
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
                    "%s: logged in %s, and not the same on all ranks: shown is the %s over ranks%s, which one device "
                    "need not give; log it in %s, or log a torchmetrics metric",
                    *(one.name, one.fx, one.reduction, ", weighted by samples" * (one.reduction == "mean")),
                    "test_step" if "test" in one.fx else "validation_step",
                )

    def _local_logs(self) -> dict[str, Logged]:
        logs = {}
        for key, item in self.valid_items():
            if key in self._logged and item.is_tensor:
                by_batch, sync_dist, dtype, options = self._logged[key]
                weight = float(item.cumulated_batch_size) if item.meta.is_mean_reduction else 1.0
                about = item.meta.reduce_fx.__name__, by_batch, sync_dist, dtype, options
                logs[key] = Logged(item.meta.fx, item.meta.name, float(item.value), weight, *about)
        return logs


def reduced(logged: Sequence[tuple[int, Logged]]) -> tuple[float, bool]:
    """Return what ranks have logged under one name as one device would show it, and whether that is certain.

    Args:
        logged: by rank, how many samples it has evaluated, and what it has logged.
    """
    one = logged[0][1]
    numbers = torch.tensor([each.value for _, each in logged], dtype=torch.float64)
    weights = torch.tensor([each.weight for _, each in logged], dtype=torch.float64)
    certain = True
    if not one.by_batch:  # one value of each rank; that of a rank without a sample says nothing
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
