"""What Meter measures, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import plain
import pytest
from plain import SIZE, STEPS, Clock, Counting, FakeShare, Loader, Plain, loaders, trainer_with
from torch import Tensor

from lockstep.callbacks import Checkpoint, Meter, split
from lockstep.callbacks import meter as throughput

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (throughput, split, plain):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_throughput_counts_steps_samples_and_waiting(tmp_path: Path, clock: Clock) -> None:
    meter = Meter(log_every=3)
    clock.sleep(2)  # until training begins
    trainer_with(tmp_path, meter).fit(Plain(), Loader(seconds=0.02))
    assert (meter.steps, meter.samples_seen) == (STEPS, STEPS * SIZE)
    assert meter.seconds_to_first_step == pytest.approx(2.02)
    assert meter.seconds == pytest.approx(2 + STEPS * 0.02)
    assert meter.latest["time/data_wait"] == meter.latest["time/step"] == pytest.approx(0.02)
    assert meter.samples_per_second == pytest.approx(SIZE / 0.02)
    assert 0.01 < meter.latest["memory/peak_gib"] < 1000


def test_validation_is_not_training_time(tmp_path: Path, clock: Clock) -> None:
    class Careful(Plain):
        def on_validation_epoch_start(self) -> None:
            clock.sleep(0.5)

    meter = Meter()
    trainer_with(tmp_path, meter, epochs=2).fit(Careful(), Loader(seconds=0.02), Loader(1))
    assert meter.samples_per_second == pytest.approx(SIZE / 0.02)
    assert meter.seconds == pytest.approx(2 * (STEPS * 0.02 + 0.5))


def test_a_step_is_taken_apart(tmp_path: Path, clock: Clock) -> None:
    class Slow(Plain):
        def training_step(self, batch: FakeShare, batch_idx: int) -> Tensor:
            clock.sleep(0.03)
            return super().training_step(batch, batch_idx)

        def on_before_backward(self, loss: Tensor) -> None:  # after the callbacks' hook of this name
            clock.sleep(0.05)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            clock.sleep(0.01)

    steps = Steps()
    trainer_with(tmp_path, Meter(log_every=4), steps).fit(Slow(), Loader(seconds=0.02))
    assert list(steps.seen) == [1, 4, 6]
    for seen in steps.seen.values():
        parts = {tag.removeprefix("split/"): value for tag, value in seen.items() if tag.startswith("split/")}
        assert parts == pytest.approx({"data_wait": 0.02, "all_reduce": 0.0, "other": 0.01, "compute": 0.08})
    assert "rank_speed/0" not in steps.seen[4]


def test_speed_is_that_of_training_whatever_is_loaded_to_be_tested(tmp_path: Path) -> None:
    meter = Meter()
    trainer = trainer_with(tmp_path, meter, Checkpoint(), epochs=3)  # the best is that of the second epoch
    trainer.fit(Plain(), **loaders())
    before = meter.samples_per_second
    trainer.test(Plain(), Loader(1), ckpt_path=str(tmp_path / "checkpoints" / "best.ckpt"), verbose=False)
    assert meter.samples_per_second == before
    assert meter.samples_seen == 2 * STEPS * SIZE


class Steps(pl.Callback):
    """Which steps were measured, and what was measured."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        meter = next(callback for callback in trainer.callbacks if isinstance(callback, Meter))  # type: ignore[attr-defined]
        if meter.fresh:
            self.seen[trainer.global_step] = dict(meter.latest)


def test_measured_means_are_over_the_samples_since_the_measurement_before(tmp_path: Path) -> None:
    steps = Steps()
    trainer_with(tmp_path, Meter(log_every=4), steps, epochs=2).fit(Counting(), **loaders())
    assert list(steps.seen) == [1, 4, 6, 8, 12]  # the first, every four, and an epoch's last
    assert [seen["train/loss"] for seen in steps.seen.values()] == [1.0, 3.0, 5.5, 7.5, 10.5]
    assert {seen["train/acc"] for seen in steps.seen.values()} == {0.25}


def test_a_module_without_sums_shows_its_loss(tmp_path: Path) -> None:
    losses: list[float] = []

    class Watched(Plain):
        def training_step(self, batch: FakeShare, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    meter = Meter(log_every=STEPS)
    trainer_with(tmp_path, meter).fit(Watched(), **loaders())
    assert meter.latest["train/loss"] == pytest.approx(sum(losses[1:]) / (STEPS - 1))
    assert "train/acc" not in meter.latest


def test_slow_steps_are_measured_sooner(tmp_path: Path) -> None:
    steps = Steps()
    trainer_with(tmp_path, Meter(log_every=1000, log_seconds=0.0), steps).fit(Plain(), **loaders())
    assert list(steps.seen) == [1, 2, 3, 4, 5, 6]


def test_samples_seen_go_on_after_a_resume(tmp_path: Path) -> None:
    trainer_with(tmp_path, Meter(), Checkpoint()).fit(Plain(), **loaders())
    meter = Meter()
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    trainer_with(tmp_path, meter, Checkpoint(), epochs=2).fit(Plain(), **loaders(), ckpt_path=last)
    assert (meter.steps, meter.samples_seen) == (STEPS, 2 * STEPS * SIZE)
