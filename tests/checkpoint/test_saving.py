"""When checkpoints are written, and which is the best."""

import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from plain import STEPS, Loader, Plain, loaders, step_of, trainer_with

from lockstep.callbacks import Checkpoint
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.callback import ResumeState
from lockstep.checkpoint.record import FORMAT
from lockstep.errors import UserError


def test_last_and_best(tmp_path: Path) -> None:
    record = {"format": FORMAT, "config": {"lr": 0.1}, "fingerprint": "f"}
    callback, state = Checkpoint(tmp_path), ResumeState(record, {}, STEPS)
    trainer_with(tmp_path, callback, state, epochs=3).fit(Plain(), **loaders())
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 3 * STEPS
    assert step_of(callback.best_path) == 2 * STEPS  # the scores are 0.5, 0.75, 0.25
    assert callback.best_score == 0.75
    content = checkpoint_io.load(tmp_path / "checkpoints" / "last.ckpt")
    metrics = {"val/acc": 0.25, "val/loss": 0.75}
    assert content["lockstep"] == {**record, "metrics": metrics}
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["best.ckpt", "last.ckpt"]


def test_a_smaller_loss_is_better_with_mode_min_and_nan_never(tmp_path: Path) -> None:
    class Diverging(Plain):
        scores = (math.nan, 0.5, math.nan)

    callback = Checkpoint(tmp_path / "run", monitor="val/loss", mode="min")
    trainer_with(tmp_path, callback, epochs=3).fit(Diverging(), **loaders())
    assert callback.best_score == 0.5
    assert step_of(callback.best_path) == 2 * STEPS
    assert callback.best_path == tmp_path / "run" / "checkpoints" / "best.ckpt"


@pytest.mark.parametrize(("mode", "expected"), [("max", [1, 1, 1, 0, 0, 0, 1]), ("min", [1, 0, 0, 1, 0, 1, 0])])
def test_which_scores_are_better(tmp_path: Path, mode: str, expected: list[int]) -> None:
    """An equal one is. None: the rank has not logged the metric."""
    callback = Checkpoint(tmp_path, monitor="x", mode=mode)
    better: list[int] = []
    for score in (0.5, 0.75, 0.75, 0.25, None, 0.25, 1.0):
        strategy = SimpleNamespace(broadcast=lambda value: value)
        metrics = {} if score is None else {"x": score}
        trainer: Any = SimpleNamespace(callback_metrics=metrics, strategy=strategy, global_step=len(better))
        better.append(int(callback._improved(trainer)))
    assert better == expected
    assert callback.best_score == (1.0 if mode == "max" else 0.25)


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


