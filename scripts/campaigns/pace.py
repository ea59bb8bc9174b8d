"""A callback that slows training down: a run over several machines must outlast its faults."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback

SECONDS = 0.1  # that a step takes longer


class Pace(Callback):
    """Waits after each step."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(SECONDS)
