"""Compute a part of a run again from what its ledger records, by the same training as any run (train.py)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lockstep.arithmetic.order import DataOrder
from lockstep.callbacks import Preemption
from lockstep.config.check import Config, check
from lockstep.config.instantiate import check_targets_named
from lockstep.config.pages import group_file
from lockstep.data import Splits
from lockstep.errors import UserError
from lockstep.launch.portable import choose_kernels
from lockstep.launch.signals import Interrupted
from lockstep.programs.common.training import open_without_test, train_from
from lockstep.text import is_url
from lockstep_extras.ledger.ledger_file import (
    LEDGER_FILE,
    NOT_DECISIVE,
    STATE,
    config_sha256,
    decisive_config,
    may_change,
    parse_line,
    read,
)

# Options of a strategy that affect the bits of the weights. They come from the ledger, the others from this command.
DECISIVE_STRATEGY_OPTIONS = ("sync_batchnorm", "compression")
# The ledger records only callbacks that change the weights. This one does not, so it is added here.
CHECKPOINT = {"_target_": "lockstep.callbacks.Checkpoint", "monitor": None}


class SaveAtSteps(Preemption):
    """Saves after given steps, as a run does on a signal, and ends the run after the last of them.

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
            self._save_due, self._end_due = True, trainer.global_step == self._steps[-1]


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
    """Return the part of a run that a ledger's record describes, on the layout of `raw`.

    Args:
        about: the ledger's record of the run.
        raw: the config of this command.
        path: the ledger, for messages.

    Raises:
        UserError: the record has no config, or one that is not valid; it names classes that the local conf/ does not
            name; or it gives the same bits only on another layout.
    """
    recorded = about.get("config")
    if not isinstance(recorded, dict) or not isinstance(recorded.get("strategy"), dict):
        raise UserError(f"{path}: its record of the run has no config: it was changed")
    # A ledger records no other keys, and no callbacks that leave the weights as they are. They could write anywhere.
    decisive_keys = {key: value for key, value in recorded.items() if key not in NOT_DECISIVE}
    for group, value in decisive_keys.items():
        if group != "strategy":  # it is this command's
            check_targets_named(path, group, value, raw.get(group))
    callbacks = {
        name: each for name, each in (recorded.get("callbacks") or {}).items() if each and may_change(name, each)
    }
    data_dir = about.get("data_dir")
    data_dir_exists = isinstance(data_dir, str) and (is_url(data_dir) or Path(data_dir).is_dir())
    local_keys = {key: raw[key] for key in ("outputs", "name", "devices", "num_workers")}
    speed = {**(recorded.get("speed") or {}), "resident": raw["speed"]["resident"]}
    recorded_strategy = recorded["strategy"]
    decisive = {
        key: recorded_strategy.get(key, value)
        for key, value in raw["strategy"].items()
        if key in DECISIVE_STRATEGY_OPTIONS
    }
    config = check(
        {
            **decisive_keys,
            **local_keys,
            "num_nodes": 1,
            "speed": speed,
            "strategy": {**raw["strategy"], **decisive},
            "extras": {**(recorded.get("extras") or {}), **group_file("extras", "ledger")},
            "data_dir": raw["data_dir"] or (data_dir if data_dir_exists else "data"),
            "callbacks": {**callbacks, "ledger_checkpoint": CHECKPOINT},
        }
    )
    choose_kernels(config.layout.exact)
    if not recorded.get("exact") and config_sha256(decisive_config(config)) != config_sha256(recorded):
        layout = " ".join(
            f"{word}={recorded_strategy.get(key)}"
            for word, key in (("strategy", "name"), ("devices", "devices"), ("num_nodes", "num_nodes"))
        )
        raise UserError(f"{path}: without exact=true a run has the same bits only on its own layout: use {layout[:80]}")
    return Part(about, config)


def recompute(part: Part, start: Path | None, steps: Sequence[int], folder: Path) -> dict[int, dict[str, Any]]:
    """Train from the checkpoint `start`, or from the seed if it is None, up to the last of `steps`.

    The last checkpoint stays in `folder`.

    Returns:
        the lines of the ledger that this training writes, by step.

    Raises:
        Interrupted: the run was interrupted before its last step.
    """
    save = {"_target_": "lockstep_extras.ledger.recomputing.SaveAtSteps", "steps": list(steps)}
    config = replace(part.config, callbacks={**part.config.callbacks, "save_at_steps": save})
    try:
        train_from(start, config, part.splits, folder)
    except Interrupted:  # SaveAtSteps raises it after the last step; before that, the user interrupted the run
        if not (folder / LEDGER_FILE).exists() or steps[-1] not in _lines_by_step(folder):
            raise
    return _lines_by_step(folder)


def _lines_by_step(folder: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(parse_line, read(folder / LEDGER_FILE))}


def first_difference(computed: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the name of the first tensor or number that differs between two checkpoints, and by how much.

    Return an empty string if all are the same.
    """
    for name in ("state_dict", *STATE):
        for difference in _differences(name, computed.get(name), expected.get(name)):
            return difference.removeprefix("state_dict.")
    return ""


def _differences(name: str, new: Any, old: Any) -> Iterator[str]:
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        if new.shape != old.shape or new.dtype != old.dtype:
            yield f"{name} is {new.dtype} {list(new.shape)}, and was {old.dtype} {list(old.shape)}"
        elif not new.equal(old):
            distances = (new.double() - old.double()).abs()
            count, largest_distance = f"{int((distances > 0).sum())} of {new.numel()}", f"{distances.max():.1e}"
            largest_element = f"{old.double().abs().max():.1e}"
            yield f"{name} in {count} elements, by at most {largest_distance} (largest element: {largest_element})"
    elif isinstance(new, Mapping) and isinstance(old, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(f"{name}.{key}", new.get(key), old.get(key))
    elif isinstance(new, list | tuple) and isinstance(old, list | tuple) and len(new) == len(old):
        for number, pair in enumerate(zip(new, old, strict=True)):
            yield from _differences(f"{name}.{number}", *pair)
    elif isinstance(new, Tensor) or isinstance(old, Tensor) or new != old:
        yield f"{name} is {str(new)[:40]}, and was {str(old)[:40]}"
