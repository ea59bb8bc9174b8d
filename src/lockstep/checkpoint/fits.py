"""Whether a run can continue from a checkpoint: it counts its steps alike, and its module has the same weights."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lockstep.checkpoint.io import CheckpointError
from lockstep.checkpoint.record import ResumableCheckpoint
from lockstep.config import rules
from lockstep.config.value_checks import checker
from lockstep.data.datasets import changed
from lockstep.errors import UserError
from lockstep.lightning.hooks import overrides_method

COUNTED_BY = ("batch_size", "samples", "drop_last", "weighted", "content")  # what the steps of a run are counted by
DATA = ("fingerprint", "content")  # what says which data they are; other sizes are named first
check_resumable = checker(ResumableCheckpoint)


def check_record(path: str, content: Mapping[str, Any], anew: str, check: Callable[..., Any] = check_resumable) -> None:
    """Check that a run has saved a checkpoint, and that its record has what a resumed run reads.

    Args:
        path: the checkpoint's file.
        content: what it has.
        anew: how to begin a new run, for messages.
        check: checks the structure of the record.
    """
    if not {"lockstep", "continuation"} <= content.keys():
        raise CheckpointError(f"{path}: no lockstep.Trainer has saved it, so none can continue from it: {anew}")
    try:
        check("checkpoint", {name: content.get(name) for name in ("global_step", "lockstep", "continuation")})
        wrong = "" if _has_plain_values(content["lockstep"]) else "lockstep has more than numbers and texts by name"
    except (UserError, RecursionError) as error:
        wrong = str(error).partition(": ")[0][:200]
    if wrong:
        raise CheckpointError(f"{path}: not as a run of this version saves it ({wrong}): {anew}")


def _has_plain_values(record: Any) -> bool:
    """Check that a record can be compared: it has numbers and texts, in lists and in mappings by name."""
    if isinstance(record, Mapping):
        return all(isinstance(name, str) and _has_plain_values(value) for name, value in record.items())
    if isinstance(record, list | tuple):
        return all(map(_has_plain_values, record))
    return isinstance(record, str | int | float | None)


def check_fits(
    path: str,
    content: Mapping[str, Any],
    now: Mapping[str, Any],
    weights: Mapping[str, Any] | None,
    limits: Mapping[str, int],
    must_stay: Mapping[str, str],
    anew: str,
) -> list[str]:
    """Check that a run can continue from a checkpoint, whose record is checked already.

    Args:
        path: the checkpoint's file.
        content: what it has.
        now: the entry `trainer` of this run's record.
        weights: see `compared_weights`.
        limits: see `rules.check_length`.
        must_stay: the names of what may not have changed, each with the begin of a message that says why.
        anew: how to begin a new run, for messages.

    Returns:
        What has changed, as `name: old -> new`.

    Raises:
        UserError: it can't.
    """
    saved = dict(content["lockstep"]["trainer"])
    samples = {saved.get("samples"), now["samples"]}
    if None in samples and content["global_step"] * now["batch_size"] <= max(each or 0 for each in samples):
        saved["samples"] = now["samples"]  # a stream, whose end one of the runs did not reach
    names = changed({name: saved.get(name) for name in now}, now)
    for name in sorted(names, key=lambda name: name in DATA):
        if name in must_stay:
            raise UserError(f"{must_stay[name]}{_difference(path, name, saved.get(name), now[name])}; {anew}")
    if weights is not None:
        _check_same_shapes(path, content["state_dict"], weights, anew)
    rules.check_length(path, content["global_step"], limits)
    return [f"{name}: {saved.get(name)} -> {now[name]}" for name in names]


def _difference(path: str, name: str, saved: Any, now: Any) -> str:
    if name in DATA:
        return f"{path} was trained on other data of the same size: give the same"
    if name == "batch_size":
        return f"batch_size={now}, but {path} counts its steps in {saved} samples: give batch_size={saved}"
    if name == "samples":
        return f"{path} counts its steps in {saved} training samples, and there are {now}: give the same data"
    return f"{name}={now}, but {path} was saved with {name}={saved}: give the same"


def compared_weights(module: pl.LightningModule) -> Mapping[str, Any] | None:
    """Return the weights that those of a checkpoint must be like; None if a module loads others, too."""
    loads_others = not module.strict_loading or overrides_method(module, "on_load_checkpoint", pl.LightningModule)
    return None if loads_others else module.state_dict()


def _check_same_shapes(path: str, saved: Mapping[str, Any], weights: Mapping[str, Any], anew: str) -> None:
    """Check that the weights of a checkpoint have the names and the shapes of the module's."""
    saved_shapes, shapes = ({name: _shape(each) for name, each in side.items()} for side in (saved, weights))
    for name in sorted(saved_shapes.keys() | shapes.keys()):
        saved_shape, shape = saved_shapes.get(name, "missing"), shapes.get(name, "missing")
        if saved_shape != shape:
            raise UserError(
                f"{path} has the weights of another network ({name} is {saved_shape} there and {shape} in this model): "
                f"give the same model; {anew}"
            )


def _shape(value: Any) -> Any:
    """Return the shape of a tensor; a module's own entry in a state_dict may be none."""
    return list(value.shape) if isinstance(value, Tensor) else "no tensor"
