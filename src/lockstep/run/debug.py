"""`debug`: what a run does so that somebody can look at it. What of it goes to Lightning's Trainer must leave the step,
the layout and the run's length to the keys that they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import flag, optional_node, show, unknown

FREE = (
    "benchmark",
    "detect_anomaly",
    "gradient_clip_algorithm",
    "inference_mode",
    "limit_test_batches",
    "limit_val_batches",
    "max_time",
    "min_epochs",
    "min_steps",
    "profiler",
)
OWN = {  # the Trainer's names for what is set otherwise; others have the same name here and there
    "check_val_every_n_epoch": "val_every",
    "default_root_dir": "outputs",
    "deterministic": "exact",
    "enable_checkpointing": "callbacks.checkpoint",
    "enable_progress_bar": "callbacks.console",
    "fast_dev_run": "debug=batch",
    "limit_train_batches": "max_steps or val_every",  # an epoch is the whole training set: position follows from steps
    "log_every_n_steps": "log_every",
    "overfit_batches": "debug=overfit",
    "sync_batchnorm": "strategy.sync_batchnorm",
    "val_check_interval": "val_every",
}


def check(key: str, value: Any) -> dict[str, Any]:
    """The group `debug`, checked; `trainer` has the Trainer's own names."""
    found = optional_node(key, value)
    known = ("one_batch", "trainer")
    for name in found:
        if name not in known:
            raise Refusal(f"{key}.{name}: there is no such key; {unknown(str(name), known)}")
    trainer = found.get("trainer") or {}
    if not isinstance(trainer, Mapping):
        raise Refusal(f"{key}.trainer={show(trainer)}: must hold keys of Lightning's Trainer: {', '.join(FREE)}")
    return {"one_batch": flag(f"{key}.one_batch", found.get("one_batch", False)), "trainer": dict(trainer)}


def must_be_free(values: Mapping[str, Any]) -> None:
    """Checks what `debug.trainer` sets beside the other keys; `values` are the config's, checked one by one.

    Raises:
        Refusal: another key sets it, or nothing does.
    """
    for name in values["debug"]["trainer"]:
        if name in FREE:
            continue
        own = name if name in values else OWN.get(name)
        right = f"give {own} instead" if own else f"there is no such key; {unknown(str(name), FREE)}"
        raise Refusal(f"debug.trainer.{name}: {right}")
    if values["exact"] and values["debug"]["trainer"].get("benchmark"):
        raise Refusal("debug.trainer.benchmark=true chooses kernels by their speed, so not with exact=true")
