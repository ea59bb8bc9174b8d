"""Fits on several ranks that are threads: the bits of one device, and refusals that appear on all ranks."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from rank_fits import Fit, Net, fit, fits, layout_of, same_bits, splits, trainer_and_data
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.callbacks.ranks import Diverged, ReplicaConsistencyCheck
from lockstep.checkpoint.io import AtomicCheckpointIO, load
from lockstep.errors import NonFinite, StepRefused, UserError
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import ExactGradientSum, GradientSum

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def net() -> Net:
    return Net()


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_an_exact_fit_has_the_bits_of_one_device(ranks: Ranks, net: Net, world: int) -> None:
    """With BatchNorm and dropout; 6 pieces on 4 ranks are 2, 2, 1 and 1."""
    [one] = fits(ranks, net, 1)
    several = [*fits(ranks, net, world), *fits(ranks, net, world, strategy="dp")]
    assert same_bits(one.state, *(each.state for each in several))
    assert not same_bits(one.state, net.state_dict()), "the control: the steps have changed the weights"
    assert {each.metrics["val/loss"] for each in several} == {one.metrics["val/loss"]}


def test_other_pieces_or_a_plain_sum_have_other_bits(ranks: Ranks, net: Net) -> None:
    """The control: the comparison above can fail."""
    [one] = fits(ranks, net, 1)
    assert not same_bits(one.state, fits(ranks, net, 2, pieces=4)[0].state)
    assert not same_bits(one.state, fits(ranks, net, 3, exact=False)[0].state)


@pytest.mark.parametrize("world", [2, 4])
def test_a_plain_fit_agrees_to_rounding_and_all_ranks_have_the_same_bits(ranks: Ranks, net: Net, world: int) -> None:
    """By DDP's reducer."""
    [one] = fits(ranks, net, 1, exact=False)
    first, *others = fits(ranks, net, world, exact=False)
    assert same_bits(first.state, *(each.state for each in others))
    for name, value in one.state.items():
        torch.testing.assert_close(first.state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shares", [(3.0, 1.0), (1.0, 4.0, 1.0)])
def test_uneven_shares_have_the_same_bits(ranks: Ranks, net: Net, shares: Sequence[float]) -> None:
    [one] = fits(ranks, net, 1)
    assert same_bits(one.state, *(each.state for each in fits(ranks, net, len(shares), shares=shares)))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("train", [14, 13])
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

    net = Broken()
    layout, skipped = layout_of(2, exact=True), []

    class Watched(FiniteGradientCheck):
        def before_optimizer_step(self, step: Any) -> None:
            super().before_optimizer_step(step)
            skipped.append(step.batch.skipped)

    def of_rank(rank: int) -> Fit:
        return fit(rank, net, layout, hooks=[Watched(policy)])

    results = ranks(2, of_rank, errors=NonFinite)
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
    for error in ranks(2, lambda rank: fit(rank, Branches([]), layout_of(2)), errors=UserError):
        assert str(error).startswith("strategy=ddp: no gradient has reached rare.weight, rare.bias, never.weight")


class Freezes(Net):
    """Trains its first layer in the first epoch only."""

    def on_train_epoch_start(self) -> None:
        cast(Any, self.net)[0].requires_grad_(self.current_epoch == 0)


@pytest.mark.parametrize(("world", "exact"), [(2, False), (3, True)])
def test_layers_that_are_frozen_in_the_run(ranks: Ranks, world: int, exact: bool) -> None:
    net = Freezes()
    [one] = fits(ranks, net, 1, exact, max_epochs=2)
    first, *others = fits(ranks, net, world, exact, max_epochs=2)
    assert same_bits(first.state, *(each.state for each in others))
    for name, value in one.state.items():
        torch.testing.assert_close(first.state[name], value, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-5)


# --- a stop -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (3, 2)])
def test_a_run_continues_on_another_layout_to_the_same_bits(
    ranks: Ranks, net: Net, tmp_path: Path, before: int, after: int
) -> None:
    """From a checkpoint that rank zero has written after the first step."""
    path, layout = tmp_path / "last.ckpt", layout_of(after, exact=True)

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(path)

    def continued(rank: int) -> Fit:
        # the content, as a run has read it before: Lightning reads a file under a lock of the process
        return fit(rank, net, layout, plugins=[AtomicCheckpointIO(loaded=load(path))], ckpt=path)

    [whole, *_] = fits(ranks, net, before, callbacks=[Saves()], plugins_of=lambda: [AtomicCheckpointIO()])
    ends = [continued(0)] if after == 1 else ranks(after, continued)
    assert same_bits(whole.state, *(end.state for end in ends))
    assert ends[0].trainer.global_step == 2
    assert not same_bits(whole.state, load(path)["state_dict"]), "the control"


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

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(path)

    [whole] = fits(ranks, net, 1, callbacks=[Saves()], plugins=[AtomicCheckpointIO()])

    def continued(content: Any) -> dict[str, Tensor]:
        [end] = fits(ranks, net, 1, plugins=[AtomicCheckpointIO(loaded=content)], ckpt=path)
        return end.state

    assert same_bits(whole.state, continued(load(path)))
    without = load(path)
    del without["loops"]["fit_loop"]["epoch_loop.state_dict"]["statistics"]
    assert not same_bits(whole.state, continued(without)), "the control"


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
    ("kind", "message"),
    [
        (Gathers, "training_step can't gather from other ranks"),
        (Returns, "training_step returned NoneType: it must return the loss of every batch"),
        (ReturnsVector, "training_step returned a loss of shape [2]: it must be one number"),
    ],
)
@pytest.mark.parametrize("world", [1, 3])
def test_what_a_step_can_not_do_is_refused_on_every_rank(ranks: Ranks, kind: Any, message: str, world: int) -> None:
    net, layout = kind(), layout_of(world)
    for error in ranks(world, lambda rank: fit(rank, net, layout), errors=StepRefused):
        assert message in str(error)


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_that_communicates_by_itself_is_refused_on_every_rank(ranks: Ranks, exact: bool) -> None:
    net, layout = PassesBy(), layout_of(3, exact=exact)
    for error in ranks(3, lambda rank: fit(rank, net, layout), errors=StepRefused):
        assert "training_step can't communicate with other ranks" in str(error)


