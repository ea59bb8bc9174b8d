"""`strategy=fsdp` with modules and callbacks as people write them: lists of lists, recurrent layers, examples."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from rank_fits import same_bits
from strategies.sharded_runs import Classifier, rank_fit, refusals
from thread_ranks import Ranks
from torch import Tensor, nn

from lockstep.callbacks.ema import EMA
from lockstep.errors import UserError
from lockstep.strategies.fsdp.parameters import find_blocks
from lockstep.vision.parameters import Unfreeze

pytestmark = pytest.mark.filterwarnings("ignore")


class Recurrent(nn.Module):
    """A recurrent layer, and pairs of layers in a list of lists, as some transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(12, 72, batch_first=True)
        pairs: Any = [[nn.Linear(72, 288), nn.Linear(288, 72)] for _ in range(2)]
        self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        self.head = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rows(x.flatten(1, 2))[0][:, -1]
        for pair in self.layers:
            x = x + pair[1](pair[0](x).relu())  # type: ignore[index]
        result: Tensor = self.head(x)
        return result


class Example(Classifier):
    """Has an example of its input, which Lightning's summary passes through the module."""

    def __init__(self) -> None:
        super().__init__("mixer", "adamw")
        self.net = Recurrent()
        self.example_input_array = torch.zeros(2, 1, 12, 12)
        self.tested: dict[str, Tensor] = {}

    def on_test_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.tested = {name: value.clone() for name, value in strategy.lightning_module_state_dict().items()}


@pytest.mark.usefixtures("whole_run")
def test_layers_in_lists_recurrent_layers_examples_and_a_test_after_averages(ranks: Ranks) -> None:
    """The test would run in torch's inference mode, as on GPUs, where parts can't be used."""
    module = Example()

    def fit_and_test(rank: int, world: int) -> tuple[dict[str, Tensor], bool, list[float]]:
        """Return the weights, whether the example is there, and the test loss."""
        result = rank_fit(rank, module, world, callbacks=EMA, enable_model_summary=True)
        trainer = result.trainer
        fitted = trainer.lightning_module
        tested = trainer.test(fitted, trainer.datamodule, verbose=False)
        assert rank or same_bits(result.state, fitted.tested)
        return result.state, fitted.example_input_array is not None, [*tested[0].values()]

    one = fit_and_test(0, 1)
    two, other = ranks(2, lambda rank: fit_and_test(rank, 2))
    assert same_bits(one[0], two[0])
    assert one[1:] == two[1:] == other[1:]
    assert one[1]
    assert not same_bits(one[0], module.state_dict()), "the control"


class Grids(pl.Callback):
    """Records the exponents of the grids of the gradients' sums after each step."""

    def __init__(self, record: list[Any]) -> None:
        self.record = record

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.record.append(sorted(trainer.fit_loop.epoch_loop.passes.gradients.state_dict()["exponents"]))


def test_a_skipped_step_leaves_the_grids_of_one_device(ranks: Ranks) -> None:
    """They are in another order: those of tensors that are summed whole come first."""
    module = Classifier("mixer", "adamw")

    def grids(world: int) -> tuple[dict[str, Tensor], list[Any]]:
        """Fit with a skipped step."""
        records: list[list[Any]] = [[] for _ in range(world)]

        def of_rank(rank: int) -> dict[str, Tensor]:
            options: dict[str, Any] = {"nonfinite": "skip", "broken": 3, "train": 20}
            return rank_fit(rank, module, world, callbacks=lambda: Grids(records[rank]), **options).state

        state = of_rank(0) if world == 1 else ranks(world, of_rank)[0]
        return state, records[0]

    one, two = grids(1), grids(2)
    assert same_bits(one[0], two[0])
    assert one[1] == two[1]
    assert len({str(each) for each in one[1]}) > 1


def test_a_list_that_nobody_calls_is_no_block() -> None:
    net = Recurrent()
    large = {id(parameter) for parameter in net.parameters() if parameter.numel() > 10_000}
    layers = [layer for pair in net.layers for layer in pair.children()]
    assert find_blocks(net, large, None) == layers
    with pytest.raises(UserError, match="no module of this name has large weights"):
        find_blocks(net, large, "layers.?")
    assert find_blocks(net, large, "layers.*.*") == layers


def test_a_callback_that_notes_the_optimizers_parameters_is_refused(ranks: Ranks) -> None:
    for text in refusals(ranks, Classifier("frozen"), callbacks=BackboneFinetuning):
        assert "BackboneFinetuning looks for the optimizer's parameters in the module" in text


def test_unfreezing_looks_for_no_parameter_of_the_optimizer_in_the_module() -> None:
    """With fsdp they are others than the module's."""
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    module.requires_grad_(False)
    callback = Unfreeze(1)
    callback.patterns = {"weight": "*", "bias": "*"}
    module.global_rank = 0  # type: ignore[assignment]
    trainer: Any = type("Trainer", (), {"optimizers": [torch.optim.SGD(other.parameters())], "current_epoch": 1})
    callback.on_train_epoch_start(trainer, module)  # type: ignore[arg-type]
    assert all(parameter.requires_grad for parameter in module.parameters())
