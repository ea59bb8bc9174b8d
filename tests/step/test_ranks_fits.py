"""Fits on several ranks that are threads: the bits of one device, and refusals that appear on all ranks."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from rank_fits import Net, fits, going_on, layout_of, same_bits, saving, splits, trainer_and_data
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.checkpoint.io import load
from lockstep.errors import NonFinite, StepRefused, UserError
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import ExactGradientSum

pytestmark = pytest.mark.filterwarnings("ignore")


# --- the same bits ----------------------------------------------------------------------------------------------------


class ForgetsLastPiece(ExactGradientSum):
    """The fault of a rank that leaves out its last piece of each step."""

    def reduce(self, step_batch: Any) -> None:
        if cast(Any, self.strategy).global_rank == 1:
            self.sum.begin(step_batch.step)
        super().reduce(step_batch)


def test_other_pieces_a_plain_sum_and_a_forgotten_piece_have_other_bits(ranks: Ranks) -> None:
    """The control of the comparisons in test_ranks_modules.py."""
    net = Net()
    [one] = fits(ranks, net, 1)
    assert not same_bits(one.state, fits(ranks, net, 2, pieces=4)[0].state)
    assert not same_bits(one.state, fits(ranks, net, 3, exact=False)[0].state)
    faulty, *others = (each.state for each in fits(ranks, net, 3, sum_of=ForgetsLastPiece))
    assert not same_bits(one.state, faulty)
    assert same_bits(faulty, *others), "all ranks agree on the wrong result"


@pytest.mark.parametrize(("exact", "train"), [(True, 14), (True, 13), (False, 13)])
def test_a_last_step_in_which_a_rank_has_no_sample(ranks: Ranks, exact: bool, train: int) -> None:
    """Of two samples or one, on four ranks. DDP's reducer would wait for the others."""
    net = Net(norm=False)
    [one] = fits(ranks, net, 1, exact, train=train)
    several = fits(ranks, net, 4, exact, train=train)
    assert same_bits(several[0].state, *(each.state for each in several[1:]))
    assert several[0].trainer.global_step == 2
    for name, value in one.state.items():
        torch.testing.assert_close(several[0].state[name], value, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_is_detected_by_all_ranks(ranks: Ranks, policy: str) -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if self.global_rank == 1 and batch_idx == 0 else loss

    class Watched(FiniteGradientCheck):
        def before_optimizer_step(self, step: Any) -> None:
            super().before_optimizer_step(step)
            skipped.append(step.batch.skipped)

    skipped: list[bool] = []
    results = fits(ranks, Broken(), 2, hooks_of=lambda gradients: [Watched(policy)], errors=NonFinite)
    if policy == "stop":
        assert [type(result) for result in results] == [NonFinite, NonFinite]
    else:
        assert sorted(skipped) == [False, False, True, True]
        assert same_bits(*(result.state for result in results))


class Branches(Net):
    """Has a layer that only some pieces use, and one that none uses."""

    def __init__(self, uses: Sequence[int]) -> None:
        super().__init__(norm=False)
        self.rare, self.never = nn.Linear(4, 3), nn.Linear(4, 3)
        self.uses = uses

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        extra = self.rare(batch[0]) if batch_idx in self.uses and self.global_rank == 0 else 0
        return F.cross_entropy(self(batch[0]) + extra, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize("world", [1, 3])
def test_what_no_rank_uses_is_not_decayed_and_what_one_rank_uses_is(ranks: Ranks, world: int) -> None:
    """A gradient of zeros in the place of none would apply weight decay."""
    net = Branches([0])
    for each in fits(ranks, net, world):
        assert same_bits({"w": each.state["never.weight"]}, {"w": net.never.weight})
        assert not torch.equal(each.state["rare.weight"], net.rare.weight)


def test_ddp_names_a_parameter_that_a_last_piece_leaves_out(ranks: Ranks) -> None:
    for error in fits(ranks, Branches([]), 2, exact=False, errors=UserError):
        assert str(error).startswith("strategy=ddp: no gradient has reached rare.weight, rare.bias, never.weight")


# --- a stop -----------------------------------------------------------------------------------------------------------


class UnequalInputs(Net):
    """Normalises inputs of unequal size, so that the grids of the statistics' sums show in the smallest of them."""

    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("sizes", torch.tensor([1e3, 1.0, 1e-2, 1e-4]))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(self.norm(x * self.sizes))
        return output


def test_a_run_continues_with_the_grids_of_its_statistics(ranks: Ranks, tmp_path: Path) -> None:
    path, net = tmp_path / "last.ckpt", UnequalInputs()
    [whole] = fits(ranks, net, 1, **saving(path))
    assert same_bits(whole.state, fits(ranks, net, 1, **going_on(path))[0].state)
    without = load(path)
    del without["loops"]["fit_loop"]["epoch_loop.state_dict"]["statistics"]
    assert not same_bits(whole.state, fits(ranks, net, 1, **going_on(path, without))[0].state), "the control"


# --- refused on all ranks ---------------------------------------------------------------------------------------------


class Gathers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch[0].sum())
        return super().training_step(batch, batch_idx)


class PassesBy(Net):
    """Communicates without the strategy, as losses over the samples of all ranks do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        dist.all_reduce(total := super().training_step(batch, batch_idx).detach())
        return super().training_step(batch, batch_idx) * (1 + total)


class Returns(Net):
    value: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.value


class ReturnsVector(Returns):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("kind", "world", "exact", "message"),
    [
        *((Gathers, world, False, "training_step can't gather from other ranks") for world in (1, 3)),
        (Returns, 3, False, "returned NoneType: it must return the loss of every batch"),
        (ReturnsVector, 3, False, "a loss of shape [2]: it must be one number"),
        *((PassesBy, 3, exact, "training_step can't communicate with other ranks") for exact in (False, True)),
    ],
)
def test_what_a_step_can_not_do_is_refused_on_every_rank(
    ranks: Ranks, kind: Any, world: int, exact: bool, message: str
) -> None:
    for error in fits(ranks, kind(), world, exact, errors=StepRefused):
        assert message in str(error)


def test_the_epochs_numbers_of_a_step_are_means_over_all_samples(ranks: Ranks) -> None:
    """`on_train_batch_end` gets those of its rank, whose weighted mean is that of one device."""

    class Watches(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, *args: Any) -> None:
            seen.append((batch.step, float(outputs["loss"]) * batch.num_local_samples, batch.num_local_samples))

    seen: list[tuple[int, float, int]] = []
    net = Watches(dropout=0.0)
    means = []
    for world in (1, 3):
        seen.clear()
        fits(ranks, deepcopy(net), world)
        sums = [[row[1:] for row in seen if row[0] == step] for step in range(2)]
        means.append([sum(a for a, _ in rows) / sum(n for _, n in rows) for rows in sums])
    assert means[0] == pytest.approx(means[1])


def test_a_hooks_value_has_the_weight_of_the_samples_of_its_step(ranks: Ranks) -> None:
    """In the mean of an epoch, on a rank without a sample, too. The last step has 2 samples, on 4 ranks."""

    class Logs(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("hook", float(batch_idx), on_step=False, on_epoch=True)

    for result in fits(ranks, Logs(norm=False), 4, train=14):
        assert result.metrics["hook"] == pytest.approx(2 / 14)


def test_an_evaluation_of_a_fit_and_one_by_itself_agree(ranks: Ranks) -> None:
    net = Net()

    def evaluated(rank: int) -> tuple[float, float]:
        layout = layout_of(4, exact=True)
        trainer, data = trainer_and_data(rank, layout, splits(24, evaluated=7))
        module = deepcopy(net)
        trainer.fit(module, datamodule=data)
        after = float(trainer.callback_metrics["val/loss"])
        [again] = trainer.validate(module, datamodule=data, verbose=False)
        return after, again["val/loss"]

    results = ranks(4, evaluated)
    assert {result[0] for result in results} == {results[0][1]}
