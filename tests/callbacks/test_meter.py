"""What Meter measures, and when."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import plain
import pytest
from plain import SIZE, STEPS, Clock, Counting, FakeBatch, Loader, Plain, loaders, trainer_with
from torch import Tensor

from lockstep.callbacks import Checkpoint, Meter, meter


class Steps(pl.Callback):
    """Which steps were measured, and what was measured."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        actual = meter.find_meter(trainer)
        assert actual is not None
        if actual.just_measured:
            self.seen[trainer.global_step] = dict(actual.latest)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (meter, plain):
        monkeypatch.setattr(module, "time", clock)
    return clock


# --- time -------------------------------------------------------------------------------------------------------------


def test_speed_waiting_and_memory(tmp_path: Path, clock: Clock) -> None:
    measured = Meter(log_every=3)
    clock.sleep(2)  # until training begins
    trainer_with(tmp_path, measured).fit(Plain(), Loader(seconds=0.02))
    assert measured.samples_seen == STEPS * SIZE
    assert measured.seconds_to_first_step == pytest.approx(2.02)
    assert measured.latest["workers/data_wait"] == measured.latest["workers/step_seconds"] == pytest.approx(0.02)
    assert measured.samples_per_second == measured.latest["workers/samples_per_second"] == pytest.approx(SIZE / 0.02)
    assert 0.01 < measured.latest["workers/peak_gib"] < 1000


def test_validation_is_not_training_time(tmp_path: Path, clock: Clock) -> None:
    class Careful(Plain):
        def on_validation_epoch_start(self) -> None:
            clock.sleep(0.5)

    measured = Meter()
    trainer_with(tmp_path, measured, epochs=2).fit(Careful(), Loader(seconds=0.02), Loader(1))
    assert measured.samples_per_second == pytest.approx(SIZE / 0.02)


def test_the_warm_up_is_left_out_once_as_much_again_has_passed(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(meter, "WARMUP", 3)
    counted = meter.Speed()
    actual = []
    for seconds in (9, 2, 2, 1, 1, 1, 1):
        clock.sleep(seconds)
        counted.count(SIZE)
        actual.append(counted.samples_per_second)
    assert actual[0] is None
    assert actual[4] == pytest.approx(4 * SIZE / 6)
    assert actual[5:] == pytest.approx([SIZE, SIZE])


def test_a_run_that_is_cut_short_is_measured_at_its_end(tmp_path: Path) -> None:
    steps = Steps()
    trainer_with(tmp_path, Meter(), steps, max_steps=3).fit(Plain(), **loaders())
    assert list(steps.seen) == [1, 3]


# --- means ------------------------------------------------------------------------------------------------------------


def test_means_are_over_the_samples_since_the_measurement_before(tmp_path: Path) -> None:
    steps = Steps()
    trainer = trainer_with(tmp_path, Meter(log_every=4), steps, epochs=2)
    trainer.fit(Counting(), **loaders())
    assert list(steps.seen) == [1, 4, 6, 8, 12]  # the first, every four, and an epoch's last
    assert [seen["train/loss"] for seen in steps.seen.values()] == [1.0, 3.0, 5.5, 7.5, 10.5]
    assert {seen["train/acc"] for seen in steps.seen.values()} == {0.25}
    assert trainer.callback_metrics["train/loss"] == 9.5  # of the second epoch
    assert trainer.callback_metrics["train/acc"] == 0.25


def test_a_step_weighs_as_many_samples_as_it_has_here(tmp_path: Path) -> None:
    """A rank without a sample, weight 0, returns a loss all the same."""
    trainer = trainer_with(tmp_path, Meter())
    trainer.fit(Counting(), Loader(3, local=(4, 0, 2)))
    assert trainer.callback_metrics["train/loss"] == pytest.approx((4 * 1 + 2 * 3) / 6)


@pytest.mark.parametrize("skipped", [(0,), (1, 2)], ids=["the first", "later"])
def test_a_skipped_step_does_not_count(tmp_path: Path, skipped: tuple[int, ...]) -> None:
    class Skips(Counting):
        def training_step(self, batch: FakeBatch, batch_idx: int) -> dict[str, Tensor]:
            actual = super().training_step(batch, batch_idx)
            batch.skipped = batch_idx in skipped
            return {name: value + 1000 for name, value in actual.items()} if batch.skipped else actual

    measured = Meter(log_every=1)
    trainer = trainer_with(tmp_path, measured)
    trainer.fit(Skips(), Loader(3))
    left = [step + 1 for step in range(3) if step not in skipped]
    assert trainer.callback_metrics["train/loss"] == sum(left) / len(left)
    assert trainer.callback_metrics["train/acc"] == 0.25


@pytest.mark.parametrize("step", [2, 5])
def test_means_and_samples_go_on_after_a_resume(tmp_path: Path, step: int) -> None:
    class Retained(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / "kept.ckpt", weights_only=False)

    trainer_with(tmp_path, Meter(), Retained()).fit(Counting(), **loaders())
    measured = Meter()
    resumed = trainer_with(tmp_path, measured)
    resumed.fit(Counting(), Loader(STEPS), ckpt_path=str(tmp_path / "kept.ckpt"))
    assert resumed.callback_metrics["train/loss"] == 3.5
    assert measured.samples_seen == STEPS * SIZE


def test_a_checkpoint_that_is_tested_changes_no_measurement(tmp_path: Path) -> None:
    measured = Meter()
    trainer = trainer_with(tmp_path, measured, Checkpoint(tmp_path), epochs=3)  # the best is that of the second epoch
    trainer.fit(Plain(), **loaders())
    before = measured.samples_per_second
    trainer.test(Plain(), Loader(1), ckpt_path=str(tmp_path / "checkpoints" / "best.ckpt"), verbose=False)
    assert (measured.samples_per_second, measured.samples_seen) == (before, 3 * STEPS * SIZE)
