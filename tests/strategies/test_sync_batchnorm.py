"""`strategy.sync_batchnorm=true`, as far as a machine without a GPU can show it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.arithmetic.layout import Layout
from lockstep.commands.api import compose
from lockstep.config.check import check
from lockstep.config.rules import check_sizes
from lockstep.errors import UserError
from lockstep.launch import machine
from lockstep.strategies import DDP


def test_batchnorm_is_synchronised() -> None:
    """torch has such layers for GPUs alone, and says so of the first that it meets."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for request in (False, True):
            strategy: Any = DDP(sync_batchnorm=request).build(Layout("ddp", "cpu", 2, 1, 2, 2)).strategy
            strategy.parallel_devices = [torch.device("cpu")]
            strategy.model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
            try:
                strategy.configure_ddp()
                report = ""
            except ValueError as error:
                report = str(error)
            assert ("SyncBatchNorm layers only work with GPU modules" in report) == request
    finally:
        dist.destroy_process_group()


def test_ranks_without_a_sample_do_not_synchronise_batchnorm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_count", lambda: 8)
    request = check(compose("strategy.sync_batchnorm=true", "devices=8", "pieces=16", "batch_size=32"))
    for tail in (0, 16, 31):
        check_sizes(request.strategy, request.layout, 96 + tail)
    with pytest.raises(UserError, match="sync_batchnorm=true: an epoch's last step has 11 samples for 16 pieces"):
        check_sizes(request.strategy, request.layout, 96 + 11)
    others = check(compose("devices=8", "pieces=16", "batch_size=32"))
    check_sizes(others.strategy, others.layout, 96 + 11)
