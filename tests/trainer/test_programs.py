"""`lockstep.Trainer`: what programs for Lightning write in other ways, in arguments and in data modules."""

import inspect
import logging
import os
import pickle
import re
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, LearningRateMonitor, Timer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from omegaconf import OmegaConf
from small_data import refusal_of
from torch.utils.data import DataLoader
from trainer.small import BATCH, QUIET, Data, Net, fit, loader, samples, trainer

import lockstep
from lockstep.errors import UserError
from lockstep.trainer.data import WatchedSize, watched
from lockstep.trainer.parts import OneOptimizerCheck


@pytest.fixture(autouse=True)
def global_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


@cache
def plain(folder: Path) -> str:
    return fit(folder / "plain", exact=True, pieces=2, max_epochs=1)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp_find_unused_parameters_true"},
        {"strategy": "ddp_find_unused_parameters_false"},
        {"strategy": "DDP"},
        {"strategy": "ddp_spawn"},
        {"strategy": "ddp_notebook_find_unused_parameters_false"},
        {"strategy": "single_device"},
        {"strategy": DDPStrategy(find_unused_parameters=True, static_graph=False)},
        {"strategy": DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=9))},
        {"strategy": SingleDeviceStrategy("cpu")},
        {"strategy": SingleDeviceStrategy("cpu"), "accelerator": "auto"},
        {"devices": [0]},
        {"devices": (0,)},
        {"devices": OmegaConf.create([0])},
        {"devices": "1"},
        {"devices": "0,"},
        {"accelerator": CPUAccelerator()},
        {"deterministic": False},
        {"deterministic": "warn"},
        {"callbacks": (Timer(),)},
        {"callbacks": OmegaConf.create([Timer()], flags={"allow_objects": True})},
        {"callbacks": OmegaConf.create([], flags={"allow_objects": True})},
        {"num_sanity_val_steps": None, "plugins": None, "barebones": False, "use_distributed_sampler": True},
    ],
    ids=lambda options: re.sub(r" object at 0x\w+", "", str(options)),  # the same in each worker of pytest
)
def test_spellings_of_lightning_are_one_device(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = plain(tmp_path.parent)
    assert fit(tmp_path, exact=True, pieces=2, max_epochs=1, **options) == expected


class OfOtherPackage(pytorch_lightning.LightningModule):
    pass


class DataOfOtherPackage(pytorch_lightning.LightningDataModule):
    pass


class OfLightning1(Net):
    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int = 0) -> Any:
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "data", "line"),
    [
        (OfOtherPackage, loader, "trainer.fit: the module OfOtherPackage is of the package pytorch_lightning, and"),
        (
            Net,
            DataOfOtherPackage,
            "trainer.fit: the data module DataOfOtherPackage is of the package pytorch_lightning",
        ),
        (OfLightning1, loader, "its training_step takes optimizer_idx, which is of Lightning 1"),
    ],
)
def test_what_is_of_another_lightning_is_named(tmp_path: Path, module: Any, data: Any, line: str) -> None:
    assert line in refusal_of(trainer(tmp_path).fit, module(), data())


@pytest.mark.parametrize("name", ["training_step", "configure_optimizers"])
def test_a_module_without_what_a_fit_calls_is_refused(tmp_path: Path, name: str) -> None:
    module = Net()
    setattr(module, name, None)
    with pytest.raises(UserError, match=f"Net.{name} is None: it must be a method"):
        trainer(tmp_path).fit(module, loader())


def test_a_compiled_module_is_refused(tmp_path: Path) -> None:
    module: Any = torch.compile(Net(), backend="eager")
    for method in (trainer(tmp_path).fit, trainer(tmp_path).test):
        with pytest.raises(UserError, match=f"trainer.{method.__name__} got a compiled module: compile the network"):
            method(module, loader())


def test_a_validation_that_has_no_data_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Net.validation_step is not called: there is no val_dataloader"):
        trainer(tmp_path, max_steps=1).fit(Net(), loader())
    with warnings.catch_warnings(record=True) as caught:
        trainer(tmp_path, max_steps=1).fit(Net(), loader(), loader(shuffle=False))
    assert not any("is not called" in str(each.message) for each in caught)


