"""Callbacks and layers that a run can't have as they are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import composed
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config.check import check
from lockstep.data.splits import Spec
from lockstep.errors import UserError
from lockstep.job.build import initialise_lazy_layers, make_callbacks
from lockstep.trainer.parts import needs_deterministic_kernels


class CustomBar(pl.callbacks.ProgressBar):
    pass


class HasLr(pl.LightningModule):
    lr = 0.1


class Every(pl.Callback):
    """A user's class, with names that a run's own callbacks have, too."""

    def __init__(self, every: int = 100, folder: Any = None) -> None:
        self.every, self.folder = every, folder


def test_a_users_callback_keeps_its_own_defaults(tmp_path: Path) -> None:
    config = check(composed("checkpoint_every=7"))
    object.__setattr__(config, "callbacks", {"mine": {"_target_": f"{__name__}.Every"}})
    splits: Any = SimpleNamespace(train=range(640))
    mine: Any = make_callbacks(config, splits, tmp_path, pl.LightningModule())[0]
    assert (mine.every, mine.folder) == (100, tmp_path), "None is no default"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("lightning.pytorch.callbacks.TQDMProgressBar", "the console has its own progress bar .*: leave TQDM"),
        ("lightning.pytorch.callbacks.RichProgressBar", "the console has its own progress bar .*: leave Rich"),
        (f"{__name__}.CustomBar", "the console has its own progress bar .*: leave CustomBar out$"),
        (
            "lightning.pytorch.callbacks.BatchSizeFinder",
            "BatchSizeFinder would change batch_size, .*fit-memory",
        ),
        ("lightning.pytorch.callbacks.LearningRateFinder", "LearningRateFinder needs a module with an attribute lr"),
    ],
)
def test_callbacks_that_the_run_replaces_are_refused_with_what_to_use(
    target: str, message: str, tmp_path: Path
) -> None:
    config = check(composed())
    object.__setattr__(config, "callbacks", {"mine": {"_target_": target}})
    splits: Any = SimpleNamespace(train=range(640))
    with pytest.raises(UserError, match=rf"^callbacks\.mine: {message}"):
        make_callbacks(config, splits, tmp_path, pl.LightningModule())
    if "LearningRateFinder" in target:
        assert make_callbacks(config, splits, tmp_path, HasLr())


def test_deterministic_kernels_fill_no_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for exact, accelerator in ((True, "gpu"), (False, "gpu"), (True, "cpu")):
        flags: Any = torch.utils.deterministic
        monkeypatch.setattr(flags, "fill_uninitialized_memory", True)
        layout: Any = SimpleNamespace(exact=exact, accelerator=accelerator)
        assert needs_deterministic_kernels(layout) == (exact and accelerator == "gpu")
        assert flags.fill_uninitialized_memory != (exact and accelerator == "gpu")


class Lazy(pl.LightningModule):
    def __init__(self, net: nn.Module, unused: nn.Module | None = None) -> None:
        super().__init__()
        self.net, self.unused = net, unused

    def forward(self, x: Any) -> Any:
        return self.net(x)


def lazy_net() -> nn.Sequential:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5))


@pytest.mark.parametrize("images", [torch.rand(3, 1, 8, 8, dtype=torch.float64), torch.zeros(3, 1, 8, 8).byte(), None])
def test_lazy_layers_get_their_sizes_before_the_run(images: Any) -> None:
    """And weights that depend on the seed only; the statistics of BatchNorm and the random state stay as they were."""
    train = range(1) if images is None else TensorDataset(images, torch.zeros(3, dtype=torch.int64))
    splits: Any = SimpleNamespace(train=train, spec=Spec(1, 8, tuple("abcde"), (0.0,), (1.0,)))
    weights: list[torch.Tensor] = []
    for random_numbers in (0, 7):
        torch.manual_seed(random_numbers)
        state = torch.get_rng_state()
        net = lazy_net()
        module = Lazy(net)
        initialise_lazy_layers("model", module, splits, seed=3)
        assert torch.equal(torch.get_rng_state(), state)
        assert net[3].weight.shape == (5, 4 * 36)
        assert net.get_buffer("1.running_mean").eq(0).all()
        assert module.training
        weights.append(net.get_parameter("3.weight"))
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Lazy(nn.Flatten(), nn.LazyLinear(3)), "its forward does not use them: give unused.weight a size"),
        (
            Lazy(nn.Sequential(nn.Linear(7, 7), nn.LazyLinear(3))),
            r"a forward pass of one sample fails \(RuntimeError: .*",
        ),
    ],
)
def test_lazy_layers_that_stay_unknown_are_refused(module: pl.LightningModule, message: str) -> None:
    splits: Any = SimpleNamespace(train=range(1), spec=Spec(1, 8, ("a", "b"), (0.0,), (1.0,)))
    with pytest.raises(UserError, match=rf"^model: the sizes of its lazy layers are unknown, since {message}"):
        initialise_lazy_layers("model", module, splits, seed=0)
