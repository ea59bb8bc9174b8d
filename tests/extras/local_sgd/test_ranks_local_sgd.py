"""Weights that are averaged over ranks every few steps."""

from typing import Any

import pytest
import torch
from rank_fits import Net, fits, layout_of, same_bits
from thread_ranks import Ranks

from lockstep.callbacks.ranks import Diverged, ReplicaConsistencyCheck
from lockstep_extras.local_sgd.average import AverageWeights, LocalGradients

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("whole_run")]


def every(steps: int, **options: Any) -> dict[str, Any]:
    kind = options.pop("kind", AverageWeights)
    averages = {
        "sum_of": lambda strategy, world: LocalGradients(strategy, kind(steps)),
        "exact": False,
        "max_epochs": 2,
    }
    return averages | {"callbacks_for": lambda gradients: [gradients.strategy.averages]} | options


@pytest.mark.parametrize("world", [2, 3, 4])
def test_at_every_step_it_is_the_mean_of_the_gradients(ranks: Ranks, world: int) -> None:
    """If the ranks have equally many samples; less often it is something else."""
    net, pieces = Net(norm=False, dropout=0.0), 12
    [one] = fits(ranks, net, 1, exact=False, max_epochs=2, pieces=pieces)
    first, *others = fits(ranks, net, world, pieces=pieces, **every(1))
    assert same_bits(first.state, *(each.state for each in others))
    for name, value in one.state.items():
        torch.testing.assert_close(first.state[name], value, rtol=1e-4, atol=1e-6)
    seldom = fits(ranks, net, world, pieces=pieces, **every(4))[0]
    assert not torch.allclose(seldom.state["net.0.weight"], one.state["net.0.weight"], rtol=1e-4, atol=1e-6)


def test_weights_are_averaged_before_they_are_validated(ranks: Ranks) -> None:
    """Also those of a rank that had no sample in the last step; else the ranks' check ends the run."""
    assert layout_of(3).counts == [2, 2, 2]
    net, options = Net(norm=False), {"train": 13, "callbacks": [ReplicaConsistencyCheck()]}
    first, *others = fits(ranks, net, 3, **every(9, **options))
    assert same_bits(first.state, *(each.state for each in others))

    class Forgets(AverageWeights):
        def average(self, module: Any) -> None:
            """Do nothing."""

    with pytest.raises(Diverged):
        fits(ranks, net, 3, **every(9, **options, kind=Forgets))
