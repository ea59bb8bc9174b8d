"""When checkpoints are written, and which is the best."""

import math
import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
from plain import STEPS, Loader, Plain, loaders, step_of, trainer_with

from lockstep.callbacks import Checkpoint
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.callback import ResumeState
from lockstep.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_last_and_best(tmp_path: Path) -> None:
    callback, state = Checkpoint(tmp_path), ResumeState({"config": {"lr": 0.1}, "fingerprint": "f"}, {}, STEPS)
    trainer_with(tmp_path, callback, state, epochs=3).fit(Plain(), **loaders())
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 3 * STEPS
    assert step_of(callback.best_path) == 2 * STEPS  # the scores are 0.5, 0.75, 0.25
    assert callback.best_score == 0.75
    content = checkpoint_io.load(tmp_path / "checkpoints" / "last.ckpt")
    metrics = {"val/acc": 0.25, "val/loss": 0.75}
    assert content["lockstep"] == {"config": {"lr": 0.1}, "fingerprint": "f", "metrics": metrics}
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["best.ckpt", "last.ckpt"]


def test_a_smaller_loss_is_better_with_mode_min_and_nan_never(tmp_path: Path) -> None:
    class Diverging(Plain):
        scores = (math.nan, 0.5, math.nan)

    callback = Checkpoint(tmp_path / "run", monitor="val/loss", mode="min")
    trainer_with(tmp_path, callback, epochs=3).fit(Diverging(), **loaders())
    assert callback.best_score == 0.5
    assert step_of(callback.best_path) == 2 * STEPS
    assert callback.best_path == tmp_path / "run" / "checkpoints" / "best.ckpt"


def test_every_so_many_steps_and_validation_inside_an_epoch(tmp_path: Path) -> None:
    saves: list[int] = []

    class Watched(Checkpoint):
        def save(self, trainer: pl.Trainer) -> None:
            saves.append(trainer.global_step)
            super().save(trainer)

    callback = Watched(tmp_path, every=4)
    trainer_with(tmp_path, callback, epochs=2, val_check_interval=3).fit(Plain(), **loaders())
    # 3: the first score is the best; 4, 8, 12: every four; 6, 12: epochs; 9: a better score.
    assert saves == [3, 4, 6, 8, 9, 12]
    assert step_of(callback.best_path) == 12


def test_the_best_are_weights_that_were_validated(tmp_path: Path) -> None:
    """Not those of the epoch's end that came after it, under the score that Lightning still shows."""
    callback = Checkpoint(tmp_path)
    options = {"val_check_interval": 5, "check_val_every_n_epoch": None}
    trainer_with(tmp_path, callback, epochs=2, **options).fit(Plain(), **loaders())
    assert callback.best_score == 0.75  # at step 10; epochs end at 6 and 12
    assert step_of(callback.best_path) == 10


def test_a_monitor_that_nothing_logs_is_refused_with_what_is_logged(tmp_path: Path) -> None:
    callback = Checkpoint(tmp_path, monitor="val/accuracy")
    with pytest.raises(UserError, match=r"val/accuracy: nothing logs it; logged: .*val/acc, val/loss"):
        trainer_with(tmp_path, callback).fit(Plain(), **loaders())
    with pytest.raises(UserError, match="must be max or min"):
        Checkpoint(tmp_path, mode="best")


def test_without_validation_there_is_a_last_and_no_best(tmp_path: Path) -> None:
    callback = Checkpoint(tmp_path)
    trainer_with(tmp_path, callback).fit(Plain(), train_dataloaders=Loader())
    assert callback.best_path is None
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == STEPS


@pytest.mark.parametrize("killed", ["later", "before the best had its name", "and the best was removed"])
def test_the_best_survives_a_resume(tmp_path: Path, killed: str) -> None:
    epochs = 3 if killed == "later" else 2  # after epoch 2, the best is the last
    trainer_with(tmp_path, Checkpoint(tmp_path), epochs=epochs).fit(Plain(), **loaders())
    last, best = (tmp_path / "checkpoints" / name for name in ("last.ckpt", "best.ckpt"))
    if killed != "later":
        best.unlink()
    if killed == "and the best was removed":
        trainer_with(tmp_path, Checkpoint(tmp_path), epochs=3).fit(Plain(), **loaders(), ckpt_path=str(last))
        best.unlink()
    callback = Checkpoint(tmp_path)
    trainer_with(tmp_path, callback, epochs=4).fit(Plain(), **loaders(), ckpt_path=str(last))
    if killed == "and the best was removed":  # epoch 4 scores 0.5, the best of those that are there
        assert (callback.best_score, step_of(callback.best_path)) == (0.5, 4 * STEPS)
    else:
        assert (callback.best_score, step_of(callback.best_path)) == (0.75, 2 * STEPS)
