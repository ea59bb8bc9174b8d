"""Small things in which a program sees no difference between `lockstep.Trainer` and Lightning's."""

import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer.small import Net, loader, trainer

from lockstep.errors import UserError


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"gradient_clip_val": "a"}, TypeError), ({"max_epochs": -100}, MisconfigurationException)],
)
def test_lightnings_errors_are_of_its_classes(tmp_path: Path, options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        trainer(tmp_path, **options)
    assert isinstance(caught.value, UserError), "and it is one line for a command"


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    made = trainer(tmp_path, max_epochs=1)
    made.fit(Net(), loader())
    assert set(threading.enumerate()) == before


def test_a_checkpoint_is_there_when_it_is_saved_between_methods(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    made.fit(Net(), loader())
    before = set(threading.enumerate())
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


@pytest.mark.parametrize("name", ["DDP", "ddp_spawn", "ddp_notebook_find_unused_parameters_false"])
def test_names_of_ddp(tmp_path: Path, name: str) -> None:
    trainer(tmp_path, strategy=name, max_epochs=1).fit(Net(), loader())
    with pytest.raises(UserError, match=r"this process is alone: call lockstep.launch\(function, devices=2\)"):
        trainer(tmp_path, strategy=name, devices=2)


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

    trainer(tmp_path, val_check_interval=4).fit(Validated(), loader(), loader(shuffle=False))
    assert steps == [4, 10], "not after the last step, which is the twelfth"
