"""What a checkpoint may have: plain data and tensors; of hyperparameters the plain data from which a module is made.

Lightning's `load_from_checkpoint` makes a module from its hyperparameters. What would make another module is left out:
the argument must then be given, and a line says so.
"""

import io
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import IO, Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

MODULE, DATA = pl.LightningModule, pl.LightningDataModule
KEYS = (MODULE.CHECKPOINT_HYPER_PARAMS_KEY, DATA.CHECKPOINT_HYPER_PARAMS_KEY)
# The class of a config. Lightning makes one with attributes if this is a string, and a class is no plain data.
TYPES = (MODULE.CHECKPOINT_HYPER_PARAMS_TYPE, DATA.CHECKPOINT_HYPER_PARAMS_TYPE)


class NotPlain(Exception):
    """A value is no plain data, and none is equal to it."""


def code_in(file: str | Path | IO[bytes]) -> str:
    """Return the functions and classes in a checkpoint's pickle that plain data does not need. Nothing is executed."""
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    except Exception:
        return ""  # torch can't read the pickle: `torch.load` will raise an error


def is_plain(value: Any) -> bool:
    """Check whether a value holds only plain data and tensors, so that it can be saved."""
    if isinstance(value, nn.Module):  # never plain; this skips a slow pickle
        return False
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:  # pickling an arbitrary object can fail in any way
        return False
    buffer.seek(0)
    return not code_in(buffer)


def saved_hyperparameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a module or a data module that a checkpoint has, as plain data."""
    saved = {}
    for name in values:
        try:
            saved[name] = _plain(_item(values, name))
        except (NotPlain, RecursionError):
            continue
    return saved


def not_plain(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the hyperparameters that a checkpoint leaves out."""
    saved = saved_hyperparameters(values)
    return [name for name in values if name not in saved]


def with_plain_hyperparameters(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint whose hyperparameters are plain data."""
    changed: dict[str, Any] = {
        key: saved_hyperparameters(checkpoint[key])
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


def _plain(value: Any) -> Any:
    """Return plain data that a module can be made from as from a value.

    Raises:
        NotPlain: there is none, or a part of a container has none.
    """

    def all_of(parts: Iterable[Any]) -> list[Any]:
        return [_plain(part) for part in parts]

    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, PurePath):
        return str(value)
    if (omegaconf := sys.modules.get("omegaconf")) and isinstance(value, omegaconf.Container):
        try:
            return _plain(omegaconf.OmegaConf.to_container(value, resolve=True))
        except omegaconf.errors.OmegaConfBaseException as error:
            raise NotPlain from error
    if isinstance(value, dict):
        return dict(zip(all_of(value), all_of(value.values()), strict=True))
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(all_of(value))
    if not is_plain(value):
        raise NotPlain
    return value