def test_the_signature_has_lightnings_options() -> None:
    """LightningCLI makes its options of it."""
    names = inspect.signature(lockstep.Trainer).parameters
    lightnings = inspect.signature(pl.Trainer).parameters
    assert set(lightnings) - set(names) == {"model_registry"}
    assert {"pieces", "exact", "batch_size", "seed", "checkpoint_every"} <= names.keys()
    assert not [each for each in names.values() if each.kind is each.VAR_KEYWORD]
    assert lockstep.Trainer.__init__.__annotations__["max_epochs"] == lightnings["max_epochs"].annotation

    class Mine(lockstep.Trainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

    assert Mine(**QUIET).max_epochs == 2
    defaults = {name: each.default for name, each in names.items() if each.default is not each.empty}
    assert lockstep.Trainer(**{**defaults, **QUIET}).max_epochs == 2, "the command line gives them all"
    positional: Any = lockstep.Trainer
    assert positional("cpu", "auto", 1, logger=False, max_epochs=3).max_epochs == 3


def test_hydra_makes_a_trainer_with_callbacks(tmp_path: Path) -> None:
    from hydra.utils import instantiate

    config = {
        "_target_": "lockstep.Trainer",
        "default_root_dir": str(tmp_path),
        "callbacks": [{"_target_": "lightning.pytorch.callbacks.Timer"}],
        "logger": [{"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(tmp_path)}],
        "accelerator": "cpu",
        "devices": [0],
    }
    made = instantiate(OmegaConf.create(config))
    assert any(isinstance(each, Timer) for each in made.callbacks)
    assert len(made.loggers) == 1


class Order(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net[0].reset_parameters()  # type: ignore[operator]


def weights(folder: Path, data: Any = None, **options: Any) -> str:
    torch.manual_seed(0)
    module = Order()
    torch.manual_seed(7)
    trainer(folder, max_epochs=1, exact=True, pieces=2, **options).fit(module, data or loader())
    return lockstep.weights_sha256(module.state_dict())


def test_seed_everything_is_the_default_of_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order and dropout follow it, and a random_split in `setup`."""
    monkeypatch.delenv("PL_GLOBAL_SEED")
    for data in (loader, Data):
        zero = weights(tmp_path, data())
        assert weights(tmp_path, data(), seed=0) == zero
        three = weights(tmp_path, data(), seed=3)
        assert three != zero
        assert "PL_GLOBAL_SEED" not in os.environ
        pl.seed_everything(3, verbose=False)
        assert weights(tmp_path, data()) == three
        assert weights(tmp_path, data(), seed=0) == zero
        assert os.environ["PL_GLOBAL_SEED"] == "3"
        del os.environ["PL_GLOBAL_SEED"]


def test_exact_with_no_pieces_logs_what_it_means(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = "the same bits on layouts with the same number of pieces, here 1"
    logging.getLogger("lightning.pytorch").propagate = True
    for options, logged in (({"exact": True}, True), ({"exact": True, "pieces": 1}, False), ({}, False)):
        caplog.clear()
        made = trainer(tmp_path, max_epochs=1, **options)
        with caplog.at_level(logging.INFO, "lightning.pytorch"):
            made.fit(Net(), loader())
        assert (line in caplog.text) == logged


class Split(Data):
    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size


class InSetup(Split):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.options["batch_size"] = self.batch_size // self.trainer.world_size  # type: ignore[union-attr]


class InLoader(Split):
    def train_dataloader(self) -> Any:
        size = int(24 / self.trainer.num_devices)  # type: ignore[union-attr]
        return DataLoader(self.train, batch_size=max(1, size))


class PerDevice(Split):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        trainer: Any = self.trainer
        self.batch_size_per_device = self.hparams["batch_size"] // (trainer.num_nodes * trainer.num_devices)

    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.batch_size_per_device)


class OfEnvironment(Split):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.batch_size // torch.distributed.get_world_size())


class Multiplied(Split):
    """Uses the number for other things; a control."""

    def train_dataloader(self) -> Any:
        trainer: Any = self.trainer
        assert self.batch_size % trainer.world_size == 0
        return DataLoader(self.train, batch_size=24, num_workers=2 // trainer.world_size)


@pytest.mark.usefixtures("processes")
def test_a_batch_size_that_is_divided_by_the_devices_counts_all_of_them_or_is_refused(tmp_path: Path) -> None:
    """It counts them if the quotient itself is the loader's batch size. Else it might be something else."""

    def fits(data: type[Split], **options: Any) -> str:
        return fit(tmp_path, data(), exact=True, pieces=2, **options)

    def on_two(data: type[Split], **options: Any) -> str:
        return lockstep.launch(lambda: fits(data, **options), devices=2)

    whole = fits(Multiplied)
    assert {on_two(data) for data in (Multiplied, PerDevice)} == {whole} == {fits(InLoader)}
    assert on_two(InSetup) == fits(InSetup) == fits(InSetup, strategy="dp", devices=2), "it shuffles"
    for data in (InLoader, OfEnvironment):
        with pytest.raises(UserError, match=r"batch_size=12, which is .*24.* divided by .*Trainer\(batch_size=24\)"):
            on_two(data)
        assert on_two(data, batch_size=24) == whole, "a multiple of the loader's"
    assert on_two(PerDevice, batch_size=12) != whole
    with pytest.raises(UserError, match=r"batch_size=30.*has batch_size=24: give the same, or a multiple"):
        fits(Multiplied, batch_size=30)


def test_a_watched_number_is_a_number() -> None:
    records: list[Any] = []
    size = watched(2, records)
    assert (8 // size, 9 / size, divmod(9, size), 9 % size, size // 2, size + 1) == (4, 4.5, (4, 1), 1, 1, 3)
    assert records == [(9, 4.5), (9, 4)]
    assert (8 // size // size).whole == 8
    assert isinstance(size * 2, WatchedSize)
    assert size * 0.5 == 1.0
    assert pickle.loads(pickle.dumps(size)) == 2
    assert type(pickle.loads(pickle.dumps(size))) is int
    assert [0, 1, 2][size] == 2
    assert f"{size}" == "2"


class Reads(Net):
    """Reads loaders of the trainer and its data module in hooks, as some projects do."""

    lengths: tuple[int, ...] = ()

    def on_train_epoch_start(self) -> None:
        made: Any = self.trainer.train_dataloader
        assert made.batch_size == BATCH
        assert len(made) == self.trainer.num_training_batches
        assert not hasattr(made.dataset, "micro_batches")

    def on_validation_end(self) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        x, _ = next(iter(data.test_dataloader()))
        sizes = len(data.train_dataloader().dataset), len(self.trainer.val_dataloaders)  # type: ignore[arg-type]
        self.lengths = len(x), *sizes


class WithTest(Data):
    def test_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=5)


def test_hooks_read_the_users_loaders(tmp_path: Path) -> None:
    data, module = WithTest(), Reads()
    trainer(tmp_path, pieces=2).fit(module, data)
    assert module.lengths == (5, 102, 5)


def test_a_collate_fn_of_the_data_set_that_its_loader_does_not_use_is_not_used(tmp_path: Path) -> None:
    class Collates(torch.utils.data.TensorDataset):
        def collate_fn(self, items: list[Any]) -> Any:
            raise AssertionError("the loader does not use it")

    data = Collates(*samples().tensors)
    one = fit(tmp_path, loader(), exact=True, pieces=2)
    assert fit(tmp_path, DataLoader(data, BATCH, True), exact=True, pieces=2) == one
    with pytest.raises(AssertionError, match="the loader does not use it"):
        fit(tmp_path, DataLoader(data, BATCH, True, collate_fn=data.collate_fn))


def test_lightnings_callbacks_are_taken_from_lightning(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=[Timer()], max_epochs=1)
    assert issubclass(LearningRateMonitor, pl.Callback)


class NamesByStage(Net):
    """Names its metrics by Lightning's stage, which is another one in the check before the first step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        stage: Any = self.trainer.state.stage
        name = "val" if stage == "validate" else stage.value
        self.log(f"{name}_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


def test_a_monitored_metric_may_have_the_name_of_the_stage(tmp_path: Path) -> None:
    stops = EarlyStopping("val_loss", patience=0, min_delta=99.0)
    made = trainer(tmp_path, callbacks=[stops], max_epochs=5)
    made.fit(NamesByStage(), loader(), loader(shuffle=False))
    assert (made.current_epoch, stops.wait_count) == (2, 1)
    with pytest.raises(UserError, match="monitor=val_other: nothing logs it"):
        trainer(tmp_path, callbacks=[EarlyStopping("val_other")]).fit(Net(), loader(), loader(shuffle=False))
    too_short = trainer(tmp_path, callbacks=[EarlyStopping("val_loss")], max_steps=1)
    with pytest.raises(UserError, match="monitor=val_loss: no validation has run by step 1: validate earlier"):
        too_short.fit(Net(), loader(), loader(shuffle=False))


class WithRate(Net):
    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class FindsAtEpochs(LearningRateFinder):
    """Looks for a learning rate before epochs 0 and 2, as Lightning's page of this callback shows."""

    def on_fit_start(self, *args: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch in (0, 2):
            self.lr_find(trainer, pl_module)


def test_a_search_for_a_learning_rate_at_an_epochs_start_leaves_no_trace(tmp_path: Path) -> None:
    """It saves a checkpoint, trains, and loads the checkpoint, all in one hook."""
    options: dict[str, Any] = {"exact": True, "pieces": 2, "max_epochs": 4}
    plain = fit(tmp_path, kind=WithRate, **options)
    finder = FindsAtEpochs(num_training_steps=12, early_stop_threshold=None, update_attr=False)
    assert fit(tmp_path, kind=WithRate, callbacks=[finder], **options) == plain
    assert finder.optimal_lr is not None
    assert len(finder.optimal_lr.results["lr"]) == 12
    assert not list(tmp_path.rglob(".lr_find*"))
    finder = FindsAtEpochs(num_training_steps=24, early_stop_threshold=None)
    assert fit(tmp_path, kind=WithRate, callbacks=[finder], **options) != plain, "the rate that was found is used"


class Prints(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.print(f"step {batch_idx}")
        return super().training_step(batch, batch_idx)


class Bar(pl.callbacks.ProgressBar):
    is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        print("bar", *args, **kwargs)


@pytest.mark.parametrize("bar", [True, False])
def test_the_trial_of_the_first_step_prints_nothing(tmp_path: Path, bar: bool, capsys: Any) -> None:
    options: dict[str, Any] = {"callbacks": [Bar()], "enable_progress_bar": True} if bar else {}
    trainer(tmp_path, pieces=2, max_steps=2, **options).fit(Prints(), loader())
    lines = [line for line in capsys.readouterr().out.splitlines() if "step " in line and "samples" not in line]
    assert lines == [f"{'bar ' * bar}step {step}" for step in (0, 0, 1, 1)]


def test_ranks_do_not_look_for_a_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would follow the loss of its own samples. One device and dp find the same rate."""
    rates = []
    layouts: list[dict[str, Any]] = [{}, {"strategy": "dp", "devices": 2}]
    for layout in layouts:
        torch.manual_seed(0)
        module, finder = WithRate(), LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
        options: dict[str, Any] = {"callbacks": [finder], "enable_checkpointing": True, **layout}
        trainer(tmp_path, pieces=2, exact=True, max_epochs=4, **options).fit(module, loader())
        rates.append(module.lr)
    assert rates[0] == rates[1] != 0.1

    trains = trainer(tmp_path, callbacks=[LearningRateFinder(num_training_steps=12)])
    monkeypatch.setattr(type(trains), "world_size", 2)
    with pytest.raises(UserError, match="LearningRateFinder follows the loss of one rank's samples, so 2 ranks would"):
        OneOptimizerCheck().setup(trains, WithRate(), "fit")
