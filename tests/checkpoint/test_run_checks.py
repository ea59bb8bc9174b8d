"""Checkpoint callbacks that write a file of the run, and hooks that rename parameters, are refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, OnExceptionCheckpoint
from plain import STEPS, Plain, loaders, step_of, trainer_with
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from lockstep.callbacks import Checkpoint
from lockstep.checkpoint.run_checks import ParameterNameCheck, SharedFileCheck
from lockstep.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(folder: Path, *callbacks: pl.Callback) -> None:
    check = SharedFileCheck(folder, {f"callbacks.own{at}": each for at, each in enumerate(callbacks)})
    trainer_with(folder, Checkpoint(folder), *callbacks, check, epochs=1).fit(Plain(), **loaders())


class Renamed(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "best"


@pytest.mark.parametrize(
    ("make", "file"),
    [
        (lambda folder: ModelCheckpoint(folder, filename="best"), "best.ckpt"),
        (lambda folder: ModelCheckpoint(folder, filename="last"), "last.ckpt"),
        (lambda folder: ModelCheckpoint(f"{folder}/../checkpoints/", filename="best", monitor="val/acc"), "best.ckpt"),
        (lambda folder: ModelCheckpoint(folder.parent / "link", filename="best"), "best.ckpt"),
        (lambda folder: ModelCheckpoint(folder.parent, filename="checkpoints/best"), "best.ckpt"),
        (lambda folder: ModelCheckpoint(folder, filename="epoch_{epoch}", save_last=True), "last.ckpt"),
        (lambda folder: ModelCheckpoint(folder, filename="{epoch}", save_last="link"), "last.ckpt"),
        (lambda folder: Renamed(folder, filename="{epoch}", save_last=True), "best.ckpt"),
        (lambda folder: ModelCheckpoint(folder, "step_{step}", auto_insert_metric_name=False), "step_0.ckpt"),
        (lambda folder: ModelCheckpoint(filename="best"), "best.ckpt"),  # without a logger
        (lambda folder: OnExceptionCheckpoint(folder, "last"), "last.ckpt"),
    ],
)
def test_a_callback_that_writes_a_file_of_the_run_is_refused(tmp_path: Path, make: Any, file: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=rf"^callbacks.own0 writes {file} into the run's checkpoints/, .*: give"):
        fit(tmp_path, make(tmp_path / "checkpoints"))
    assert not list(tmp_path.glob("checkpoints/*"))  # before the first step


def test_the_callback_of_a_module_is_named(tmp_path: Path) -> None:
    class Custom(Plain):
        def configure_callbacks(self) -> Any:
            return ModelCheckpoint(tmp_path / "checkpoints", filename="best")

    trainer = trainer_with(tmp_path, Checkpoint(tmp_path), SharedFileCheck(tmp_path, {}), epochs=1)
    with pytest.raises(UserError, match=r"^configure_callbacks: ModelCheckpoint writes best.ckpt into"):
        trainer.fit(Custom(), **loaders())


def test_two_callbacks_with_one_file_are_refused(tmp_path: Path) -> None:
    for one, other in (
        ({"filename": "own"}, {"filename": "own"}),
        ({"save_last": True, "filename": "a"}, {"save_last": True, "filename": "b"}),
        ({"save_last": True, "filename": "a"}, {"filename": "last"}),
        ({"monitor": "val/acc", "filename": "{epoch}"}, {"monitor": "val/loss", "filename": "{epoch}"}),
    ):
        custom = [ModelCheckpoint(tmp_path / "own", **options) for options in (one, other)]
        with pytest.raises(UserError, match=r"^callbacks.own1 writes .*ckpt where callbacks.own0 writes it"):
            fit(tmp_path, *custom)
    ours = {"callbacks.a": Checkpoint(tmp_path), "callbacks.b": Checkpoint(tmp_path, monitor="val/loss", mode="min")}
    with pytest.raises(UserError, match=r"^callbacks.b writes best.ckpt where callbacks.a writes it"):
        SharedFileCheck(tmp_path, ours)


def test_other_files_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    custom = (
        ModelCheckpoint(folder, "own-{epoch}", "val/acc"),
        ModelCheckpoint(tmp_path / "own", "best", save_last=True),
    )
    fit(tmp_path, *custom)
    assert {path.name for path in folder.iterdir()} == {"best.ckpt", "last.ckpt", "own-epoch=0.ckpt"}
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"best.ckpt", "last.ckpt"}


# --- names of parameters ----------------------------------------------------------------------------------------------


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


CHANGES: dict[str, Any] = {
    "prune": lambda module: prune.l1_unstructured(module.layer, "weight", 0.5),
    "weight_norm": lambda module: weight_norm(module.layer),
    "new weight_norm": lambda module: parametrizations.weight_norm(module.layer),
    "spectral_norm": lambda module: spectral_norm(module.layer),
    "parametrization": lambda module: parametrize.register_parametrization(module.layer, "weight", Halved()),
    "another layer": lambda module: setattr(module, "probe", nn.Linear(2, 2)),
    "a layer less": lambda module: setattr(module.layer, "bias", None),
}
EARLY = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")


def train(folder: Path, module: Plain, *callbacks: pl.Callback, epochs: int = 2) -> None:
    check = ParameterNameCheck(module)
    trainer = trainer_with(folder, Checkpoint(folder), *callbacks, check, epochs=epochs)
    trainer.fit(module, **loaders())


def at(hook: str, change: Any, kind: type = pl.Callback, epoch: int = 0) -> Any:
    """Return a class whose hook changes a module once."""

    def act(self: Any, *args: Any, **kwargs: Any) -> None:
        module = self if isinstance(self, Plain) else next(each for each in args if isinstance(each, Plain))
        if not vars(self).get("done") and module.current_epoch == epoch:
            vars(self)["done"] = True
            change(module)

    return type("Changing", (kind,), {hook: act})


@pytest.mark.parametrize(
    ("hook", "change"),
    [*((hook, "another layer") for hook in EARLY), *(("on_fit_start", change) for change in CHANGES)],
)
def test_renaming_before_the_first_step_is_refused(tmp_path: Path, hook: str, change: str) -> None:
    message = (
        r"^a callback, or a hook of the module, adds, removes or renames parameters \(.*\), so no run could .*: do it"
    )
    module = Plain()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    with pytest.raises(UserError, match=message):
        train(tmp_path, module, at(hook, CHANGES[change])())
    assert not list(tmp_path.glob("checkpoints/*"))
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items() if name in before)
    if change != "a layer less":
        with pytest.raises(UserError, match=message):
            train(tmp_path, at(hook, CHANGES[change], Plain)())


@pytest.mark.parametrize(
    ("hook", "change"),
    [*(("on_train_epoch_end", change) for change in CHANGES), ("on_validation_epoch_end", "a layer less")],
)
def test_renaming_later_leaves_the_earlier_checkpoint(tmp_path: Path, hook: str, change: str) -> None:
    with pytest.raises(UserError, match="adds, removes or renames parameters"):
        train(tmp_path, Plain(), at(hook, CHANGES[change], epoch=1)())
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == STEPS
    trainer = trainer_with(tmp_path, Checkpoint(tmp_path), epochs=2)
    trainer.fit(Plain(), **loaders(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert trainer.global_step == 2 * STEPS


@pytest.mark.parametrize("permanent", [True, False])
def test_model_pruning_is_refused(tmp_path: Path, permanent: bool) -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=permanent)
    with pytest.raises(UserError, match=r"^ModelPruning renames the parameters that it prunes and saves no masks, so"):
        train(tmp_path, Plain(), pruning)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_replaced_parameter_must_be_trained(tmp_path: Path) -> None:
    def replace(module: Plain) -> None:
        module.layer = nn.Linear(3, 2)

    train(tmp_path, Plain(), at("setup", replace)(), epochs=1)  # before the optimizer is made
    with pytest.raises(UserError, match=r"^a callback, .* replaces parameters .* \(layer.weight, layer.bias\)"):
        train(tmp_path, Plain(), at("on_fit_start", replace)())


def test_names_made_at_the_beginning_stay(tmp_path: Path) -> None:
    class Normed(Plain):
        def __init__(self) -> None:
            super().__init__()
            parametrizations.weight_norm(self.layer)
            prune.random_unstructured(self.layer, "bias", 1)

    train(tmp_path, Normed())
