"""The gradient of a step on several ranks: that of the mean loss over all samples, whichever rank has which pieces."""

from collections.abc import Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from thread_ranks import Ranks
from torch import Tensor, nn

from lockstep.arithmetic.exact_sum import CheckedSum, CorruptMessage
from lockstep.errors import UserError
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.gradients import ExactGradientSum, GradientSum

SIZES = (3, 1, 2, 4, 2)  # samples of each piece
Gradients = list[Tensor | None]


class Net(nn.Module):
    """Has a layer that each piece uses, one that the pieces of `rare` use, and one that no piece uses."""

    def __init__(self, rare: Sequence[int] = ()) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        self.rare = rare

    def loss(self, piece: int) -> Tensor:
        x = samples(piece)
        y = self.always(x) + (self.sometimes(x) if piece in self.rare else 0)
        return y.square().sum(1).mean()


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net(rare=[3])


def samples(piece: int) -> Tensor:
    return torch.randn(SIZES[piece], 4, generator=torch.Generator().manual_seed(piece))


def make_sum(module: Any, kind: Any, world: int) -> Any:
    strategy = SimpleNamespace(
        lightning_module=module, holds=lambda thing: True, use_reducer=lambda wanted: False, gather_dicts=dict
    )
    return kind(strategy, world)


def step_batch(pieces: Sequence[int], number: int = 0) -> StepBatch:
    epochs = np.zeros(9, np.int64)
    micro_batches = [MicroBatch(np.arange(SIZES[piece]), 0, piece, epochs[: SIZES[piece]]) for piece in pieces]
    return StepBatch(micro_batches, sum(SIZES), len(SIZES), 0, number, True)


def take_step(gradients: Any, pieces: Sequence[int], number: int = 0) -> Any:
    """Compute this rank's pieces of a step. Return the gradient over all ranks."""
    module, batch = gradients.strategy.lightning_module, step_batch(pieces, number)
    for parameter in module.parameters():
        # an optimizer's `zero_grad` does not reach parameters that it does not have; an exact sum drops theirs itself
        parameter.grad = torch.ones_like(parameter) if gradients.exact and parameter.requires_grad else None
    gradients.begin(batch)
    for micro_batch in batch.micro_batches:
        (module.loss(micro_batch.piece) * gradients.weight(micro_batch, batch)).backward()
        gradients.collect()
    gradients.reduce(batch)
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def steps(net: Net, kind: Any, owners: Sequence[Sequence[int]], rank: int) -> Any:
    gradients = make_sum(deepcopy(net), kind, len(owners))
    return [take_step(gradients, owners[rank], number) for number in range(3)]


def by_hand(net: Net) -> Gradients:
    """Return the gradient of the mean loss over all samples, by one backward pass of autograd."""
    module = deepcopy(net).double()

    def loss(piece: int) -> Tensor:
        x = samples(piece).double()
        y = module.always(x) + (module.sometimes(x) if piece in net.rare else 0)
        return y.square().sum()

    total = torch.stack([loss(piece) for piece in range(len(SIZES))]).sum() / sum(SIZES)
    total.backward()
    return [None if p.grad is None else p.grad.float() for p in module.parameters()]


def same(one: Any, other: Any) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for step, other_step in zip(one, other, strict=True)
        for a, b in zip(step, other_step, strict=True)
    )


LAYOUTS = [[[0, 1, 2], [3, 4]], [[4, 0], [1, 3], [2]], [[], [0, 1, 2, 3], [4]], [[0], [1], [2], [3], [4]]]


@pytest.mark.parametrize("kind", [GradientSum, ExactGradientSum])
@pytest.mark.parametrize("owners", [[range(5)], *LAYOUTS])
def test_the_gradient_of_the_mean_over_all_samples(ranks: Ranks, net: Net, kind: Any, owners: Any) -> None:
    """Pieces have unequal sizes, and ranks unequal numbers of pieces, maybe none. An exact sum has the same bits."""
    expected, one = by_hand(net), steps(net, kind, [range(5)], 0)
    for result in ranks(len(owners), lambda rank: steps(net, kind, owners, rank)):
        for step in result:
            for gradient, wanted in zip(step, expected, strict=True):
                assert (gradient is None) == (wanted is None), "a parameter without a gradient has none on any layout"
                if gradient is not None and wanted is not None:
                    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
        assert kind is GradientSum or same(result, one)


class ForgetsSize(ExactGradientSum):
    def weight(self, micro_batch: Any, step_batch: Any) -> float:
        return 1.0


class CollectsTwice(ExactGradientSum):
    def collect(self) -> None:
        self.sum.add([parameter.grad for parameter in self.trained.values()])
        super().collect()


class KeepsGradients(ExactGradientSum):
    def _reset(self) -> None:
        pass


