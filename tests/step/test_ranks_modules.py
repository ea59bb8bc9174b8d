"""What a user's module keeps, returns and logs is the same on several ranks, on devices of one process, and on one."""

import collections
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rank_fits import CLASSES, Fit, Net, fit, fits, going_on, layout_of, same_bits, saving
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lockstep.checkpoint.io import load

pytestmark = pytest.mark.filterwarnings("ignore")


class Statistics(Net):
    """Buffers that no layer of torch has: a centre that is replaced, a norm of its own, power iterations, a flag."""

    center: Any
    scale: Any
    ready: Any

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.net[0])
        self.register_buffer("center", torch.zeros(CLASSES))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        if not self.training:
            return (out - self.center) / self.scale
        center, self.center = self.center, 0.9 * self.center + 0.1 * out.mean(0)
        self.scale.data.lerp_(out.detach().std(), 0.1)
        self.ready.fill_(True)
        return out - center


class Counter(Net):
    """Counts what it has seen in a buffer that is replaced, and has a norm whose momentum follows from its counter."""

    seen: Any

    def __init__(self) -> None:
        super().__init__(norm=False, dropout=0.0)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(CLASSES, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(x)
        out: Tensor = self.norm(self.net(x))
        return out


Output = collections.namedtuple("Output", "logits more")


class Named(Net):
    """Returns a named tuple from its forward."""

    def forward(self, x: Tensor) -> Any:
        return Output(self.net(x), x.mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]).logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]).logits, batch[1]))


