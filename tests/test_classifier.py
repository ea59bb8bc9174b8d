"""An ImageClassifier in a Trainer: what it logs, over epochs, resumes and stand-ins; what its checkpoint holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from small_models import mnist_cnn, task
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.callbacks import DummyBatchOnEmptyRank
from project.models import ImageClassifier, MnistCNN


def batches(count: int, n: int = 6, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [n] * (count - 1) + [n // 2]
    return [
        (torch.randn(s, 1, 12, 12, generator=generator), torch.randint(0, 3, (s,), generator=generator)) for s in sizes
    ]


def loader(items: list[tuple[Tensor, Tensor]]) -> DataLoader:
    return DataLoader(items, batch_size=None)  # type: ignore[arg-type]


def trainer(folder: Path, **changes: Any) -> Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    return Trainer(**quiet, accelerator="cpu", devices=1, default_root_dir=folder, **changes)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_evaluation_in_a_trainer(tmp_path: Path) -> None:
    model = mnist_cnn(label_smoothing=0.2)
    data = batches(4)
    logged = trainer(tmp_path).test(model, loader(data), verbose=False)[0]
    again = trainer(tmp_path).test(model, loader(data[::-1]), verbose=False)[0]
    assert again == logged
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        logits = model.eval()(x)
    assert logged["test/count"] == len(y) == 21
    assert logged["test/correct"] == int((logits.argmax(1) == y).sum())
    assert logged["test/acc"] == logged["test/correct"] / 21
    assert logged["test/loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-6)
    assert model.confusion is not None
    assert int(model.confusion.sum()) == 21


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("without_a_sample", [False, True])
def test_a_stand_in_is_forgotten(tmp_path: Path, without_a_sample: bool) -> None:
    class Data(LightningDataModule):
        def test_dataloader(self) -> Any:
            return loader(batches(1))

        def stand_in(self, split: str) -> bool:
            assert split == "test"
            return without_a_sample

    class Users(MnistCNN):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            super().test_step(batch, batch_idx)
            self.log("users_own", 7.0)

    run = trainer(tmp_path, callbacks=[DummyBatchOnEmptyRank()])
    run.test(Users(**task()), datamodule=Data(), verbose=False)
    assert run.callback_metrics["test/count"] == (0 if without_a_sample else 3)
    assert math.isnan(run.callback_metrics["test/loss"]) == without_a_sample
    own = float(run.callback_metrics["users_own"])  # nan, but there: the other ranks sum it with theirs
    assert math.isnan(own) if without_a_sample else own == 7.0


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_train_totals_are_of_whole_epochs_across_a_resume(tmp_path: Path) -> None:
    data = batches(4)

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "cut.ckpt")

    def fit(items: list[tuple[Tensor, Tensor]], max_epochs: int, *callbacks: Callback, **options: Any) -> Trainer:
        torch.manual_seed(1)
        run = trainer(tmp_path, max_epochs=max_epochs, callbacks=list(callbacks))
        run.fit(mnist_cnn(), loader(items), weights_only=True, **options)
        return run

    whole = fit(data, 2, Save())  # within the second epoch
    # Lightning's own loop restarts its loader at the front; ours would not, so this one is turned to where it was.
    resumed = fit(data[2:] + data[:2], 2, ckpt_path=tmp_path / "cut.ckpt")
    assert resumed.global_step == whole.global_step == 8
    for name in ("train/loss", "train/acc"):
        assert float(resumed.callback_metrics[name]) == pytest.approx(float(whole.callback_metrics[name]), rel=1e-12)
    one = fit(data[:3], 1)
    assert isinstance(one.lightning_module, ImageClassifier)
    loss, correct, samples = one.lightning_module.train_totals(reset=True).tolist()
    assert samples == 18 == sum(len(y) for _, y in data[:3])
    assert (loss / samples, correct / samples) == pytest.approx(
        (float(one.callback_metrics["train/loss"]), float(one.callback_metrics["train/acc"]))
    )
    assert not one.lightning_module.train_totals(reset=False).any()


def test_a_checkpoint_is_plain_and_rebuilds_its_model(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    run.fit(model := mnist_cnn(dropout=0.25), loader(batches(2)))
    run.save_checkpoint(tmp_path / "plain.ckpt")
    loaded: Any = MnistCNN.load_from_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    assert loaded.net.dropout.p == 0.25
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


class Squared(MnistCNN):
    """A user's own loss, one method."""

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits - nn.functional.one_hot(y, self.num_classes)).square().sum(1)


def test_another_loss_is_one_method() -> None:
    model, batch = Squared(**task()), batches(1)[0]
    loss = model.training_step(batch, 0).detach()
    model.validation_step(batch, 0)
    assert model.evaluation.compute()[0]["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_a_resumed_run_follows_its_own_config() -> None:
    """lr, momentum and so on are the new ones, what the optimizer has gathered is kept."""

    def made(lr: float, momentum: float) -> MnistCNN:
        options = {"lr": lr, "optimizer": {"name": "sgd", "momentum": momentum, "weight_decay": 0.1}}
        return MnistCNN(**(task() | options | {"scheduler": {"name": "cosine", "final": 0.5}, "total_steps": 8}))

    def saved(model: MnistCNN) -> dict[str, Any]:
        setup = model.configure_optimizers()
        for _ in range(3):
            sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            setup["optimizer"].step()
            setup["lr_scheduler"]["scheduler"].step()
        parts = [setup["optimizer"], setup["lr_scheduler"]["scheduler"]]
        return dict(zip(("optimizer_states", "lr_schedulers"), ([part.state_dict()] for part in parts), strict=True))

    same, new = saved(made(0.4, 0.9)), saved(made(0.1, 0.5))
    group, other = (found["optimizer_states"][0]["param_groups"][0] for found in (same, new))
    untouched = dict(group)
    made(0.4, 0.9).on_load_checkpoint(same)
    assert group == untouched
    model = made(0.1, 0.5)
    model.on_load_checkpoint(same)
    assert group == other != untouched
    assert same["lr_schedulers"][0]["base_lrs"] == [0.1, 0.1]
    assert same["optimizer_states"][0]["state"]
