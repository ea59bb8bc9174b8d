"""`strategy=fsdp` with modules and callbacks as people write them: lists of lists, recurrent layers, examples."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from sharded_runs import BATCH, Classifier, samples, train, trainer_on
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep
from lockstep.callbacks.ema import EMA
from lockstep.errors import UserError
from lockstep.strategies import FSDP
from lockstep.strategies.sharded_parameters import find_blocks
from lockstep.vision.parameters import Unfreeze

# autograd decides at the first backward pass of a process whether forks may compute gradients too
torch.ones(1, requires_grad=True).sum().backward()


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

    def __init__(self, net: str, optimizer: str) -> None:
        super().__init__(net, optimizer)
        self.net = Recurrent()
        self.example_input_array = torch.zeros(2, 1, 12, 12)


def fit_and_test(folder: Path, strategy: Any) -> tuple[str, bool, list[float]]:
    """Train with an average of the weights. Return their hash, whether the example is there, and the test loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Example("vit", "adamw")
    trainer = trainer_on(
        strategy,
        folder,
        enable_checkpointing=False,
        enable_model_summary=True,
        pieces=6,
        exact=True,
        max_epochs=1,
        callbacks=[EMA()],
    )
    trainer.fit(module, DataLoader(samples(), batch_size=BATCH))
    strategy_of_run: Any = trainer.strategy
    digest = lockstep.weights_sha256(strategy_of_run.lightning_module_state_dict())
    tested: Any = trainer.test(module, DataLoader(samples(5), batch_size=1), verbose=False)
    return digest, module.example_input_array is not None, [*tested[0].values()]


@pytest.mark.usefixtures("processes")
def test_layers_in_lists_recurrent_layers_examples_and_a_test_after_averages(tmp_path: Path) -> None:
    one = fit_and_test(tmp_path / "one", "auto")
    options: dict[str, Any] = {"devices": 2, "accelerator": "cpu", "hang_timeout": 120}
    assert one[1]
    assert lockstep.launch(fit_and_test, tmp_path / "two", FSDP(), **options) == one


class Grids(pl.Callback):
    """Records the exponents of the grids of the gradients' sums after each step."""

    def __init__(self, record: list[Any]) -> None:
        self.record = record

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.record.append(sorted(trainer.fit_loop.epoch_loop.passes.gradients.state_dict()["exponents"]))


def grids(folder: Path, strategy: Any) -> tuple[str, list[Any]]:
    """Train with a skipped step."""
    torch.set_num_threads(1)
    record: list[Any] = []
    options: dict[str, Any] = {"nonfinite": "skip", "broken": 3, "callbacks": lambda: Grids(record)}
    return train(folder, strategy, "vit", "adamw", **options), record


@pytest.mark.usefixtures("processes")
def test_a_skipped_step_leaves_the_grids_of_one_device(tmp_path: Path) -> None:
    """They are in another order: those of tensors that are summed whole come first."""
    one = grids(tmp_path / "one", "auto")
    assert len({str(each) for each in one[1]}) > 1
    assert lockstep.launch(grids, tmp_path / "two", FSDP(), devices=2, accelerator="cpu", hang_timeout=120) == one


def test_a_list_that_nobody_calls_is_no_block() -> None:
    net = Recurrent()
    large = {id(parameter) for parameter in net.parameters() if parameter.numel() > 10_000}
    layers = [layer for pair in net.layers for layer in pair.children()]
    assert find_blocks(net, large, None) == layers
    with pytest.raises(UserError, match="no module of this name has large weights"):
        find_blocks(net, large, "layers.?")
    assert find_blocks(net, large, "layers.*.*") == layers


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        train(folder, FSDP(), "frozen", "sgd", callbacks=partial(BackboneFinetuning))
    return str(error.value)


@pytest.mark.usefixtures("processes")
def test_a_callback_that_notes_the_optimizers_parameters_is_refused(tmp_path: Path) -> None:
    message = lockstep.launch(refused, tmp_path, devices=2, accelerator="cpu", hang_timeout=120)
    assert "BackboneFinetuning looks for the optimizer's parameters in the module" in message


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
