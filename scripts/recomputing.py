"""Compute a part of a run again from what its ledger records.

The project's own training does it, in a folder that is deleted afterwards.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from common.training import open_without_test, train_from
from torch import Tensor

from lockstep.arithmetic.order import DataOrder
from lockstep.callbacks import Preemption
from lockstep.config.check import Config, check
from lockstep.config.instantiate import check_targets_named
from lockstep.config.portable import choose_kernels
from lockstep.config.value_checks import group_file
from lockstep.data import Splits
from lockstep.errors import UserError
from lockstep.extras.ledger.ledger_file import LEDGER_FILE, STATE, config_sha256, decisive_config, parse_line, read
from lockstep.launch.signals import Interrupted
from lockstep.step.lightning_quirks import validates

GROUPS = (
    "model",
    "data",
    "optimizer",
    "scheduler",
    "callbacks",
    "extras",
)  # config groups whose files name classes to build


class Until(Preemption):
    """Save after given steps, as a run does on a signal, and end the run after the last of them.

    Args:
        steps: optimizer steps since the run began, in ascending order.
    """

    def __init__(self, folder: Path, steps: Sequence[int]) -> None:
        super().__init__(folder)
        self._steps = steps

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step in self._steps:
            self._agreed = [signal.SIGTERM if trainer.global_step == self._steps[-1] else signal.SIGUSR1]
            if not validates(trainer):
                self._save_for_signal(trainer)


@dataclass(frozen=True)
class Part:
    """A part of a run in which everything that determines its bits stayed the same.

    Attributes:
        about: the ledger's record of the run.
        config: the config, on the layout that the user asks for now.
    """

    about: Mapping[str, Any]
    config: Config

    @cached_property
    def splits(self) -> Splits:
        """The data, opened on this machine, without a test split."""
        return open_without_test(self.config)

    @cached_property
    def order(self) -> DataOrder:
        return self.splits.order(self.config.layout, self.config.seed)


def part_of_run(about: Mapping[str, Any], raw: Mapping[str, Any], path: Path) -> Part:
    """Return a part of a run from its ledger, to be computed on the layout of `raw`.

    Args:
        about: the ledger's record of the run.
        raw: the config of this command.
        path: the ledger, for messages.

    Raises:
        UserError: the record names classes that the local conf/ does not name, is no config of a run, or gives the same
            bits only on another layout.
    """
    recorded = about.get("config")
    if not isinstance(recorded, dict) or not isinstance(recorded.get("strategy"), dict):
        raise UserError(f"{path}: its record of the run has no config: it was changed")
    for group in GROUPS:
        check_targets_named(path, group, recorded.get(group), raw.get(group))
    before = about.get("data_dir")
    exists = isinstance(before, str) and Path(before).is_dir()
    local = {key: raw[key] for key in ("outputs", "name", "devices", "num_workers")}
    speed = {**(recorded.get("speed") or {}), "resident": raw["speed"]["resident"]}
    strategy = {key: recorded["strategy"].get(key, value) for key, value in raw["strategy"].items() if key in SENDING}
    config = check(
        {
            **recorded,
            **local,
            "num_nodes": 1,
            "speed": speed,
            "strategy": {**raw["strategy"], **strategy},
            "extras": {**(recorded.get("extras") or {}), **group_file("extras", "ledger")},
            "data_dir": raw["data_dir"] or (before if exists else "data"),
            "callbacks": {**(recorded.get("callbacks") or {}), "saving": SAVING},
        }
    )
    choose_kernels(config.layout.exact)
    if not recorded.get("exact") and config_sha256(decisive_config(config)) != config_sha256(recorded):
        original = recorded["strategy"]
        layout = (
            f"strategy={original.get('name')} devices={original.get('devices')} num_nodes={original.get('num_nodes')}"[
                :80
            ]
        )
        raise UserError(f"{path}: without exact=true a run has the same bits only on its own layout: use {layout}")
    return Part(about, config)


SENDING = ("sync_batchnorm", "compression")  # options of a strategy that change the weights
SAVING = {"_target_": "lockstep.callbacks.Checkpoint", "monitor": None}


def recompute(part: Part, start: Path | None, steps: Sequence[int], folder: Path) -> dict[int, dict[str, Any]]:
    """Train from a checkpoint, or from the seed, up to the last of `steps`.

    The last checkpoint stays in `folder`.

    Returns:
        the lines of the new ledger, by step.

    Raises:
        Interrupted: the run was interrupted before its last step.
    """
    until = {"_target_": "recomputing.Until", "steps": list(steps)}
    config = replace(part.config, callbacks={**part.config.callbacks, "until": until})
    try:
        train_from(start, config, part.splits, folder)
    except Interrupted:
        if not (folder / LEDGER_FILE).exists() or steps[-1] not in _lines(folder):
            raise
    return _lines(folder)


def _lines(folder: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(parse_line, read(folder / LEDGER_FILE))}


def first_difference(computed: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the first tensor or number that differs between two checkpoints, and by how much.

    Return an empty string if all are the same.
    """
    for name in ("state_dict", *STATE):
        for difference in _differences(name, computed.get(name), expected.get(name)):
            return difference.removeprefix("state_dict.")
    return ""


def _differences(name: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"{name} is {one.dtype} {list(one.shape)}, and was {other.dtype} {list(other.shape)}"
        elif not one.equal(other):
            apart = (one.double() - other.double()).abs()
            count, most = f"{int((apart > 0).sum())} of {one.numel()}", f"{apart.max():.1e}"
            yield f"{name} in {count} elements, by {most} at most, of {other.double().abs().max():.1e}"
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*other, *one]):
            yield from _differences(f"{name}.{key}", one.get(key), other.get(key))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from _differences(f"{name}.{number}", *pair)
    elif isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
        yield f"{name} is {str(one)[:40]}, and was {str(other)[:40]}"
