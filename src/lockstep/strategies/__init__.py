"""How a step reaches its devices: Lightning's strategies, and what they lack for steps in pieces."""

from typing import Any

import torch

from lockstep.arithmetic.layout import Layout


def make_strategy(layout: Layout, options: dict[str, Any]) -> Any:
    """The Lightning strategy of a layout; `options` is the checked `strategy` group of the config."""
    if layout.strategy == "ddp":
        from lockstep.strategies.ddp import DistributedDataParallel

        return DistributedDataParallel(options["compression"], options["sync_batchnorm"], options["average_every"])
    if layout.strategy == "pipeline":
        from lockstep.strategies.pipeline import Pipeline

        return Pipeline(options["split"] or ())
    kind = "cuda" if layout.accelerator == "gpu" else "cpu"
    devices = [torch.device(kind, index) if kind == "cuda" else torch.device(kind) for index in range(layout.devices)]
    if layout.strategy == "dp":
        from lockstep.strategies.dp import DataParallel

        return DataParallel(devices, exact=layout.exact and layout.pieces > 1)
    from lockstep.strategies.base import SingleDevice

    return SingleDevice(device=devices[0])
