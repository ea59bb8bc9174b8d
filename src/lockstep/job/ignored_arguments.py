"""Arguments of a user's constructor that look like a setting of the run: a line, or a refusal, names what counts."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lockstep.config.check import Config
from lockstep.config.instantiate import defaults, locate
from lockstep.config.value_checks import show
from lockstep.errors import UserError
from lockstep.job.optimizers import without_defaulted

IN_LOADERS = ("batch_size", "num_workers")  # what a LightningDataModule gives its own loaders, which are not used
# Options of a torch DataLoader that have no key of the run: order, memory and processes follow from the layout.
OF_LOADERS = ("shuffle", "drop_last", "pin_memory", "persistent_workers", "prefetch_factor")


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings of a run which constructors often have too, by key."""
    layout = config.layout
    return {
        "batch_size": layout.batch_size,
        "num_workers": config.num_workers,
        "devices": layout.devices,
        "num_nodes": layout.num_nodes,
        "max_epochs": config.epoch_limit,
        "max_steps": config.max_steps,
        "precision": config.precision,
    }


def differing_settings(options: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that differ from the run's setting of the same name."""
    return [name for name, value in options.items() if name in settings and value not in (None, settings[name])]


def refuse_loader_keys(config: Config) -> None:
    """Refuse `data.batch_size=16` on the command line if a LightningDataModule takes it and the run has another one."""
    if not _is_data_module(config):
        return
    for name in differing_settings(config.data, {key: settings_of(config)[key] for key in IN_LOADERS}):
        if f"data.{name}" in config.overridden:
            value = show(config.data[name])
            raise UserError(
                f"data.{name}={value} has no effect, since the run's own loaders draw the samples: give {name}={value}"
            )


def argument_notes(config: Config) -> list[str]:
    """Return lines about the options of the model and the data that look like a setting of the run and are none."""
    settings, notes = settings_of(config), []
    data = config.data if _is_data_module(config) else {}
    ignored = differing_settings(data, {key: settings[key] for key in IN_LOADERS}) + [
        name for name in OF_LOADERS if name in data
    ]
    if ignored:
        shown = ", ".join(f"data.{name}={show(data[name])}" for name in ignored)
        notes.append(f"{shown}: of loaders that the run does not use: batch_size= and num_workers= count")
    for group, options in (("data", {k: v for k, v in data.items() if k not in IN_LOADERS}), ("model", config.model)):
        for name in differing_settings(options, settings):
            value, run_value = show(options[name]), show(settings[name])
            notes.append(f"{group}.{name}={value} is an argument of its class only: the run has {name}={run_value}")
    target = locate("model._target_", config.model["_target_"])
    if "lr" not in {*without_defaulted({"lr": config.lr}, target, config), *config.model}:
        lr = f"lr={show(defaults(target)['lr'])}"
        notes.append(f"{lr} is the default of {config.model['_target_']}: lr= changes it")
    return notes


def _is_data_module(config: Config) -> bool:
    target = locate("data._target_", str(config.data.get("_target_")))
    return isinstance(target, type) and issubclass(target, pl.LightningDataModule)
