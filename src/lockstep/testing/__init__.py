"""Tests to inherit: what a module or a data set of one's own must keep. pytest runs them: docs/reference/testing.md.

class TestMine(ModuleTests):
    overrides = "model=mine data=stripes"
"""

import os
import shlex
import signal
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lockstep.data.build import open_data
from lockstep.data.datasets import Splits, fetch
from lockstep.launch.outcomes import WorkerFailed
from lockstep.run.api import compose, train

__all__ = ["DataTests", "ModuleTests"]
STEPS, KILLED = 6, 4  # optimizer steps of a run, and of one that is killed
DDP = ("strategy=ddp", "devices=2")  # two pieces on each device, one after the other: an accumulation of 2
SAMPLES = 16  # of each split that are looked at
PATIENCE = 60.0  # seconds, after which a process counts as one that hangs


class KillOnce(Callback):
    """Kills the run after step KILLED, once: not when it is resumed."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "killed"

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == KILLED and not self.mark.exists():
            trainer.strategy.checkpoint_io.wait()  # the checkpoint of an earlier step is on the disk
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class ModuleTests:
    """Trains a module for a few steps, as its layout must not matter. It may take a minute.

    Attributes:
        overrides: of the command line: `model=mine data=mine`.
        tolerance: relative difference of the weights in float64 that counts as rounding.
    """

    overrides: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-8

    @pytest.fixture(scope="class")
    @classmethod
    def single(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        return cls.train(tmp_path_factory.mktemp("single"), "precision=64-true")

    @pytest.fixture(scope="class")
    @classmethod
    def exact(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        return cls.train(tmp_path_factory.mktemp("exact"), "exact=true")

    @classmethod
    def train(cls, outputs: Path, *more: str) -> dict[str, Any]:
        """Train the module; return the run's summary."""
        short = ("accelerator=cpu", "threads=1", "logger=none", f"max_steps={STEPS}", "batch_size=16", "pieces=4")
        return train(compose(*short, *shlex.split(cls.overrides), f"outputs={outputs}", *more))

    def test_it_trains(self, single: dict[str, Any]) -> None:
        assert (single["status"], single["steps"]) == ("completed", STEPS)
        assert all(bool(value.isfinite().all()) for value in weights(single).values())

    def test_two_devices_and_accumulation_have_the_same_weights(self, single: dict[str, Any], tmp_path: Path) -> None:
        one, other = weights(single), weights(self.train(tmp_path, "precision=64-true", *DDP))
        apart = {name: float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-12)) for name in one}
        assert max(apart.values()) <= self.tolerance, apart

    def test_under_exact_they_have_the_same_bits(self, exact: dict[str, Any], tmp_path: Path) -> None:
        assert self.train(tmp_path, "exact=true", *DDP)["weights_sha256"] == exact["weights_sha256"]

    def test_a_killed_run_goes_on_to_the_same_bits(self, exact: dict[str, Any], tmp_path: Path) -> None:
        kill = f"+callbacks.kill._target_={__name__}.KillOnce"
        with pytest.raises(WorkerFailed):
            self.train(tmp_path, "exact=true", "checkpoint_every=2", kill)
        (mark,) = tmp_path.rglob("killed")
        assert train(compose(f"resume={mark.parent}"))["weights_sha256"] == exact["weights_sha256"]


class DataTests:
    """Opens a data set and fetches some samples of each split.

    Attributes:
        overrides: of the command line: `data=mine`.
    """

    overrides: ClassVar[str] = ""

    @pytest.fixture(scope="class")
    @classmethod
    def splits(cls) -> Splits:
        config = compose(*shlex.split(cls.overrides))
        return open_data(config["data"], config["data_dir"], config["seed"])

    def test_samples_are_as_the_spec_has_them(self, splits: Splits) -> None:
        shape = (splits.spec.channels, splits.spec.image_size, splits.spec.image_size)
        for name, (images, labels) in fetched(splits).items():
            assert images.shape[1:] == shape, name
            assert images.dtype == torch.uint8 or images.is_floating_point(), name
            assert labels.dtype == torch.int64, name
            assert 0 <= int(labels.min()) <= int(labels.max()) < splits.spec.num_classes, name

    def test_samples_are_the_same_when_they_are_fetched_again(self, splits: Splits) -> None:
        assert as_bytes(splits) == as_bytes(splits)

    def test_other_processes_fetch_the_same(self, splits: Splits) -> None:
        """Forked ones, at the same time: they must not share a file's position."""
        context = get_context("fork")
        answers, expected = context.SimpleQueue(), as_bytes(splits)

        def compare() -> None:
            torch.set_num_threads(1)  # the threads of this process are not in its children
            answers.put(as_bytes(splits) == expected)

        children = [context.Process(target=compare, daemon=True) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join(PATIENCE)
        assert [child.exitcode for child in children] == [0, 0]
        assert [answers.get() for _ in children] == [True, True]


def weights(summary: Mapping[str, Any]) -> dict[str, Tensor]:
    """The floating-point tensors of a run's last checkpoint."""
    state = torch.load(Path(summary["folder"], "checkpoints", "last.ckpt"), weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if value.is_floating_point()}


def fetched(splits: Splits) -> dict[str, Any]:
    """The first samples of each split, as a run fetches them: images and labels."""
    parts = {name: getattr(splits, name) for name in ("train", "val", "test")}
    return {
        name: fetch(part, np.arange(min(SAMPLES, len(part))), seed=0, epoch=int(name == "train"))
        for name, part in parts.items()
        if part is not None
    }


def as_bytes(splits: Splits) -> list[bytes]:
    """What `fetched` returns, to be compared."""
    return [part.numpy().tobytes() for batch in fetched(splits).values() for part in batch]
