"""The message about a gradient that is not finite names the sample that is the cause, or a smaller learning rate."""

import re
from cmath import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from kernels import Kernels
from rank_fits import layout_of, trainer_and_data
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.data import Spec, Splits
from lockstep.data.augment import Augment
from lockstep.errors import NonFinite
from lockstep.step.finite import FiniteGradientCheck, finite_if_all_are
from lockstep.step.hook import StepHook
from lockstep.step.passes import StepPasses

BROKEN = 7  # id of a sample


class Net(pl.LightningModule):
    def __init__(self, lr: float = 0.1, wide: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, wide), nn.BatchNorm1d(wide), nn.Linear(wide, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def message(folder: Path, module: pl.LightningModule, x: Tensor, y: Tensor, later: bool = False) -> str:
    splits = Splits(TensorDataset(x, y), None, None, Spec(1, 4, ("a", "b", "c")), "none", Augment())
    options = {"hooks": [FiniteGradientCheck("stop", later)], "max_epochs": 20, "default_root_dir": folder}
    trainer, data = trainer_and_data(0, layout_of(1, batch_size=16, pieces=2), splits, **options)
    with pytest.raises(NonFinite) as caught:
        trainer.fit(module, datamodule=data)
    return str(caught.value)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(48, 1, 4, 4, generator=generator), torch.randint(0, 3, (48,), generator=generator)


def all_finite(gradients: list[Tensor], exactly: bool = False) -> bool:
    return isfinite(finite_if_all_are(gradients, exactly).item())


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_element_that_is_not_finite_is_detected(exactly: bool, value: float, dtype: torch.dtype) -> None:
    for size in (1, 7, 33, 70_001):
        for at in {0, size // 2, size - 1}:
            gradients = [torch.ones(3, dtype=dtype), torch.randn(size).to(dtype), torch.empty(0, dtype=dtype)]
            assert all_finite(gradients, exactly)
            gradients[1][at] = value
            assert not all_finite(gradients, exactly)


def test_a_sum_that_overflows_is_finite() -> None:
    assert all_finite([torch.full((4,), 3e38)], exactly=True)


@pytest.mark.parametrize("later", [False, True])
def test_finite_gradients_whose_sum_overflows_stop_nothing(later: bool) -> None:
    module = nn.Linear(4, 1, bias=False)
    strategy = SimpleNamespace(weights="whole", local_part=lambda tensor: tensor)
    trainer = SimpleNamespace(optimizers=[torch.optim.SGD(module.parameters())])
    step: Any = SimpleNamespace(
        module=module, strategy=strategy, trainer=trainer, number=0, losses=[], batch=SimpleNamespace()
    )
    check = FiniteGradientCheck("stop", later)
    module.weight.grad = torch.full((1, 4), 3e38)
    check.before_optimizer_step(step)
    check.flush()
    assert not hasattr(step.batch, "skipped")


def test_sparse_and_mixed_gradients_are_checked() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), [1.0, float("inf")], (3,), check_invariants=True)
    for exactly in (False, True):
        assert not all_finite([torch.ones(2), sparse], exactly)
        assert all_finite([torch.ones(2), torch.ones(2, dtype=torch.float64), torch.empty(0)], exactly)


@pytest.mark.parametrize("exactly", [False, True])
def test_complex_gradients_are_checked(exactly: bool) -> None:
    assert all_finite([torch.full((2,), 1 + 2j), torch.full((3,), -2j)], exactly)
    assert not all_finite([torch.full((2,), 1 + 2j), torch.full((3,), complex(0, float("inf")))], exactly)


def test_on_a_gpu_the_number_of_kernels_does_not_grow_with_the_parameters() -> None:
    def count(parameters: int) -> int:
        gradients = [torch.ones(5) for _ in range(parameters)]
        with Kernels() as kernels:
            finite_if_all_are(gradients, exactly=True)
        return kernels.kernels

    assert count(62) == count(2) <= 3


