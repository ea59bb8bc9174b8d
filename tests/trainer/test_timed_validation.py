"""`lockstep.Trainer`: a time as `val_check_interval`. No test waits: a callback moves the last validation."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from trainer.small import QUIET, Net, loader, saved_steps, trainer

import lockstep
from lockstep.launch.environment import environment
from lockstep.lightning import steps


class Elapses(pl.Callback):
    """Lets the time of an interval pass in some steps, on rank zero only."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step + 1 in self.steps and environment().rank == 0:
            trainer._last_val_time -= 600.0


class Validates(Net):
    """Records after which steps it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_validation_start(self) -> None:
        self.steps.append(self.trainer.global_step)


def validated(folder: Path, *steps: int, ours: bool = True, ckpt_path: Any = None, **options: Any) -> Any:
    """Fit. Return after which steps the module was validated, and the hash of its weights."""
    usual = {"val_check_interval": "00:00:10:00", "callbacks": [Elapses(*steps)], "num_sanity_val_steps": 0}
    options = {**usual, **options}
    pl.seed_everything(0, verbose=False)
    module = Validates()
    if ours:
        made: Any = trainer(folder, **{"exact": True, "pieces": 4, **options})
    else:
        made = pl.Trainer(default_root_dir=folder, **{**QUIET, **options})
    made.fit(module, loader(), loader(shuffle=False), ckpt_path=ckpt_path)
    return module.steps, lockstep.weights_sha256(module.state_dict())


def test_a_validation_comes_after_a_time_as_with_lightning(tmp_path: Path) -> None:
    for interval in ("00:00:10:00", timedelta(minutes=10), {"minutes": 10}):
        assert validated(tmp_path, 2, 3, 8, val_check_interval=interval)[0] == [2, 3, 8], interval
    assert validated(tmp_path, 2, 3, 8, ours=False)[0] == [2, 3, 8]
    assert validated(tmp_path, 3, 8, check_val_every_n_epoch=2)[0] == [7, 8]
    assert validated(tmp_path)[0] == []


def test_a_run_continues_between_timed_validations(tmp_path: Path) -> None:
    whole, one = validated(tmp_path / "whole", 2, 8)
    folder = tmp_path / "cut"
    assert validated(folder, callbacks=[Elapses(2), saved_steps(folder)], max_steps=4) == (
        [2],
        validated(folder, max_steps=4)[1],
    )
    for step in (1, 2, 3):
        steps, weights = validated(folder / str(step), 8, ckpt_path=folder / f"step={step}.ckpt")
        assert steps == [8]
        assert weights == one
    assert whole == [2, 8]


@pytest.mark.usefixtures("processes")
def test_rank_zeros_clock_decides_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SECONDS_BETWEEN_LOOKS", 0.0)
    one = validated(tmp_path / "one", 2, 8)
    assert lockstep.launch(lambda: validated(tmp_path / "two", 2, 8), devices=2) == one
    monkeypatch.undo()  # looks are rare: the steps may be others, but the ranks agree, or this would hang
    assert lockstep.launch(lambda: validated(tmp_path / "rare", 2, 8), devices=2)[1] == one[1]
