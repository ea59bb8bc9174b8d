"""`extras=[ledger]`: write a line of hashes to `ledger.jsonl` in the run's folder for each checkpoint.

The hashes cover the inputs and results of the steps up to the checkpoint. With the folder, `lockstep verify` can
compute any part of the run again and compare.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.extras import CheckpointObserver, Extra, RunParts

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from lockstep.config.check import Config

LEDGER_FILE = "ledger.jsonl"  # in the run's folder


class Ledger(Extra):
    """Writes a line of hashes for each checkpoint."""

    changes_weights = False

    def __init__(self) -> None:
        self._lines: Any = None  # on rank zero only

    def conflicts(self, config: "Config") -> Iterable[tuple[str, str]]:
        if not any("Checkpoint" in str(options) for options in config.callbacks.values()):
            yield "no callbacks.checkpoint", "the ledger has a line for each checkpoint"
        for extra in config.extras.values():
            if getattr(extra, "separate_weights", False):
                yield (
                    extra.setting,
                    "a checkpoint has only one device's optimizer state, so no part can be repeated",
                )
        if config.strategy.checkpoint != "whole":
            yield f"strategy.checkpoint={config.strategy.checkpoint}", "no device has the whole checkpoint to hash"
        if config.strategy.compression == "powersgd":
            yield (
                "strategy.compression=powersgd",
                "no checkpoint has the part of the gradients that it has not sent yet",
            )

    def checkpoint_observers(self, parts: RunParts) -> Sequence[CheckpointObserver]:
        if parts.rank:
            return ()
        from lockstep_extras.ledger.ledger_file import LedgerFile

        self._lines = LedgerFile(parts.folder, parts.config, parts.splits, parts.resumed, parts.module.state_dict())
        return [self._lines]

    def callbacks(self, parts: RunParts) -> Sequence["Callback"]:
        from lockstep_extras.ledger.ledger_file import RepairLedger

        return [RepairLedger(self._lines)] if self._lines is not None else []