def test_a_rank_whose_weights_differ_is_named_on_every_rank(ranks: Ranks, net: Net) -> None:
    class Changes(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_rank == 2:
                cast(Any, self.net)[0].weight.data[0, 0] += 2.0**-20

    changes, layout = Changes(), layout_of(3, exact=True)

    def of_rank(rank: int, module: Any) -> Fit:
        return fit(rank, module, layout, callbacks=[ReplicaConsistencyCheck()])

    for error in ranks(3, lambda rank: of_rank(rank, changes), errors=Diverged):
        assert str(error) == "after step 2 the weights of rank 2 differ from those of rank 0"
    assert all(isinstance(each, Fit) for each in ranks(3, lambda rank: of_rank(rank, net), errors=Diverged)), (
        "the control"
    )


class ForgetsLastPiece(ExactGradientSum):
    """The fault of a rank that leaves out its last piece of each step."""

    def reduce(self, step_batch: Any) -> None:
        if cast(Any, self.strategy).global_rank == 1:
            self.sum.begin(step_batch.step)
        super().reduce(step_batch)


class AddsFloats(GradientSum):
    """The fault of a sum in floating point where an exact one is due."""


@pytest.mark.parametrize("fault", [ForgetsLastPiece, AddsFloats])
def test_a_planted_fault_of_the_sum_is_detected(ranks: Ranks, net: Net, fault: Any) -> None:
    [one] = fits(ranks, net, 1)
    faulty = fits(ranks, net, 3, sum_of=fault)
    assert not same_bits(one.state, faulty[0].state)
    assert same_bits(faulty[0].state, faulty[1].state, faulty[2].state), "all ranks agree on the wrong result"


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


def test_an_evaluation_of_a_fit_and_one_by_itself_agree(ranks: Ranks, net: Net) -> None:
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
