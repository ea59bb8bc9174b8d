"""What a user's module keeps, returns and logs is the same on several ranks, on devices of one process, and on one."""

import collections
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from rank_fits import CLASSES, Fit, Net, fit, fits, layout_of, same_bits
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lockstep.checkpoint.io import AtomicCheckpointIO, load

pytestmark = pytest.mark.filterwarnings("ignore")
LAYOUTS = [{"world": 3}, {"world": 2, "strategy": "dp"}]


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


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    return Statistics()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_have_the_same_bits_on_all_layouts(
    ranks: Ranks, statistics: Statistics, layout: dict[str, Any]
) -> None:
    [one] = fits(ranks, statistics, 1)
    assert bool(one.state["ready"])
    assert not torch.equal(one.state["center"], statistics.center), "the control"
    several = fits(ranks, statistics, **layout)
    assert same_bits(one.state, *(each.state for each in several))
    assert all(each.metrics == {"val/loss": pytest.approx(one.metrics["val/loss"], rel=1e-6)} for each in several)


@pytest.mark.parametrize("layout", [{"world": 1}, *LAYOUTS])
def test_buffers_have_the_same_bits_after_a_stop_and_are_those_that_were_scored(
    ranks: Ranks, statistics: Statistics, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """A run of two ranks is stopped after its first step, and continues."""

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    whole, *_ = fits(ranks, statistics, 2, callbacks=[Saves()], plugins_of=lambda: [AtomicCheckpointIO()])
    options: dict[str, Any] = {"plugins_of": lambda: [AtomicCheckpointIO(loaded=load(tmp_path / "last.ckpt"))]}
    ends = fits(ranks, statistics, **layout, **options, ckpt=tmp_path / "last.ckpt")
    assert same_bits(whole.state, *(end.state for end in ends))
    assert ends[0].metrics["val/loss"] == pytest.approx(whole.metrics["val/loss"], rel=1e-6)
    assert not same_bits(whole.state, load(tmp_path / "last.ckpt")["state_dict"]), "the control"


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


@pytest.mark.parametrize("layout", [{"world": 1}, *LAYOUTS])
def test_a_counter_that_is_the_same_in_all_pieces_counts_once_a_step(ranks: Ranks, layout: dict[str, Any]) -> None:
    [one] = fits(ranks, Counter(), 1)
    for each in fits(ranks, Counter(), **layout):
        assert int(each.state["seen"]) == 4
        assert int(each.state["norm.num_batches_tracked"]) == 2
        assert same_bits(one.state, each.state)


Output = collections.namedtuple("Output", "logits more")


class Named(Net):
    """Returns a named tuple from its forward."""

    def forward(self, x: Tensor) -> Any:
        return Output(self.net(x), x.mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]).logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]).logits, batch[1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_in_a_named_tuple(ranks: Ranks, layout: dict[str, Any]) -> None:
    [one] = fits(ranks, Named(), 1)
    assert same_bits(one.state, *(each.state for each in fits(ranks, Named(), **layout)))


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


class Augments(Net):
    """Draws random numbers in its hook for batches, and in its forward."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + torch.rand_like(x) if self.trainer.training else x, y


@pytest.mark.parametrize("layout", [{"world": 2, "strategy": "dp"}, {"world": 3, "strategy": "dp"}])
def test_what_a_module_does_to_batches_has_the_same_bits(ranks: Ranks, layout: dict[str, Any]) -> None:
    [one] = fits(ranks, Augments(), 1)
    [several] = fits(ranks, Augments(), **layout)
    assert same_bits(one.state, several.state)
    assert not same_bits(one.state, fits(ranks, Net(), 1)[0].state), "the control"


class OneFails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 1:
            raise ValueError("the file that is broken")
        return super().training_step(batch, batch_idx)


def test_an_error_of_one_rank_is_its(ranks: Ranks) -> None:
    net, layout = OneFails(), layout_of(3)

    def of_rank(rank: int) -> Fit:
        return fit(rank, net, layout)

    with pytest.raises(ValueError, match="the file that is broken") as error:
        ranks(3, of_rank)
    assert error.value.__notes__[-1] == "on rank 1 of 3"