@pytest.mark.parametrize("kind", [ForgetsSize, CollectsTwice, KeepsGradients, GradientSum])
def test_a_planted_fault_is_detected(ranks: Ranks, net: Net, kind: Any) -> None:
    """A plain sum is one: the order shows in these numbers."""
    expected = steps(net, ExactGradientSum if kind is not GradientSum else kind, [range(5)], 0)
    for result in ranks(3, lambda rank: steps(net, kind, LAYOUTS[1], rank)):
        assert not same(result, expected)


def test_the_state_of_a_sum_continues_on_another_layout(ranks: Ranks, net: Net) -> None:
    expected = steps(net, ExactGradientSum, [range(5)], 0)

    def of_rank(rank: int, owners: Any, numbers: Sequence[int], state: Any) -> Any:
        gradients = make_sum(deepcopy(net), ExactGradientSum, len(owners))
        gradients.load_state_dict(state)
        assert gradients.state_dict() == {"exponents": [], **state}
        return [take_step(gradients, owners[rank], number) for number in numbers], gradients.state_dict()

    states = [state for _, state in ranks(3, lambda rank: of_rank(rank, LAYOUTS[1], (0, 1), {}))]
    assert states == [states[0]] * 3
    for result, _ in ranks(2, lambda rank: of_rank(rank, LAYOUTS[0], (2,), states[0])):
        assert same(result, expected[2:])


def test_what_is_frozen_and_unfrozen_on_all_ranks(ranks: Ranks, net: Net) -> None:
    def of_rank(rank: int, owners: Any) -> Any:
        gradients = make_sum(deepcopy(net), ExactGradientSum, len(owners))
        results = []
        for number, trains in enumerate((True, False, True)):
            gradients.strategy.lightning_module.always.weight.requires_grad_(trains)
            results.append(take_step(gradients, owners[rank], number))
        return results

    expected = of_rank(0, [range(5)])
    for result in ranks(3, lambda rank: of_rank(rank, LAYOUTS[1])):
        assert same(result, expected)
    assert [step[0] is None for step in expected] == [False, True, False]


def test_a_stage_sums_no_parameters_of_others(net: Net) -> None:
    gradients = make_sum(deepcopy(net), ExactGradientSum, 1)
    whole = take_step(gradients, range(5))
    size = sum(gradients.sum.sizes)

    class Stages(Net):
        def stages(self) -> list[nn.Module]:
            return [self.always, self.sometimes, self.never]

    staged = Stages(rare=[3])
    staged.load_state_dict(net.state_dict())
    gradients = make_sum(staged, ExactGradientSum, 1)
    of_stage = {id(parameter) for parameter in staged.always.parameters()}
    gradients.strategy.holds = lambda thing: id(thing) in of_stage
    part = take_step(gradients, range(5))
    assert same([part[:2]], [whole[:2]])
    assert (size, sum(gradients.sum.sizes)) == (3 * 15, 15)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", [GradientSum, ExactGradientSum])
def test_a_value_that_is_not_finite_reaches_all_ranks(ranks: Ranks, net: Net, kind: Any, value: float) -> None:
    def of_rank(rank: int) -> Any:
        module = deepcopy(net)
        if rank == 1:
            module.always.weight.register_hook(lambda gradient: gradient * value)
        gradients = make_sum(module, kind, 3)
        weight, bias, *_ = take_step(gradients, LAYOUTS[1][rank])
        return bool(weight.isfinite().any()), bool(bias.isfinite().all())

    assert ranks(3, of_rank) == [(False, True)] * 3


def test_a_damaged_message_is_not_applied_where_it_arrives(ranks: Ranks, net: Net) -> None:
    """Only the rank that gets it damaged can see it."""

    class Damaged(CheckedSum):
        def unpack(self, *args: Any) -> Any:
            if dist.get_rank() == 1 and self.step == 1:
                self.message[7] += 1 << 30
            return super().unpack(*args)

    def of_rank(rank: int) -> Any:
        gradients = make_sum(deepcopy(net), ExactGradientSum, 3)
        gradients.exact_sum = Damaged
        return [take_step(gradients, LAYOUTS[1][rank], number) for number in range(2)]

    zero, one, two = ranks(3, of_rank, errors=CorruptMessage)
    assert str(one).startswith("step 2: the sums of always.weight to never.bias do not match what the ranks sent")
    assert same(zero, two)
    assert same(zero, steps(net, ExactGradientSum, [range(5)], 0)[:2]), "checksums change no bit"


def test_gradients_that_wait_in_a_checkpoint_need_their_extra(net: Net) -> None:
    for kind in (GradientSum, ExactGradientSum):
        with pytest.raises(UserError, match="the checkpoint has gradients that its run had not applied yet"):
            make_sum(net, kind, 2).load_state_dict({"waiting": [1, 2]})
