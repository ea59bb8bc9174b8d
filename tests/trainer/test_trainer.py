"""`lockstep.Trainer`: the step for any Lightning project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from small_data import refusal_of
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
)
from trainer.small import BATCH, Data, Net, fit, loader, samples, trainer

import lockstep
from lockstep.checkpoint import io as checkpoint_io
from lockstep.errors import UserError


@pytest.mark.usefixtures("whole_run")
def test_layouts_and_sources_of_data_give_one_hash(tmp_path: Path) -> None:
    exact: dict[str, Any] = {"exact": True, "pieces": 4}
    one = fit(tmp_path, **exact)
    assert fit(tmp_path, strategy="dp", devices=3, **exact) == one
    assert fit(tmp_path, lockstep.DataModule(train=samples()), batch_size=BATCH, **exact) == one
    assert fit(tmp_path, exact=True, batch_size=BATCH, accumulate_grad_batches=4) == one
    assert fit(tmp_path, loader(num_workers=0), loader(shuffle=False), **exact) == one, "with a validation set"
    assert fit(tmp_path, pieces=6, exact=True) != one
    assert fit(tmp_path, seed=1, **exact) != one


def test_a_data_module_is_used_as_lightning_does(tmp_path: Path) -> None:
    class Asks(Net):
        def on_fit_start(self) -> None:
            assert self.trainer.datamodule.classes == ("a", "b", "c")  # type: ignore[attr-defined]

    data = Data()
    one = fit(tmp_path, data, kind=Asks, exact=True, pieces=2)
    assert data.calls == ["prepare_data", "setup fit", "teardown fit"]
    torch.manual_seed(5)  # the split does not depend on the caller's random state
    assert fit(tmp_path, Data(), strategy="dp", devices=2, exact=True) == one


def test_batches_come_as_the_data_set_makes_them(tmp_path: Path) -> None:
    kinds = []

    class Kinds(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kinds.append((batch["x"].dtype, batch["pixels"].dtype, batch["name"][0]))
            return self.net(batch["x"]).square().mean()

    class Dicts:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.ones(8), "pixels": torch.ones(2, dtype=torch.uint8), "name": "a"}

    fit(tmp_path, lockstep.DataModule(train=Dicts()), kind=Kinds, batch_size=BATCH)
    assert set(kinds) == {(torch.float32, torch.uint8, "a")}


class Follows(Net):
    """Has a schedule that follows a metric."""

    def __init__(self, when: Mapping[str, Any]) -> None:
        super().__init__()
        self.when = when

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", **self.when}}


INSIDE = {"interval": "step", "frequency": 2}  # it follows the metric of each validation inside an epoch


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize(
    ("when", "validates"),
    [
        ({}, {}),
        ({}, {"val_check_interval": 2, "check_val_every_n_epoch": None}),
        (INSIDE, {"val_check_interval": 2}),
        # the first epoch has no validation
        ({**INSIDE, "strict": False}, {"val_check_interval": 2, "check_val_every_n_epoch": 2, "max_epochs": 2}),
    ],
)
def test_every_checkpoint_of_lightnings_callback_continues_to_the_same_bits(
    tmp_path: Path, when: dict[str, Any], validates: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"exact": True, "pieces": 4, "max_epochs": 3, **validates}
    folder = tmp_path / "all"
    saves = [
        ModelCheckpoint(folder, "{step}-val", monitor="val_loss", save_top_k=-1),
        ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1),
    ]
    data = lockstep.DataModule(train=samples(), val=samples())
    pl.seed_everything(0, verbose=False)
    module = Follows(when)
    trainer(tmp_path, callbacks=saves, batch_size=BATCH, **options).fit(module, data)
    (optimizer,) = module.optimizers(use_pl_optimizer=False).param_groups  # type: ignore[union-attr]
    assert optimizer["lr"] < 0.2, "the schedule has acted"
    one = lockstep.weights_sha256(module.state_dict())
    files = [*folder.iterdir(), tmp_path / "checkpoints" / "last.ckpt"]
    assert len(files) > 8
    for number, file in enumerate(files):
        module = Follows(when)
        other = trainer(tmp_path / "other", strategy="dp", devices=2 + number % 3, batch_size=BATCH, **options)
        other.fit(module, data, ckpt_path=file)
        assert lockstep.weights_sha256(module.state_dict()) == one, file.name


def test_a_second_fit_of_a_trainer_goes_back_to_a_checkpoint_with_its_grids(tmp_path: Path) -> None:
    """The first fit's last step has changed the sizes of gradients and statistics since the checkpoint."""

    class Grows(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            factor = 2.0**20 if self.trainer.global_step == 11 else 1.0
            return super().training_step((x * factor, y), batch_idx) * factor

    options: dict[str, Any] = {"exact": True, "pieces": 4, "max_epochs": 2}
    save = ModelCheckpoint(tmp_path / "all", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    module, data = Grows(), loader(shuffle=False)
    twice = trainer(tmp_path, callbacks=[save], **options)
    twice.fit(module, data)
    end = lockstep.weights_sha256(module.state_dict())
    with torch.no_grad():
        module.net[0].weight.zero_()  # type: ignore[operator]
    twice.fit(module, data, ckpt_path=tmp_path / "all" / "epoch=0.ckpt")
    assert lockstep.weights_sha256(module.state_dict()) == end
    with pytest.raises(UserError, match=r"gets another module than before: make a lockstep\.Trainer for each"):
        twice.fit(Grows(), data)


@pytest.mark.parametrize("saves_last", [True, False])
def test_a_checkpoint_is_written_before_an_older_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves_last: bool
) -> None:
    """A write that fails is as a kill at that moment. The checkpoint before it is complete."""
    save, calls, folder = checkpoint_io.save, 0, tmp_path / "mine"

    def fails_once(content: dict[str, Any], path: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(28, "No space left on device", str(path))
        save(content, path)

    monkeypatch.setattr(checkpoint_io, "save", fails_once)
    began: list[int] = []

    class Begins(Net):
        def on_train_start(self) -> None:
            began.append(self.trainer.global_step)

    def train() -> None:
        keeps = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last=saves_last)
        trainer(tmp_path, max_epochs=1, callbacks=[keeps], checkpoint_every=1).fit(Begins(), loader(), ckpt_path="last")

    with pytest.raises(OSError, match="No space left"):
        train()
    files = [file for file in folder.glob("step=*.ckpt") if file.exists()]
    assert files
    assert any(checkpoint_io.step_of(file) > 0 for file in files)
    monkeypatch.undo()
    train()
    assert began[0] == 0
    assert began[1] >= 1
    assert (folder / "step=6.ckpt").exists()


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Sums(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


class Two(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


class WithMethods(DDPStrategy):
    pass


# What a config refuses in the same words: test_one_trainer.py.
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"strategy": "ddp", "devices": 2}, "this process is alone: call lockstep.launch(function, devices=2)"),
        ({"strategy": "ddp_spawn", "devices": 2}, "this process is alone: call lockstep.launch(function, devices=2)"),
        ({"num_nodes": 2}, "MPI must start the workers. On each machine: torchrun --nnodes=2"),
        ({"strategy": "deepspeed"}, "must be 'auto', 'ddp', 'dp', 'fsdp' or one of lockstep.strategies"),
        ({"strategy": FSDPStrategy()}, "must be 'auto', 'ddp', 'dp', 'fsdp' or one of lockstep.strategies"),
        ({"strategy": "fsdp", "devices": 2}, "this process is alone: call lockstep.launch(function, devices=2)"),
        ({"accelerator": "mps"}, "must be one of auto, cpu, gpu, cuda"),
        ({"accelerator": "gpu"}, "this machine has no GPU that torch can use"),
        ({"devices": 0}, "Trainer(devices=0): must be greater than or equal to 1 or 'auto'"),
        ({"batch_size": 0}, "Trainer(batch_size=0): must be greater than or equal to 1"),
        ({"pieces": True}, "Trainer(pieces=True): must be a valid integer"),
        ({"callbacks": ModelCheckpoint(save_last="link")}, "would link a file before it is written, and after a kill"),
        ({"seed": -1}, "Trainer(seed=-1): must be greater than or equal to 0"),
        ({"exact": "yes"}, "Trainer(exact='yes'): must be a valid boolean or 'portable'"),
        ({"nonfinite": "hope"}, "must be 'stop' or 'skip'"),
        ({"batch_size": 10, "pieces": 3}, "batch_size=10 can't be cut into 3 equal pieces"),
        ({"strategy": "dp", "devices": 4, "pieces": 2}, "pieces=2 is fewer than 4 devices"),
        ({"max_epoch": 3}, "Trainer(max_epoch=...): there is no such option: use max_epochs"),
        ({"batchsize": 3}, "Trainer(batchsize=...): there is no such option: use batch_size"),
        ({"plugins": [1]}, "Trainer(plugins=[1]) can't be used"),
        ({"val_check_interval": "10 s"}, "Invalid time format"),
        ({"reload_dataloaders_every_n_epochs": 1}, "the training set must stay"),
        ({"precision": "4"}, "4"),
        ({"sync_batchnorm": True}, "sync_batchnorm"),
        (
            {"callbacks": GradientAccumulationScheduler({0: 2})},
            "layout fixes: use accumulate_grad_batches or pieces",
        ),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "takes over the schedule"),
        ({"callbacks": [EarlyStopping("val_loss", patience=-1)]}, "patience=-1: must be at least 0"),
        ({"devices": [1], "accelerator": "auto"}, "use devices=1 in an environment with CUDA_VISIBLE_DEVICES=1"),
        ({"devices": "0,2", "accelerator": "auto"}, "use devices=2 in an environment with CUDA_VISIBLE_DEVICES=0,2"),
        ({"devices": ["a"]}, "must be a number of devices, or a list of their indices"),
        ({"devices": []}, "must be a number of devices, or a list of their indices"),
        ({"devices": "0,1"}, "this process is alone: call lockstep.launch(function, devices=2)"),
        ({"strategy": DDPStrategy(start_method="spawn")}, "a DDPStrategy with start_method=spawn) can't be used"),
        ({"strategy": DDPStrategy(ddp_comm_hook=print)}, "a DDPStrategy with ddp_comm_hook) can't be used"),
        ({"strategy": SingleDeviceStrategy("cpu", checkpoint_io=TorchCheckpointIO())}, "with checkpoint_io) can't be"),
        ({"strategy": DDPStrategy(cluster_environment=LightningEnvironment())}, "with cluster_environment) can't be"),
        ({"strategy": DDPStrategy(process_group_backend="mpi")}, "with process_group_backend=mpi) can't be used"),
        ({"strategy": SingleDeviceStrategy("cuda:1"), "accelerator": "auto"}, "with CUDA_VISIBLE_DEVICES=1"),
        ({"strategy": SingleDeviceStrategy("cuda:1")}, "Trainer(accelerator='cpu') has a strategy on cuda:1: leave"),
        ({"strategy": SingleDeviceStrategy("mps"), "accelerator": "auto"}, "Trainer(accelerator='mps'): must be one"),
        ({"callbacks": {"class_path": "Timer"}}, "callbacks: a dict is no lightning.pytorch.Callback: give an object"),
        ({"callbacks": [Timer]}, "callbacks: a type is no lightning.pytorch.Callback: give an object"),
        ({"strategy": WithMethods()}, "a WithMethods with methods of its own) can't be used"),
        ({"callbacks": [pytorch_lightning.callbacks.GradientAccumulationScheduler({0: 2})]}, "pytorch_lightning, and"),
        ({"callbacks": pytorch_lightning.callbacks.EarlyStopping("val_loss")}, "is of the package pytorch_lightning"),
    ],
)
def test_options_are_refused_in_one_line(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    assert line in refusal_of(trainer, tmp_path, **options)


@pytest.mark.parametrize(
    ("module", "data", "options", "line"),
    [
        (Manual, loader, {}, "Manual: manual optimization can't cut a step into pieces"),
        (Sums, loader, {}, "it must be the mean over the samples"),
        (Two, loader, {}, "configure_optimizers returned several optimizers"),
        (pl.LightningModule, loader, {}, "training_step"),
        (nn.Module, loader, {}, "trainer.fit got a Module: it must be a LightningModule"),
        (Net, lambda: None, {}, "trainer.fit needs data"),
        (Net, Data, {"batch_size": 30}, "Trainer(batch_size=30), but the training loader has batch_size=24"),
        (Net, Data, {"pieces": 5}, "batch_size=24 can't be cut into 5 equal pieces"),
        (Net, lambda: lockstep.DataModule(train=samples()), {}, "the batch size is unknown"),
        (Net, lambda: lockstep.DataModule(val=samples()), {"batch_size": 5}, "there is no train_dataloader"),
        (Net, lambda: lockstep.DataModule(train=Stream()), {}, "a Stream has no __getitem__ and __len__"),
        (Net, lambda: {"a": loader()}, {}, "it must be one torch DataLoader"),
    ],
)
def test_a_fit_is_refused_in_one_line(
    tmp_path: Path, module: Any, data: Any, options: dict[str, Any], line: str
) -> None:
    assert line in refusal_of(lambda: trainer(tmp_path, **options).fit(module(), data()))


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    trainer(tmp_path, exact=True, pieces=4).fit(Net(), loader())
    last = tmp_path / "checkpoints" / "last.ckpt"

    class Larger(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    def refused(line: str, module: Any, data: Any, **options: Any) -> None:
        assert line in refusal_of(trainer(tmp_path / "other", **options).fit, module, data, ckpt_path=last)

    refused("batch_size=10, but", Net(), loader(batch_size=10))
    refused("training samples, and there are 30", Net(), DataLoader(Subset(samples(), range(30)), BATCH, shuffle=True))
    refused("has the weights of another network", Larger(), loader())
    refused("max_epochs=1", Net(), loader(), max_epochs=1)
    refused("saved with pieces=4: give", Net(), loader(), exact=True, pieces=6)
    plain = pl.Trainer(default_root_dir=tmp_path / "plain", enable_checkpointing=False, max_epochs=1, logger=False)
    plain.fit(Net(), loader())
    last = tmp_path / "plain.ckpt"
    plain.save_checkpoint(last)
    refused("no lockstep.Trainer has saved it", Net(), loader())
    assert trainer(tmp_path).test(Net(), loader(shuffle=False), ckpt_path=last, verbose=False)
