"""Find out whether the largest or the smallest value of a metric is the best: `max` or `min`.

This is the only place that decides it, for checkpoints, early stopping, schedules, sweeps, searches and tables.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.errors import UserError

MODES = ("max", "min")


class UnknownMode(UserError):
    """Whether larger or smaller values of a metric are better does not follow from its name."""


Known = Callable[[str], str | None]  # the best value of a metric: `max`, `min`, or None if that is not known


# What these names mean needs no telling. Of any other metric, `mode`, the model's own `mode` or a torchmetrics object
# says it.
MODE_OF_NAME = {"loss": "min", "acc": "max", "accuracy": "max"}
STAGES = frozenset({"train", "training", "val", "valid", "validation", "test", "eval", "step", "epoch"})


def direction_of_name(metric: str) -> str | None:
    """Return `max` or `min` for an accuracy or a loss, such as `val/acc` or `train_loss_epoch`; None for others."""
    return MODE_OF_NAME.get(_without_stages(metric))


def directions_of_module(module: Any) -> Known:
    """Return a function that finds a metric's direction by the torchmetrics objects among a module's attributes.

    They say `higher_is_better`. An object belongs to a metric of its attribute's name, as `val_acc` to `val/acc`, or of
    its name in a MetricCollection.
    """
    from torchmetrics import Metric, MetricCollection
    from torchmetrics.wrappers import ClasswiseWrapper

    named: list[tuple[str, bool, str]] = []  # name, whether a class's label may follow it, direction
    for path, part in module.named_modules():
        if isinstance(part, MetricCollection):
            items: Iterable[tuple[str, Any]] = part.items(copy_state=False)  # with prefix and postfix
        elif isinstance(part, Metric):
            items = [(path.rpartition(".")[2], part)]
        else:
            continue
        for name, metric in items:
            if mode := direction_of_object(metric):
                by_class = isinstance(metric, ClasswiseWrapper)
                names = [name, *([type(metric.metric).__name__] if by_class else [])]
                named += [(_without_stages(each), by_class, mode) for each in names if _without_stages(each)]

    def known(metric: str) -> str | None:
        wanted = _without_stages(metric)
        modes = {mode for name, labels, mode in named if name == wanted or (labels and wanted.startswith(name))}
        return modes.pop() if len(modes) == 1 else None

    return known


def _without_stages(name: str) -> str:
    """Return a metric's name without what says where it was logged: `loss` of `val/loss_epoch/dataloader_idx_0`."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"/dataloader_idx_\d+$", "", name).lower())
    return "".join(word for word in words if word not in STAGES)


def direction_of_object(metric: Any) -> str | None:
    """Return the direction that a torchmetrics object, or the one that it wraps, states; None if it states none."""
    from torchmetrics import MaxMetric, Metric, MinMetric

    if isinstance(metric, MaxMetric | MinMetric):  # the best value so far
        return "max" if isinstance(metric, MaxMetric) else "min"
    if isinstance(better := getattr(metric, "higher_is_better", None), bool):
        return "max" if better else "min"
    inner = [part for part in metric.children() if isinstance(part, Metric)] if isinstance(metric, Metric) else []
    return direction_of_object(inner[0]) if inner else None


def best_value(mode: str) -> str:
    """Return what a mode says, for messages."""
    return "larger is better" if mode == "max" else "smaller is better"


def resolve_mode(key: str, metric: str, mode: Any, mode_key: str, known: Known = direction_of_name) -> str:
    """Return the mode of a metric.

    Args:
        key: the key that names the metric, for messages.
        mode: what the user gave; None: it follows from the metric.
        mode_key: the key of the mode.
        known: finds the direction of a metric.

    Raises:
        UserError: The mode contradicts the metric; or it is not given, and does not follow from the metric.
    """
    if mode not in (None, *MODES):
        raise UserError(f"{mode_key}={mode}: must be max or min, or null, with which it follows from {key}={metric}")
    right = known(metric)
    if mode is None and right is None:
        raise UnknownMode(
            f"{key}={metric}: whether larger or smaller is better does not follow from this name: "
            f"give {mode_key}=max or {mode_key}=min"
        )
    if None not in (mode, right) and mode != right:
        raise contradiction(f"{mode_key}={mode}", metric, str(right), f"give {mode_key}={right}")
    return str(mode or right)


def contradiction(setting: str, metric: str, right: str, remedy: str) -> UserError:
    """Return the error about a mode that contradicts its metric. `remedy` says what would be right."""
    return UserError(f"{setting}: {'larger' if right == 'max' else 'smaller'} values of {metric} are better: {remedy}")


def known_of_model(model: Mapping[str, Any], otherwise: Known = direction_of_name) -> Known:
    """Return a function that finds a metric's direction: of the model's own `monitor` by its `mode`.

    Args:
        model: the `model` group.
        otherwise: finds the direction of other metrics.

    Raises:
        UserError: The model's `mode` contradicts its `monitor`.
    """
    monitor, mode = model.get("monitor"), model.get("mode")
    if not isinstance(monitor, str) or mode not in MODES:  # they may be arguments of the module, with other meanings
        return otherwise
    resolve_mode("model.monitor", monitor, mode, "model.mode", otherwise)
    return lambda metric: mode if metric == monitor else otherwise(metric)


def with_mode(key: str, options: Mapping[str, Any], known: Known, required: bool) -> dict[str, Any]:
    """Return the options of a group that has a `monitor`, with the `mode` that follows from it.

    Args:
        key: the group, such as `callbacks.checkpoint`.
        known: finds the direction of a metric.
        required: whether to refuse a metric of unknown direction without a `mode`.

    Raises:
        UserError: see `resolve_mode`.
    """
    monitor, mode = options.get("monitor"), options.get("mode")
    if not isinstance(monitor, str) or mode not in (None, *MODES):  # another `mode`: the group's class checks it
        return dict(options)
    if mode is None and not required and known(monitor) is None:
        return dict(options)
    mode_key = f"{'' if 'mode' in options else '+'}{key}.mode"
    return {**options, "mode": resolve_mode(f"{key}.monitor", monitor, mode, mode_key, known)}
