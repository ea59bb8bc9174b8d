"""Devices of a process and their random generators, as a GPU's would be."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lockstep.lightning.one_process import devices_of
from lockstep.lightning.strategy import StepStrategy
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.strategy import generators


def test_a_process_of_several_gpus_has_each_of_them() -> None:
    layout = SimpleNamespace(accelerator="gpu", devices=2)
    assert devices_of(layout) == [torch.device("cuda", 0), torch.device("cuda", 1)]  # type: ignore[arg-type]


def test_a_piece_on_a_gpu_draws_from_the_host_and_from_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpus = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", of_gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert generators(torch.device("cuda", 0)) == [torch.default_generator, of_gpus[0]]
    assert generators(torch.device("cuda")) == [torch.default_generator, of_gpus[1]]
    assert generators(torch.device("cpu")) == [torch.default_generator]


def test_all_tensors_of_a_step_move() -> None:
    ids = np.arange(2)
    batch = {"x": torch.zeros(2, 3), "names": ["a", "b"]}
    parts = [MicroBatch(ids, 0, 4, ids, batch, torch.zeros(2, 5)), MicroBatch(ids, 0, 5, ids, [torch.ones(2)])]
    moved = StepBatch(parts, 8, 4, 1, 3, True).to(torch.device("meta"))
    first, second = moved.micro_batches
    assert first.augmentation_numbers is not None
    assert second.augmentation_numbers is None
    tensors = [first.batch["x"], first.augmentation_numbers, second.batch[0]]
    assert [(each.device.type, *each.shape) for each in tensors] == [("meta", 2, 3), ("meta", 2, 5), ("meta", 2)]
    assert first.batch["names"] == ["a", "b"]
    assert [each.piece for each in moved.micro_batches] == [4, 5]
    assert (moved.samples, moved.num_nonempty, moved.epoch, moved.step, moved.num_local_samples) == (8, 4, 1, 3, 4)
    assert parts[0].batch["x"].device.type == "cpu", "it is a copy"


@pytest.mark.parametrize(("rank", "keeps_copies", "writes"), [(0, None, 1), (1, None, 0), (1, False, 0), (1, True, 1)])
def test_rank_zero_writes_and_who_keeps_copies(rank: int, keeps_copies: bool | None, writes: int) -> None:
    """None: somebody else's writer of checkpoints."""
    writer = Mock(spec=["save_checkpoint"])
    if keeps_copies is not None:
        writer.keeps_copies = keeps_copies
    strategy: Any = SimpleNamespace(is_global_zero=rank == 0, checkpoint_io=writer)
    StepStrategy.save_checkpoint(strategy, {}, "last.ckpt")
    assert writer.save_checkpoint.call_count == writes
