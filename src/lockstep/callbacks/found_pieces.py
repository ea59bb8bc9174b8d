"""A run with `accumulate_grad_batches=auto` goes on with the number of pieces that it had found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl

from lockstep.arithmetic.layout import Layout
from lockstep.loading import DataModule
from lockstep.run.config import Config


class FoundPieces(pl.Callback):
    """Its checkpoints hold the number."""

    def __init__(self, data: DataModule) -> None:
        self.data = data

    def state_dict(self) -> dict[str, Any]:
        return {"pieces": self.data.layout.pieces}


def kept(config: Config, checkpoint: Mapping[str, Any]) -> Layout | None:
    """The layout with the number of pieces that the checkpoint's run had found; None if it had not, or they don't fit
    the layout that goes on."""
    pieces = checkpoint.get("callbacks", {}).get("FoundPieces", {}).get("pieces")
    layout = config.layout
    fits = config.auto_accumulate and pieces and pieces >= layout.num_devices
    return replace(layout, pieces=pieces) if fits and not layout.batch_size % pieces else None