@pytest.mark.parametrize("later", [False, True])
def test_a_sample_with_values_that_are_not_finite_is_named_alone(tmp_path: Path, later: bool) -> None:
    """BatchNorm makes the loss of the whole piece not finite."""
    x, y = samples()
    x[BROKEN, 0, 3, 3] = float("nan")
    output = (
        f"since sample {BROKEN} of the training set has values that are not finite: correct the data; nonfinite=skip"
    )
    assert output in message(tmp_path, Net(), x, y, later)


def test_a_target_that_is_not_finite_is_named(tmp_path: Path) -> None:
    class Regression(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.mse_loss(self.net(batch[0])[:, 0], batch[1])

    x, y = samples()
    targets = y.float()
    targets[[BROKEN, BROKEN + 1]] = float("inf")
    output = message(tmp_path, Regression(), x, targets)
    assert re.search(r"since sample[s,0-9 ]+ of the training set ha\w+ values that are not finite", output)
    assert {*re.findall(r"\d+", output.partition("sample")[2].partition(" of the")[0])} <= {"7", "8"}


class Logarithm(Net):
    """The loss of one sample, whose values are finite, is not finite; `inner` makes BatchNorm spread it."""

    inner = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        size = (x - x.min() + 1).log() if self.inner else x
        size = torch.where((x > 50).flatten(1).any(1)[:, None, None, None], (x - 99).log(), size)
        logits = self.net(size if self.inner else x)
        return F.cross_entropy(logits, y) + (size.flatten(1).sum(1) * logits[:, 0]).mean()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_sample_whose_loss_is_not_finite_is_named_alone(tmp_path: Path, inner: bool, later: bool) -> None:
    """But none is searched for one step later: the weights are no longer those of the step."""
    x, y = samples()
    x[BROKEN] = 60.0  # its logarithm is that of a negative number
    module = Logarithm()
    module.inner = inner
    output = message(tmp_path, module, x, y, later)
    whose = "the step's samples" if later else f"sample {BROKEN} of the training set"
    assert f"nor is the loss of {whose}: nonfinite=skip" in output


@pytest.mark.parametrize("later", [False, True])
def test_no_innocent_sample_is_named(tmp_path: Path, later: bool) -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.trainer.global_step == 2 else loss

    output = message(tmp_path, Broken(), *samples(), later)
    assert output.endswith("nor is the loss of the step's samples: nonfinite=skip skips such steps")


class Explodes(Net):
    """Its loss grows step by step, without bound."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0])[:, 0], batch[1].float())


@pytest.mark.parametrize("lr", [10.0, 1e10, 1e30])
@pytest.mark.parametrize("later", [False, True])
def test_a_loss_that_explodes_needs_a_smaller_learning_rate(tmp_path: Path, lr: float, later: bool) -> None:
    output = message(tmp_path, Explodes(lr), *samples(), later)
    if lr < 1e30:
        assert "after the loss has grown from" in output
        assert output.endswith(": use a smaller learning rate")
    elif not later:  # in one step, so only the weights show it
        assert output.endswith("the step's samples: use a smaller learning rate")
    assert "samples " not in output.replace("samples: ", "")


def test_a_classifier_at_a_learning_rate_of_1e10(tmp_path: Path) -> None:
    """The issue's case: the loss need not become inf, but the gradient does."""

    class Deep(Net):
        def __init__(self) -> None:
            super().__init__(lr=1e10)
            self.net = nn.Sequential(nn.Flatten(), *[nn.Linear(16, 16) for _ in range(6)], nn.Linear(16, 3))

    assert message(tmp_path, Deep(), *samples()).endswith(": use a smaller learning rate")


def test_no_checkpoint_is_written_before_the_last_steps_check_is_read() -> None:
    class Pending(StepHook):
        def flush(self) -> None:
            raise NonFinite("step 3")

    gradients, buffers = (SimpleNamespace(state_dict=dict, flush=lambda: None) for _ in range(2))
    passes: Any = StepPasses(None, gradients, [], 0, Mock(), Mock())  # type: ignore[arg-type]
    vars(passes)["buffers"] = buffers
    assert passes.state_dict() == {}
    passes.hooks = [Pending()]
    with pytest.raises(NonFinite, match="step 3"):
        passes.state_dict()
