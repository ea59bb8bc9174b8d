"""The kernels and host reads of a whole training step do not grow. All of this is counted on the CPU.

A change that makes them fewer lowers the numbers here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import small_data
import torch
from kernels import HostReads, Kernels
from rank_fits import layout_of, trainer_and_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.arithmetic.exact_sum import ExactSum
from lockstep.data import Spec, Splits
from lockstep.data.augment import Augment
from lockstep.step.buffers import COMPARED_STEPS
from lockstep.step.finite import FiniteGradientCheck

COUNTED = COMPARED_STEPS + 2  # number of the step that is counted: the contents of buffers are compared no more


class Counts(NamedTuple):
    kernels: int
    reads: int
    lines: dict[str, int]  # that read
    seen: dict[str, int]  # operations


class CountStep(pl.Callback):
    """Count one step, from the begin of its batch to its end."""

    def __init__(self) -> None:
        self.kernels, self.reads = Kernels(), HostReads()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == COUNTED:
            self.reads.__enter__()
            self.kernels.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == COUNTED:
            self.kernels.__exit__(None, None, None)
            self.reads.__exit__(None, None, None)


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counts]:
    """Return a function that trains a module for some steps and counts the last one, with sums as on a GPU."""
    make = ExactSum.__init__

    def make_as_on_gpu(self: ExactSum, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.in_chunks = False

    monkeypatch.setattr(ExactSum, "__init__", make_as_on_gpu)

    def count(module: pl.LightningModule, exact: bool, pieces: int) -> Counts:
        generator = torch.Generator().manual_seed(0)
        size, samples = 12, 8 * (COUNTED + 2)
        x = torch.randint(0, 256, (samples, 1, size, size), generator=generator, dtype=torch.uint8)
        y = torch.randint(0, 3, (samples,), generator=generator)
        splits = Splits(TensorDataset(x, y), None, None, Spec(1, size, ("a", "b", "c")), "none", Augment(2, True))
        counted = CountStep()
        trainer, data = trainer_and_data(
            0,
            layout_of(1, exact, 8, pieces),
            splits,
            hooks=[FiniteGradientCheck("stop", one_step_later=True)],
            callbacks=[counted],
            default_root_dir=tmp_path,
        )
        trainer.fit(module, datamodule=data)
        reads = dict(counted.reads.seen)
        return Counts(counted.kernels.kernels, sum(reads.values()), reads, dict(counted.kernels.seen))

    return count


class WithBuffer(small_data.SmallCNN):
    """Has a buffer that follows the images, and another that never changes."""

    centre: Tensor
    fixed: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("fixed", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)
        if self.training:
            self.centre.lerp_(logits.detach().mean(0), 0.1)
        return logits * self.fixed


NETS: dict[str, Callable[[], Any]] = {
    "small_cnn": small_data.small_cnn,
    "small_resnet18": small_data.small_resnet18,
    "with_buffer": lambda: WithBuffer(**small_data.task()),
}
# net, exact, pieces; at most so many kernels and host reads. Of the reads of each piece under exact, only those of the
# last one leave the GPU without work (tests/arithmetic/test_exact_sum.py).
LIMITS = [
    ("small_cnn", False, 1, 76, 1),
    ("small_cnn", False, 4, 267, 1),
    ("small_cnn", True, 1, 94, 3),
    ("small_cnn", True, 4, 289, 6),
    ("small_resnet18", False, 1, 376, 1),
    ("small_resnet18", False, 4, 1154, 1),
    ("small_resnet18", True, 1, 410, 3),
    ("small_resnet18", True, 4, 1138, 11),
    ("with_buffer", False, 4, 362, 2),
    ("with_buffer", True, 4, 405, 12),
]


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize(("net", "exact", "pieces", "kernels", "reads"), LIMITS)
def test_a_step_takes_no_more_kernels_and_host_reads(
    net: str, exact: bool, pieces: int, kernels: int, reads: int, count: Callable[..., Counts]
) -> None:
    actual = count(NETS[net](), exact, pieces)
    assert actual.kernels <= kernels, actual.seen
    assert actual.reads <= reads, actual.lines


class Reads(small_data.SmallCNN):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["loss"].item()
        return output


def test_a_planted_read_is_detected(count: Callable[..., Counts]) -> None:
    assert count(Reads(**small_data.task()), False, 4).reads == count(small_data.small_cnn(), False, 4).reads + 4


def test_one_more_kernel_for_each_parameter_is_detected(count: Callable[..., Counts]) -> None:
    class Clamps(small_data.SmallCNN):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.clamp_(-9, 9)

    module: nn.Module = Clamps(**small_data.task())
    more = count(module, False, 1).kernels - count(small_data.small_cnn(), False, 1).kernels
    assert more == len(list(module.parameters()))
