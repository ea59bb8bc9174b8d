"""What a checkpoint has of the hyperparameters of a module and its data module: plain data, from which they are made.

Lightning's `load_from_checkpoint` makes a module from them. What would make another module is left out: the argument
must then be given, and a line says so.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

import lightning.pytorch as pl
import numpy as np

MODULE, DATA = pl.LightningModule, pl.LightningDataModule
KEYS = (MODULE.CHECKPOINT_HYPER_PARAMS_KEY, DATA.CHECKPOINT_HYPER_PARAMS_KEY)
# The class of a config. Lightning makes one with attributes if this is a string, and a class is no plain data.
TYPES = (MODULE.CHECKPOINT_HYPER_PARAMS_TYPE, DATA.CHECKPOINT_HYPER_PARAMS_TYPE)


class NotPlain(Exception):
    """A value is no plain data, and none is equal to it."""


def saved_hyperparameters(values: Mapping[str, Any], is_plain: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the hyperparameters that a checkpoint has, as plain data.

    Args:
        values: those of a module or of a data module.
        is_plain: whether a value of another kind than those here can be saved.
    """
    saved = {}
    for name in values:
        try:
            saved[name] = _plain(_item(values, name), is_plain)
        except (NotPlain, RecursionError):
            continue
    return saved


def left_out(values: Mapping[str, Any], is_plain: Callable[[Any], bool]) -> list[str]:
    """Return the names of the hyperparameters that a checkpoint leaves out."""
    saved = saved_hyperparameters(values, is_plain)
    return [name for name in values if name not in saved]


def with_plain_hyperparameters(checkpoint: dict[str, Any], is_plain: Callable[[Any], bool]) -> dict[str, Any]:
    """Return a checkpoint whose hyperparameters are plain data."""
    changed: dict[str, Any] = {
        key: saved_hyperparameters(checkpoint[key], is_plain)
        for key in KEYS
        if isinstance(checkpoint.get(key), Mapping) and checkpoint[key]
    }
    changed |= {key: checkpoint[key].__name__ for key in TYPES if isinstance(checkpoint.get(key), type)}
    return {**checkpoint, **changed} if changed else checkpoint


def _item(values: Mapping[str, Any], name: str) -> Any:
    try:
        return values[name]
    except Exception as error:  # a value of a config that refers to another one may not be there
        raise NotPlain from error


def _plain(value: Any, is_plain: Callable[[Any], bool]) -> Any:
    """Return plain data that a module can be made from as from a value.

    Raises:
        NotPlain: there is none, or a part of a container has none.
    """

    def all_of(parts: Iterable[Any]) -> list[Any]:
        return [_plain(part, is_plain) for part in parts]

    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item(), is_plain)
    if isinstance(value, PurePath):
        return str(value)
    if (omegaconf := sys.modules.get("omegaconf")) and isinstance(value, omegaconf.Container):
        try:
            return _plain(omegaconf.OmegaConf.to_container(value, resolve=True), is_plain)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise NotPlain from error
    if isinstance(value, dict):
        return dict(zip(all_of(value), all_of(value.values()), strict=True))
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(all_of(value))
    if not is_plain(value):
        raise NotPlain
    return value