def test_the_sanity_check_saves_nothing(tmp_path: Path) -> None:
    """Its score is of a part of the samples, and no step has been made."""

    class BestAtFirst(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/acc", 1.0 if self.trainer.sanity_checking else 0.5, batch_size=1)

    callback = Checkpoint(tmp_path)
    trainer_with(tmp_path, callback, num_sanity_val_steps=1).fit(BestAtFirst(), **loaders())
    assert (callback.best_score, step_of(callback.best_path)) == (0.5, STEPS)


def test_the_best_are_weights_that_were_validated(tmp_path: Path) -> None:
    """Not those of the epoch's end that came after it, under the score that Lightning still shows."""
    callback = Checkpoint(tmp_path)
    options = {"val_check_interval": 5, "check_val_every_n_epoch": None}
    trainer_with(tmp_path, callback, epochs=2, **options).fit(Plain(), **loaders())
    assert callback.best_score == 0.75  # at step 10; epochs end at 6 and 12
    assert step_of(callback.best_path) == 10


def test_a_monitor_that_nothing_logs_is_refused_with_what_is_logged(tmp_path: Path) -> None:
    callback = Checkpoint(tmp_path, monitor="val/accuracy", mode="max")
    with pytest.raises(UserError, match=r"val/accuracy: nothing logs it; logged: .*val/acc, val/loss"):
        trainer_with(tmp_path, callback).fit(Plain(), **loaders())
    with pytest.raises(UserError, match="must be max or min"):
        Checkpoint(tmp_path, mode="best")


def test_without_validation_a_run_has_a_last_and_no_best(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("remains", [True, False])
def test_a_best_of_steps_that_no_longer_count_goes(tmp_path: Path, remains: bool) -> None:
    """The run continues from a checkpoint before its best one. The best of the steps that count may be kept."""

    class Rises(Plain):
        scores = (0.5, 0.25, 0.75)

    class Falls(Plain):
        scores = (0.5, 0.25, 0.25)

    checkpoints = tmp_path / "checkpoints"
    start: str | None = None
    for epochs in (1, 2, 3):
        trainer_with(tmp_path, Checkpoint(tmp_path), epochs=epochs).fit(Rises(), **loaders(), ckpt_path=start)
        if epochs == 1 and remains:
            shutil.copy(checkpoints / "last.ckpt", checkpoints / f"step_{STEPS}.ckpt")
        start = str(shutil.copy(checkpoints / "last.ckpt", tmp_path / f"{epochs}.ckpt"))
    assert step_of(checkpoints / "best.ckpt") == 3 * STEPS
    callback = Checkpoint(tmp_path)
    trainer_with(tmp_path, callback, epochs=3).fit(Falls(), **loaders(), ckpt_path=str(tmp_path / "2.ckpt"))
    score, step = (0.5, STEPS) if remains else (0.25, 3 * STEPS)  # else the best of those that are there
    assert (callback.best_score, callback._best_step, step_of(callback.best_path)) == (score, step, step)


def test_an_old_best_is_none_of_a_run_that_has_no_monitor(tmp_path: Path) -> None:
    trainer_with(tmp_path, Checkpoint(tmp_path)).fit(Plain(), **loaders())
    callback = Checkpoint(tmp_path, monitor=None)
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    trainer_with(tmp_path, callback, epochs=2).fit(Plain(), **loaders(), ckpt_path=last)
    assert (tmp_path / "checkpoints" / "best.ckpt").exists()
    assert callback.best_path is None


def test_a_run_that_ran_out_of_time_goes_on_with_more(tmp_path: Path) -> None:
    def state(limit: str | None) -> ResumeState:
        config = {"debug": {"trainer": {"max_time": limit}}}
        return ResumeState({"format": FORMAT, "config": config}, {}, STEPS)

    class EndsLikeLightningsTimer(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.should_stop = True

    short = trainer_with(tmp_path, Checkpoint(tmp_path), state("short"), EndsLikeLightningsTimer(), epochs=2)
    short.fit(Plain(), **loaders())
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    assert step_of(Path(last)) == 1
    for limit, steps in (("short", 1), ("longer", 1 + STEPS)):  # the first is the control; Lightning begins an epoch
        trainer = trainer_with(tmp_path, Checkpoint(tmp_path), state(limit), epochs=2)
        trainer.fit(Plain(), **loaders(), ckpt_path=last)
        assert trainer.global_step == steps


@pytest.mark.parametrize("copy", [True, False])
def test_a_damaged_best_checkpoint_is_replaced_or_forgotten(tmp_path: Path, copy: bool) -> None:
    """The run would fail at its end, and each time that it goes on."""
    content = {"pytorch-lightning_version": "2", "state_dict": {}, "global_step": 2}
    callback = Checkpoint(tmp_path)
    callback.load_state_dict({"monitor": callback.monitor, "mode": callback.mode, "best_score": 0.5, "best_step": 2})
    best = tmp_path / "checkpoints" / "best.ckpt"
    best.parent.mkdir()
    checkpoint_io.save(content, best)
    if copy:
        shutil.copy(best, best.with_name("step_2.ckpt"))
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(broadcast=lambda value: value, checkpoint_io=SimpleNamespace(loaded_step=4)),
        is_global_zero=True,
        ckpt_path=None,
        global_step=4,
    )
    callback.on_fit_start(trainer, Plain())
    assert callback.best_score == 0.5, "the control"
    best.write_bytes(best.read_bytes()[:-30])
    callback.on_fit_start(trainer, Plain())
    assert (callback.best_score, best.exists()) == ((0.5, True) if copy else (None, False))
    assert not copy or step_of(best) == 2
