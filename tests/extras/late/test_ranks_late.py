"""Late gradients on several ranks: the bits of one device, also after a stop, and no gradient is lost."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from rank_fits import Net, fits, same_bits
from thread_ranks import Ranks

from lockstep.checkpoint.io import AtomicCheckpointIO, load
from lockstep.step.gradients import ExactGradientSum, GradientSum
from lockstep.step.strategy import proxy
from lockstep_extras.late.sum import ApplyRemaining, LatePasses, late_sum

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("whole_run")]
LAYOUTS = [{"world": 2}, {"world": 3}, {"world": 4}, {"world": 2, "strategy": "dp"}, {"world": 3, "strategy": "dp"}]


def late_by(steps: int, exact: bool = True) -> dict[str, Any]:
    """Return the options of a fit of six steps, whose last one of an epoch has one sample."""
    kind = ExactGradientSum if exact else GradientSum
    late: dict[str, Any] = {"sum_of": lambda strategy, world: late_sum(kind(strategy, world), steps)}
    late |= {
        "callbacks_for": lambda gradients: [ApplyRemaining()],
        "passes_of": lambda passes: proxy(passes, LatePasses),
    }
    return {**late, "max_epochs": 2, "train": 25, "exact": exact}


@pytest.fixture(scope="module")
def net() -> Net:
    return Net(norm=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", [1, 3])
def test_all_layouts_have_the_same_bits(ranks: Ranks, net: Net, layout: dict[str, Any], steps: int) -> None:
    [one] = fits(ranks, net, 1, **late_by(steps))
    several = fits(ranks, net, **layout, **late_by(steps))
    assert same_bits(one.state, *(each.state for each in several))
    assert one.trainer.global_step == 6
    [other] = fits(ranks, net, 1, **late_by(steps + 1))
    assert not same_bits(one.state, other.state), "the control"


def test_without_exact_all_ranks_have_the_same_bits(ranks: Ranks, net: Net) -> None:
    first, *others = fits(ranks, net, 3, **late_by(2, exact=False))
    assert same_bits(first.state, *(each.state for each in others))


@pytest.mark.parametrize("layout", [{"world": 1}, *LAYOUTS[:2]])
def test_a_run_continues_with_the_gradients_that_wait(
    ranks: Ranks, net: Net, tmp_path: Path, layout: dict[str, Any]
) -> None:
    path = tmp_path / "last.ckpt"

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(path)

    whole, *_ = fits(ranks, net, 2, **late_by(2), callbacks=[Saves()], plugins_of=lambda: [AtomicCheckpointIO()])
    waiting = load(path)["loops"]["fit_loop"]["epoch_loop.state_dict"]["gradients"]["waiting"]
    assert [each["step"] for each in waiting] == [0, 1]
    plugins: dict[str, Any] = {"plugins_of": lambda: [AtomicCheckpointIO(loaded=load(path))]}
    ends = fits(ranks, net, **layout, **late_by(2), **plugins, ckpt=path)
    assert same_bits(whole.state, *(end.state for end in ends))
