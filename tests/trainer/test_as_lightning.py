"""Small things in which a program sees no difference between `lockstep.Trainer` and Lightning's."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from trainer.small import Data, Net, loader, trainer

from lockstep.checkpoint import io as checkpoint_io
from lockstep.errors import UserError


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"gradient_clip_val": "a"}, TypeError), ({"max_epochs": -100}, MisconfigurationException)],
)
def test_lightnings_errors_are_of_its_classes(tmp_path: Path, options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        trainer(tmp_path, **options)
    assert isinstance(caught.value, UserError), "and it is one line for a command"


def test_a_checkpoint_is_there_when_it_is_saved_between_methods_and_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    made = trainer(tmp_path, max_epochs=1)
    made.fit(Net(), loader())
    assert set(threading.enumerate()) == before
    made.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists()
    made.strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    assert set(threading.enumerate()) == before


def test_the_best_is_that_of_the_first_callback(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=0)])
    made.fit(Net(), loader(), loader(shuffle=False))
    with pytest.raises(UserError, match=r"ckpt_path='best'.*no checkpoint has been saved"):
        made.validate(dataloaders=loader(shuffle=False), ckpt_path="best")
    made = trainer(tmp_path / "saves", callbacks=[ModelCheckpoint(monitor="val_loss")])
    made.fit(Net(), loader(), loader(shuffle=False))
    with pytest.warns(UserWarning, match="got no module, so the best checkpoint of the fit is loaded"):
        made.validate(dataloaders=loader(shuffle=False), verbose=False)
    assert made.ckpt_path == made.checkpoint_callback.best_model_path  # type: ignore[union-attr]


def test_a_checkpoint_is_saved_without_a_fit_and_after_an_error(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 3:
                raise RuntimeError("of a user")
            return super().training_step(batch, batch_idx)

    class Stops(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop = self.trainer.global_step == 3
            return super().training_step(batch, batch_idx)

    made = trainer(tmp_path, logger=False)
    made.strategy.connect(Net())
    made.save_checkpoint(tmp_path / "none.ckpt")
    for number, kind in enumerate((Fails, Stops)):
        made = trainer(tmp_path, enable_checkpointing=False)
        with pytest.raises(RuntimeError, match="of a user") if kind is Fails else nullcontext():
            made.fit(kind(), loader())
        made.save_checkpoint(tmp_path / f"{number}.ckpt")
        assert checkpoint_io.load(tmp_path / f"{number}.ckpt")["global_step"] == 3 + number
    Net.load_from_checkpoint(tmp_path / "none.ckpt")


def test_variables_of_the_environment_are_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_DEVICES", "2")
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "ddp")
    with pytest.raises(UserError, match=r"devices=2, strategy='ddp'.*: this process is alone"):
        trainer(tmp_path)
    assert trainer(tmp_path, devices=1).num_devices == 1


def test_validations_come_when_lightning_has_them(tmp_path: Path) -> None:
    steps = []

    class Validated(Net):
        def on_validation_start(self) -> None:
            steps.append(self.global_step)

    trainer(tmp_path, val_check_interval=4, num_sanity_val_steps=0).fit(Validated(), loader(), loader(shuffle=False))
    assert steps == [4, 10], "not after the last step, which is the twelfth"


def test_the_sanity_check_is_lightnings(tmp_path: Path) -> None:
    calls = []

    class Checked(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            stage: Any = self.trainer.state.stage
            calls.append((batch_idx, stage.value))
            super().validation_step(batch, batch_idx)

    made = trainer(tmp_path, max_epochs=1, limit_val_batches=3)
    made.fit(Checked(), loader(), loader(shuffle=False))
    first = [(0, "sanity_check"), (1, "sanity_check")]
    assert calls == [*first, (0, "validate"), (1, "validate"), (2, "validate")]
    with pytest.raises(UserError, match="nope"):
        trainer(tmp_path, callbacks=[EarlyStopping("val_nope")]).fit(Checked(), loader(), loader(shuffle=False))
    assert calls[5:] == first, "before the first step"


def test_what_can_not_be_as_with_lightning_is_refused(tmp_path: Path) -> None:
    class Fetches(Net):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return super().training_step(next(dataloader_iter)[0], 0)

    with pytest.raises(UserError, match="Fetches: its training_step takes dataloader_iter"):
        trainer(tmp_path).fit(Fetches(), loader())
    with pytest.raises(UserError, match="collate_fn returned None for a batch"):
        trainer(tmp_path).fit(Net(), loader(collate_fn=lambda samples: None))
    with pytest.raises(UserError, match="BatchSizeFinder would change batch_size"):
        Tuner(trainer(tmp_path)).scale_batch_size(Net(), loader())
    module: Any = Net()
    module.train_dataloader = None
    with pytest.raises(UserError, match=r"trainer.fit needs data"):
        trainer(tmp_path).fit(module)


def test_a_loader_that_is_none_is_none(tmp_path: Path) -> None:
    module: Any = Net()
    module.train_dataloader, module.val_dataloader = loader, None
    made = trainer(tmp_path, max_epochs=1)
    made.fit(module)
    assert made.global_step == 6


def test_overfit_batches_say_that_nothing_is_shuffled(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="overfit_batches: samples of train come in the order of the data set"):
        trainer(tmp_path, max_epochs=1, overfit_batches=1).fit(Net(), loader(), loader(shuffle=False))


def test_setup_and_loaders_read_the_state(tmp_path: Path) -> None:
    class Reads(Data):
        def setup(self, stage: str) -> None:
            kind: Any = stage
            assert kind.value == self.trainer.state.fn  # type: ignore[union-attr]
            super().setup(stage)

        def train_dataloader(self) -> Any:
            assert self.trainer.training  # type: ignore[union-attr]
            return super().train_dataloader()

        def test_dataloader(self) -> Any:
            assert self.trainer.testing  # type: ignore[union-attr]
            return loader(shuffle=False)

    made = trainer(tmp_path, max_epochs=1)
    made.fit(Net(), datamodule=Reads())
    assert "mean_x" in made.test(datamodule=Reads(), verbose=False)[0]