class Augments(Net):
    """Draws random numbers in its hook for batches, and in its forward."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + torch.rand_like(x) if self.trainer.training else x, y


class Freezes(Net):
    """Trains its first layer in the first epoch only."""

    def on_train_epoch_start(self) -> None:
        cast(Any, self.net)[0].requires_grad_(self.current_epoch == 0)


class HalvesAfterBackward(Net):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5


class BuffersOfRanks(Net):
    """Its buffers differ between the ranks at the start, as memory that nobody has set does."""

    def configure_model(self) -> None:
        rank = self.trainer.global_rank if self.trainer.world_size > 1 else 0
        if not hasattr(self, "pointer"):
            self.register_buffer("pointer", torch.full((1,), 5 + rank))
            self.register_buffer("bank", torch.full((3, 2), 1.0 + rank).t())
            self.register_buffer("phase", torch.full((2,), 1j * (1 + rank)))
            self.register_buffer("on", torch.tensor(rank == 0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.bank.mean()  # type: ignore[operator]


DDP: dict[str, dict[str, Any]] = {f"ddp {world}": {"world": world} for world in (2, 3, 4)}
LAYOUTS: dict[str, dict[str, Any]] = DDP | {
    "dp 2": {"world": 2, "strategy": "dp"},
    "dp 3": {"world": 3, "strategy": "dp"},
    "fsdp 2": {"world": 2, "strategy": "fsdp"},
    "shares 3:1": {"world": 2, "shares": (3.0, 1.0)},
    "shares 1:4:1": {"world": 3, "shares": (1.0, 4.0, 1.0)},
}
PLAIN: Any = Net  # for mypy, to which a class of modules is not hashable


@cache
def module_of(kind: Any) -> Any:
    return kind()


@cache
def on_one_device(kind: Any, epochs: int = 1) -> Fit:
    return fit(0, module_of(kind), layout_of(1, exact=True), max_epochs=epochs)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        # with BatchNorm and dropout; six pieces on four ranks are 2, 2, 1 and 1
        *((Net, layout) for layout in ("ddp 2", "ddp 4", "dp 2", "shares 3:1", "shares 1:4:1")),
        *((kind, layout) for kind in (Statistics, Counter, Named) for layout in ("ddp 3", "dp 2")),
        *((Augments, layout) for layout in ("dp 2", "dp 3")),
        (Freezes, "ddp 3"),
        (HalvesAfterBackward, "ddp 2"),
        *((BuffersOfRanks, layout) for layout in ("ddp 2", "fsdp 2")),
    ],
)
def test_a_fit_has_the_bits_of_one_device(ranks: Ranks, kind: Any, layout: str) -> None:
    epochs = 2 if kind is Freezes else 1
    one = on_one_device(kind, epochs)
    several = fits(ranks, module_of(kind), **LAYOUTS[layout], max_epochs=epochs)
    assert same_bits(one.state, *(each.state for each in several))
    assert {each.metrics["val/loss"] for each in several} == {one.metrics["val/loss"]}
    if kind not in (Net, Named):
        assert not same_bits(one.state, on_one_device(PLAIN, epochs).state), "the control: what the module does counts"


def test_what_the_modules_count_on_one_device() -> None:
    """The table above compares with it."""
    kinds: list[Any] = [PLAIN, Statistics, Counter]
    net, statistics, counter = (on_one_device(kind).state for kind in kinds)
    assert not same_bits(net, module_of(PLAIN).state_dict()), "the steps have changed the weights"
    assert bool(statistics["ready"])
    assert statistics["center"].any()
    assert int(counter["seen"]) == 4, "two samples for each of two steps, not for each piece"
    assert int(counter["norm.num_batches_tracked"]) == 2


@pytest.mark.parametrize(("kind", "world"), [(Net, 2), (Net, 4), (Freezes, 2)])
def test_a_plain_fit_agrees_to_rounding_and_all_ranks_have_the_same_bits(ranks: Ranks, kind: Any, world: int) -> None:
    """By DDP's reducer."""
    net, epochs = module_of(kind), 2 if kind is Freezes else 1
    [one] = fits(ranks, net, 1, exact=False, max_epochs=epochs)
    first, *others = fits(ranks, net, world, exact=False, max_epochs=epochs)
    assert same_bits(first.state, *(each.state for each in others))
    for name, value in one.state.items():
        torch.testing.assert_close(first.state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [(Net, 1, 3), (Net, 3, 2), (Statistics, 2, 1), (Statistics, 2, 3)],
)
def test_a_run_continues_on_another_layout_to_the_same_bits(
    ranks: Ranks, tmp_path: Path, kind: Any, before: int, after: int
) -> None:
    """From a checkpoint that rank zero has written after the first step. Buffers are those that were scored."""
    net, path = module_of(kind), tmp_path / "last.ckpt"
    whole, *_ = fits(ranks, net, before, **saving(path))
    ends = fits(ranks, net, after, **going_on(path))
    assert same_bits(whole.state, *(end.state for end in ends))
    assert {end.metrics["val/loss"] for end in ends} == {whole.metrics["val/loss"]}
    assert ends[0].trainer.global_step == 2
    assert not same_bits(whole.state, load(path)["state_dict"]), "the control"


class Counts(Net):
    """Counts what it is trained on in a metric, with validations in between."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.seen = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.seen.update(logits, batch[1])
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("train/seen", float(cast(Any, self.seen.tp) + self.seen.fn), sync_dist=True, reduce_fx="sum")
        self.seen.reset()


@pytest.mark.parametrize("evaluated", [1, 3])
def test_more_ranks_than_validation_samples(ranks: Ranks, evaluated: int) -> None:
    """No rank waits for one without a sample, and what a metric of training counts meanwhile stays."""
    net = Counts()
    options = {"evaluated": evaluated, "val_check_interval": 1, "train": 30}
    [one] = fits(ranks, net, 1, exact=False, **options)
    assert one.metrics["train/seen"] == 30
    for each in fits(ranks, net, 4, exact=False, **options):
        assert each.metrics["train/seen"] == 30
        assert each.metrics["val/loss"] == pytest.approx(one.metrics["val/loss"], rel=1e-4)


class OneFails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 1:
            raise ValueError("the file that is broken")
        return super().training_step(batch, batch_idx)


def test_an_error_of_one_rank_is_its(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="the file that is broken") as error:
        fits(ranks, OneFails(), 3, exact=False)
    assert error.value.__notes__[-1] == "on rank 1 of 3"
