"""Whether the largest or the smallest value of a metric is the best: `max` or `min`.

A `mode` beside the metric says it, or the model's `mode` of its own `monitor`. No name is interpreted: only the metrics
that Lockstep's own models log have a mode here.
"""

from collections.abc import Mapping
from typing import Any

from lockstep.errors import UserError

MODES = ("max", "min")
MODE_OF = {
    f"{stage}/{name}": mode for stage in ("train", "val", "test") for name, mode in (("loss", "min"), ("acc", "max"))
}


class UnknownMode(UserError):
    """Nothing says whether larger or smaller values of a metric are better."""


def mode_of_object(metric: Any) -> str | None:
    """Return the mode that a torchmetrics object, or the one that it wraps, states; None if it states none."""
    from torchmetrics import MaxMetric, Metric, MinMetric

    if isinstance(metric, MaxMetric | MinMetric):  # the best value so far
        return "max" if isinstance(metric, MaxMetric) else "min"
    if isinstance(better := getattr(metric, "higher_is_better", None), bool):
        return "max" if better else "min"
    inner = [part for part in metric.children() if isinstance(part, Metric)] if isinstance(metric, Metric) else []
    return mode_of_object(inner[0]) if inner else None


def best_value(mode: str) -> str:
    """Return what a mode says, for messages."""
    return "larger is better" if mode == "max" else "smaller is better"


def contradiction(setting: str, metric: str, right: str, remedy: str) -> UserError:
    """Return the error about a mode that contradicts its metric. `remedy` says what would be right."""
    return UserError(f"{setting}: {'larger' if right == 'max' else 'smaller'} values of {metric} are better: {remedy}")


def resolve_mode(key: str, metric: str, mode: Any, mode_key: str, modes: Mapping[str, str] = MODE_OF) -> str:
    """Return the mode of a metric.

    Args:
        key: the key that names the metric, for messages.
        mode: what the user gave; None: that in `modes`.
        mode_key: the key of the mode.
        modes: the modes that are known, by metric; see `modes_with_model`.

    Raises:
        UserError: The mode contradicts the known one; or it is not given, and none is known.
    """
    right = modes.get(metric)
    if mode not in (None, *MODES):
        raise UserError(f"{mode_key}={mode}: must be max or min")
    if mode is None and right is None:
        raise UnknownMode(
            f"{key}={metric}: nothing says whether larger or smaller is better: give {mode_key}=max or {mode_key}=min"
        )
    if None not in (mode, right) and mode != right:
        raise contradiction(f"{mode_key}={mode}", metric, str(right), f"give {mode_key}={right}")
    return str(mode or right)


def modes_with_model(model: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the known modes by metric, with the model's own `mode` of its `monitor`.

    Args:
        model: the `model` group.

    Raises:
        UserError: The model's `mode` contradicts its `monitor`.
    """
    monitor, mode = model.get("monitor"), model.get("mode")
    if not isinstance(monitor, str) or mode not in MODES:  # they may be arguments of the module, with other meanings
        return MODE_OF
    return {**MODE_OF, monitor: resolve_mode("model.monitor", monitor, mode, "model.mode")}


def with_mode(key: str, options: Mapping[str, Any], modes: Mapping[str, str], required: bool) -> dict[str, Any]:
    """Return the options of a group that has a `monitor`, with the `mode` of the metric.

    Args:
        key: the group, such as `callbacks.checkpoint`.
        modes: see `resolve_mode`.
        required: whether the group's class takes a `mode`, so that a metric of which none is known is refused. If it
            may take none, only an option that is there is filled in.

    Raises:
        UserError: see `resolve_mode`.
    """
    monitor, mode = options.get("monitor"), options.get("mode")
    if not isinstance(monitor, str) or mode not in (None, *MODES):  # another `mode`: the group's class checks it
        return dict(options)
    if mode is None and not required and ("mode" not in options or monitor not in modes):
        return dict(options)
    mode_key = f"{'' if 'mode' in options else '+'}{key}.mode"
    return {**options, "mode": resolve_mode(f"{key}.monitor", monitor, mode, mode_key, modes)}
