"""Tests for your own modules and data sets: inherit a class, and pytest runs its tests (see docs/reference/testing.md).

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
from lockstep.data.datasets import UNLABELLED, Spec, Splits, fetch
from lockstep.launch.outcomes import WorkerFailed
from lockstep.run.api import compose, train

__all__ = ["DataTests", "ModuleTests"]
STEPS, KILLED = 6, 4  # optimizer steps of a run, and of a run before it is killed
DDP = ("strategy=ddp", "devices=2")  # each device accumulates two of the four pieces
SAMPLES = 16  # samples of each split that are compared
PATIENCE = 60.0  # seconds until a process counts as hanging


class KillOnce(Callback):
    """A callback that kills the run after step KILLED, but not again after a resume.

    Args:
        folder: the run's folder, in which a file marks the kill.
    """

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "killed"

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Send SIGKILL to this process after step KILLED."""
        if trainer.global_step == KILLED and not self.mark.exists():
            trainer.strategy.checkpoint_io.wait()  # until the last checkpoint is on the disk
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class ModuleTests:
    """Tests of a module: a few training steps must give the same weights on every layout. They may take a minute.

    Attributes:
        overrides: command-line overrides that choose the module: `model=mine data=mine`.
        tolerance: largest relative difference of the weights in float64 that counts as rounding.
    """

    overrides: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-8

    @pytest.fixture(scope="class")
    @classmethod
    def single(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        """Train on one device in float64; return the run's summary."""
        return cls.train(tmp_path_factory.mktemp("single"), "precision=64-true")

    @pytest.fixture(scope="class")
    @classmethod
    def exact(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        """Train on one device with exact=true; return the run's summary."""
        return cls.train(tmp_path_factory.mktemp("exact"), "exact=true")

    @classmethod
    def train(cls, outputs: Path, *more: str) -> dict[str, Any]:
        """Train the module for STEPS steps.

        Args:
            outputs: the folder for the run's folder.
            more: further overrides.

        Returns:
            The run's summary.
        """
        short = ("accelerator=cpu", "threads=1", "logger=none", f"max_steps={STEPS}", "batch_size=16", "pieces=4")
        return train(compose(*short, *shlex.split(cls.overrides), f"outputs={outputs}", *more))

    def test_it_trains(self, single: dict[str, Any]) -> None:
        """Check that the run completes with finite weights."""
        assert (single["status"], single["steps"]) == ("completed", STEPS)
        assert all(bool(value.isfinite().all()) for value in weights(single).values())

    def test_two_devices_and_accumulation_have_the_same_weights(self, single: dict[str, Any], tmp_path: Path) -> None:
        """Check that ddp on two devices, with accumulation, gives the weights of one device to rounding."""
        one, other = weights(single), weights(self.train(tmp_path, "precision=64-true", *DDP))
        # Some tensors are zero but for rounding, such as a bias that the next BatchNorm takes away again.
        least = 1e-3 * torch.stack([value.norm() for value in one.values()]).norm()
        apart = {name: float((one[name] - other[name]).norm() / torch.max(one[name].norm(), least)) for name in one}
        assert max(apart.values()) <= self.tolerance, apart

    def test_under_exact_they_have_the_same_bits(self, exact: dict[str, Any], tmp_path: Path) -> None:
        """Check that with exact=true these layouts give the same bits."""
        assert self.train(tmp_path, "exact=true", *DDP)["weights_sha256"] == exact["weights_sha256"]

    def test_a_killed_run_goes_on_to_the_same_bits(self, exact: dict[str, Any], tmp_path: Path) -> None:
        """Check that a run that is killed and resumed ends with the bits of an uninterrupted run."""
        kill = f"+callbacks.kill._target_={__name__}.KillOnce"
        with pytest.raises(WorkerFailed):
            self.train(tmp_path, "exact=true", "checkpoint_every=2", kill)
        (mark,) = tmp_path.rglob("killed")
        assert train(compose(f"resume={mark.parent}"))["weights_sha256"] == exact["weights_sha256"]


class DataTests:
    """Tests of a data set: some samples of each split must fit the `Spec` and be the same in every process.

    Attributes:
        overrides: command-line overrides that choose the data set: `data=mine`.
    """

    overrides: ClassVar[str] = ""

    @pytest.fixture(scope="class")
    @classmethod
    def splits(cls) -> Splits:
        """Open the data set."""
        config = compose(*shlex.split(cls.overrides))
        return open_data(config["data"], config["data_dir"], config["seed"])

    def test_samples_are_as_the_spec_has_them(self, splits: Splits) -> None:
        """Check shapes, dtypes and labels against the `Spec`."""
        shape = (splits.spec.channels, splits.spec.image_size, splits.spec.image_size)
        for name, (images, labels) in fetched(splits).items():
            assert images.shape[1:] == shape, name
            assert images.dtype == torch.uint8 or images.is_floating_point(), name
            check_targets(labels, splits.spec, name)

    def test_samples_are_the_same_when_they_are_fetched_again(self, splits: Splits) -> None:
        """Check that a second fetch gives the same bits."""
        assert as_bytes(splits) == as_bytes(splits)

    def test_other_processes_fetch_the_same(self, splits: Splits) -> None:
        """Check that two forked processes fetch the same bits at the same time: they must not share a file position."""
        context = get_context("fork")
        answers, expected = context.SimpleQueue(), as_bytes(splits)

        def compare() -> None:
            torch.set_num_threads(1)  # a forked child does not have the parent's threads
            answers.put(as_bytes(splits) == expected)

        children = [context.Process(target=compare, daemon=True) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join(PATIENCE)
        assert [child.exitcode for child in children] == [0, 0]
        assert [answers.get() for _ in children] == [True, True]


def check_targets(targets: Tensor, spec: Spec, name: str) -> None:
    """Check targets against the task of a `Spec`.

    Args:
        targets: the targets of some samples.
        spec: the description of the data set.
        name: name of the split, for messages.
    """
    if spec.task in ("multi_label", "regression"):
        assert targets.is_floating_point(), name
        assert targets.shape[1:] == (spec.num_classes,), name
        assert bool(targets.isfinite().all()), name
        assert spec.task == "regression" or bool(((targets == 0) | (targets == 1)).all()), name
        return
    masks = spec.task == "segmentation"
    assert targets.dtype == (torch.uint8 if masks else torch.int64), name
    assert targets.shape[1:] == ((spec.image_size, spec.image_size) if masks else ()), name
    classes = targets[targets != UNLABELLED] if masks else targets
    assert bool(((classes >= 0) & (classes < spec.num_classes)).all()), name


def weights(summary: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating-point tensors of a run's last checkpoint, by name."""
    state = torch.load(Path(summary["folder"], "checkpoints", "last.ckpt"), weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if value.is_floating_point()}


def fetched(splits: Splits) -> dict[str, Any]:
    """Return images and labels of the first samples of each split, fetched as in a run."""
    parts = {name: getattr(splits, name) for name in ("train", "val", "test")}
    return {
        name: fetch(part, np.arange(min(SAMPLES, len(part))), seed=0, epoch=int(name == "train"))
        for name, part in parts.items()
        if part is not None
    }


def as_bytes(splits: Splits) -> list[bytes]:
    """Return the result of `fetched` as bytes, for comparison."""
    return [part.numpy().tobytes() for batch in fetched(splits).values() for part in batch]
