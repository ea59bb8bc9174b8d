"""What must fit a checkpoint that a run goes on from, and what a user should know of it."""

from collections.abc import Mapping
from typing import Any

from lockstep.config.check import Config
from lockstep.config.value_checks import show
from lockstep.data import Splits
from lockstep.errors import UserError
from lockstep.text import join_names

# Options of a data set that change what is done to its samples, and not which they are.
CHANGEABLE = {"name", "augment", "transforms", "mix", "mix_alpha", "sampling"}


def check_checkpoint_fits(
    path: str, checkpoint: Mapping[str, Any], weights: Mapping[str, Any], config: Config, steps: int
) -> None:
    """Compares a checkpoint with what is to go on from it, to make `steps` optimizer steps in all.

    Raises:
        UserError: it holds the weights of another network, the state of another optimizer, a place in an epoch of other
            steps, or more steps.
    """
    sizes = [{name: list(value.shape) for name, value in side.items()} for side in (checkpoint["state_dict"], weights)]
    for name in sorted(sizes[0].keys() | sizes[1].keys()):
        saved_size, model_size = (side.get(name, "missing") for side in sizes)
        if saved_size != model_size:
            odd = f"{name} is {saved_size} there, and {model_size} in this model"
            raise UserError(f"{path}: made by another network: {odd}; init_from= begins a new run with what fits")
    before = checkpoint.get("lockstep", {}).get("config", {})
    made, now = before.get("model", {}).get("_target_"), config.model.get("_target_")
    if made is not None and made != now:
        raise UserError(f"model._target_={now}: {path} was made by {made}")
    optimizer, chosen = (one.get("_target_") for one in (before.get("optimizer", {}), config.optimizer))
    scaled, scales = (list(one.get("lr_scale") or ()) for one in (before.get("optimizer", {}), config.optimizer))
    if optimizer is not None and scaled != scales:
        raise UserError(
            f"optimizer.lr_scale: {path} has its parameters grouped by {join_names(scaled) or 'no pattern'}, not by "
            f"{join_names(scales) or 'none'}; only the factors may change"
        )
    size = config.layout.batch_size
    batch_size = before.get("batch_size", size)
    if optimizer is not None and optimizer != chosen:
        raise UserError(f"optimizer._target_={chosen}: {path} holds the state of {optimizer}")
    if batch_size != size:
        raise UserError(f"batch_size={size}: {path} stands in an epoch of steps of {batch_size} samples")
    if checkpoint["global_step"] > steps:
        limit = f"max_steps={steps}" if steps == config.max_steps else f"max_epochs={config.max_epochs}"
        raise UserError(f"{limit}: {path} stands after step {checkpoint['global_step']}, beyond the {steps} asked for")


def check_same_data(path: str, recorded: Mapping[str, Any], config: Config, splits: Splits) -> None:
    """Compares the data set with what a checkpoint records: its position and its schedule are counted in steps of that
    training set. Where the data lie, and what is done to a sample (augmentation, transforms, mixing, sampling), may
    change.

    Raises:
        UserError: another opener, other classes, another number of training samples; or other options, where the
            content is another one too.
    """
    before = recorded.get("config", {}).get("data", {})
    if not before:  # saved on a signal, by a run without the checkpoint callback
        return
    other = "init_from= begins a new run with its weights"
    if before.get("_target_") != config.data.get("_target_"):
        names = [group.get("name") or group.get("_target_") for group in (config.data, before)]
        raise UserError(f"data={names[0]}: {path} was trained on data={names[1]}; {other}")
    samples, now = recorded.get("samples", len(splits.train)), len(splits.train)
    if samples != now:
        raise UserError(f"data: {path} counts its steps in {samples} training samples, and there are {now}; {other}")
    if list(recorded["spec"]["classes"]) != list(splits.spec.classes):
        raise UserError(f"data: {path} was trained on other classes; {other}")
    options = (set(before) | set(config.data)) - CHANGEABLE
    changed = sorted(name for name in options if before.get(name) != config.data.get(name))
    if changed and recorded["fingerprint"] != splits.fingerprint:
        name = changed[0]
        was = show(before.get(name))
        raise UserError(f"data.{name}={show(config.data.get(name))}: {path} was trained with {was}; {other}")


def resume_messages(config: Config, splits: Splits, resumed: Mapping[str, Any]) -> list[str]:
    """What a user should know about the run that goes on."""
    if not resumed:
        return []
    recorded = resumed.get("lockstep")
    messages = [f"resumes after step {resumed['global_step']}"]
    if recorded is None:  # saved on a signal, by a run without the checkpoint callback
        return messages
    before = {**recorded["config"], "precision": recorded["precision"]}
    changed = differences(before, {**config.record, "precision": config.precision, "resume": before.get("resume")})
    if changed:
        messages.append("changed since the checkpoint: " + ", ".join(changed))
    if recorded["fingerprint"] != splits.fingerprint:
        messages.append("the data set is not the one that the checkpoint was trained on")
    return messages


def differences(before: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> list[str]:
    """What changed between two plain configs, as `key: old -> new`; of a group that another one has replaced, its name
    and what both have."""
    changes = []
    replaced = before.get("name") != now.get("name")
    for key in sorted(set(before) & set(now) if above and replaced else set(before) | set(now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += differences(old, new, f"{above}{key}.")
        elif old != new:
            changes.append(f"{above}{key}: {old} -> {new}")
    return changes
