"""The callbacks, driven by a real Trainer on batches that look like shares; checkpoints and summaries on disk."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lockstep import atomic, checkpoint_io
from lockstep.callbacks import Checkpoint, Console, Dashboard, Throughput
from lockstep.checkpoint_io import AtomicCheckpointIO, CheckpointError
from lockstep.layout import Refusal
from lockstep.summary import git_info, versions, weights_sha256, write_summary

STEPS, SIZE = 6, 4
PATHS = ":".join([str(Path(__file__).parent), *filter(None, sys.path)])  # for programs of their own


class FakeShare:
    """What the callbacks need of a share."""

    def __init__(self, number: int) -> None:
        self.samples = SIZE
        self.x = torch.full((SIZE, 3), float(number))
        self.y = torch.arange(SIZE) % 2

    def to(self, *args: Any, **kwargs: Any) -> FakeShare:
        return self


class Loader:
    """An epoch of them. A plain list would be taken for a list of loaders."""

    def __init__(self, length: int = STEPS, seconds: float = 0.0) -> None:
        self.length, self.seconds = length, seconds

    def __iter__(self) -> Iterator[FakeShare]:
        for number in range(self.length):
            time.sleep(self.seconds)
            yield FakeShare(number)

    def __len__(self) -> int:
        return self.length


class Plain(pl.LightningModule):
    """A user's module: a loss, one validation metric, and nothing of ours."""

    scores: tuple[float, ...] = (0.5, 0.75, 0.25)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: FakeShare, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch.x), batch.y)

    def validation_step(self, batch: FakeShare, batch_idx: int) -> None:
        score = self.scores[self.current_epoch % len(self.scores)]
        self.log_dict({"val/acc": score, "val/loss": 1 - score}, batch_size=1, logger=False)

    def test_step(self, batch: FakeShare, batch_idx: int) -> None:
        self.log_dict({"test/acc": 0.5, "test/count": 354.0}, batch_size=1, logger=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting(Plain):
    """One that keeps its sums, as ImageClassifier does: the loss of step s is s, and one of four samples is right."""

    confusion = torch.tensor([[3, 1], [0, 2]])

    _counted = 0

    def train_totals(self, reset: bool) -> Tensor:
        assert reset
        steps = range(self._counted + 1, self.trainer.global_step + 1)
        self._counted = self.trainer.global_step
        return torch.tensor([sum(steps) * SIZE, len(steps), len(steps) * SIZE], dtype=torch.float64)


def trainer_with(tmp_path: Path, *callbacks: pl.Callback, epochs: int = 1, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=list(callbacks),
        plugins=[AtomicCheckpointIO()],
        num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **{"devices": 1, "logger": False, **options},
    )


def loaders() -> dict[str, Any]:
    return {"train_dataloaders": Loader(), "val_dataloaders": Loader(1)}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="lockstep")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "lockstep"]


# --- checkpoint files -------------------------------------------------------------------------------------------------


def plain(value: float = 1.0) -> dict[str, Any]:
    return {"pytorch-lightning_version": "2", "state_dict": {"w": torch.full((5000,), value)}, "lockstep": {"seed": 0}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint_io.save(plain(), tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def test_a_checkpoint_comes_back_and_is_an_ordinary_one(saved: Path) -> None:
    assert torch.equal(checkpoint_io.load(saved)["state_dict"]["w"], plain()["state_dict"]["w"])
    assert torch.load(saved, weights_only=True)["lockstep"] == {"seed": 0}
    assert zipfile.ZipFile(saved).testzip() is None
    assert os.listdir(saved.parent) == ["last.ckpt"]


def test_every_flipped_byte_is_found(saved: Path) -> None:
    whole = saved.read_bytes()
    for position in [*range(0, len(whole), len(whole) // 60), len(whole) - 100, len(whole) - 73, len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[position] ^= 1
        saved.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"last\.ckpt"):
            checkpoint_io.load(saved)
    saved.write_bytes(whole)
    checkpoint_io.load(saved)  # the control: undamaged, it loads


def test_plain_lightnings_checkpoints_load_and_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "lightning.ckpt"
    torch.save(plain(), path)
    checkpoint_io.load(path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1  # in the weights: torch itself loads this
    path.write_bytes(damaged)
    torch.load(path, weights_only=True)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint_io.load(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"epoch,step,loss\n", "not a checkpoint"),
        (pickle.dumps({"state_dict": {}}), "not a checkpoint"),
        (0.5, "cut off"),
        (0.999, "cut off"),
    ],
)
def test_what_is_no_checkpoint_is_named(saved: Path, content: bytes | float | None, reason: str) -> None:
    if content is None:
        saved.unlink()
    elif isinstance(content, float):
        saved.write_bytes(saved.read_bytes()[: int(saved.stat().st_size * content)])
    else:
        saved.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        checkpoint_io.load(saved)
    assert str(saved) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_any_truncation_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for size in [*range(1, len(whole), len(whole) // 40), *range(len(whole) - 75, len(whole))]:
        saved.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            checkpoint_io.load(saved)


def test_a_folder_and_a_foreign_file_of_torch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        checkpoint_io.load(tmp_path)
    torch.save({"hello": 1}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a Lockstep or Lightning checkpoint"):
        checkpoint_io.load(tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(CheckpointError, match=r"some\.zip"):
        checkpoint_io.load(tmp_path / "some.zip")


class Hostile:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def test_code_in_a_checkpoint_is_refused_and_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness, path = tmp_path / "it-ran", tmp_path / "hostile.ckpt"
    torch.save({**plain(), "payload": Hostile(witness)}, path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for unsafe in (None, False):
        with pytest.raises(CheckpointError, match=r"holds code.*mkdir"):
            AtomicCheckpointIO().load_checkpoint(path, weights_only=unsafe)
    assert not witness.exists()
    torch.load(path)  # the control: with that variable the payload does run
    assert witness.exists()


def test_what_could_not_be_loaded_is_not_saved(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(CheckpointError, match=r"not saved.*pathlib"):
        checkpoint_io.save({**plain(2.0), "folder": Path("/")}, saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["last.ckpt"]


def test_a_full_disk_leaves_the_old_file_whole(saved: Path) -> None:
    before = saved.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="can't write") as error:
            checkpoint_io.save(plain(2.0), saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(saved) in str(error.value)
    assert error.value.strerror is not None
    assert "too large" in error.value.strerror  # what the system says of it
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["last.ckpt"]


def test_the_best_stays_what_it_was_where_the_new_one_cannot_be_saved(saved: Path) -> None:
    best, writer = saved.with_name("best.ckpt"), AtomicCheckpointIO()
    best.write_bytes(b"the best before")
    writer.save_checkpoint({**plain(), "lockstep": print}, saved)  # code, which is not saved
    writer.then(atomic.same_file, saved, best)
    with pytest.raises(CheckpointError, match="not saved"):
        writer.wait()
    assert best.read_bytes() == b"the best before"
    writer.save_checkpoint(plain(2.0), saved)
    writer.then(atomic.same_file, saved, best)
    writer.teardown()
    assert best.samefile(saved)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/last\.ckpt"):
        checkpoint_io.save(plain(), tmp_path / "file" / "last.ckpt")


KILLS = """
import os, sys, time; sys.path[:0] = sys.argv[1].split(':')
import torch
from lockstep import checkpoint_io
torch.set_num_threads(1)
content = {'pytorch-lightning_version': '2', 'state_dict': {'w': torch.zeros(20_000_000)}}
for delay in (0.02, 0.05, 0.1, 0.15, 0.2):
    child = os.fork()
    while child == 0:
        checkpoint_io.save(content, sys.argv[2])
    time.sleep(delay)
    os.kill(child, 9)
    os.waitpid(child, 0)
    checkpoint_io.load(sys.argv[2])
"""


def test_killed_while_saving_the_old_file_is_whole(saved: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLS, PATHS, str(saved)], check=True, timeout=120)
    assert set(os.listdir(saved.parent)) <= {"last.ckpt", ".last.ckpt.tmp"}
    checkpoint_io.save(plain(), saved)
    assert os.listdir(saved.parent) == ["last.ckpt"]  # what the killed process left is gone


def test_a_second_name_keeps_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last, best = tmp_path / "last", tmp_path / "best"
    last.write_text("one")
    atomic.same_file(last, best)
    assert last.samefile(best)
    atomic.same_file(last, best)
    assert sorted(os.listdir(tmp_path)) == ["best", "last"], "nothing beside them"
    with atomic.replacing(last) as file:
        file.write(b"two")
    assert (last.read_text(), best.read_text()) == ("two", "one")

    def no_links(*args: Any) -> None:
        raise OSError(1, "not here")

    monkeypatch.setattr(os, "link", no_links)
    atomic.same_file(last, best)
    assert best.read_text() == "two"
    assert not last.samefile(best)


# --- when checkpoints are written -------------------------------------------------------------------------------------


def step_of(path: Path | None) -> int:
    assert path is not None
    return int(checkpoint_io.load(path)["global_step"])


def test_last_and_best(tmp_path: Path) -> None:
    callback = Checkpoint(record={"config": {"lr": 0.1}, "fingerprint": "f"})
    trainer_with(tmp_path, callback, epochs=3).fit(Plain(), **loaders())
    assert step_of(callback.last_path) == 3 * STEPS
    assert step_of(callback.best_path) == 2 * STEPS  # the scores are 0.5, 0.75, 0.25
    assert callback.best_score == 0.75
    assert callback.seconds > 0
    assert callback.last_path is not None
    content = checkpoint_io.load(callback.last_path)
    metrics = {"val/acc": 0.25, "val/loss": 0.75}
    assert content["lockstep"] == {"config": {"lr": 0.1}, "fingerprint": "f", "metrics": metrics}
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["best.ckpt", "last.ckpt"]


def test_a_smaller_loss_is_better_with_mode_min_and_nan_never(tmp_path: Path) -> None:
    class Diverging(Plain):
        scores = (math.nan, 0.5, math.nan)

    callback = Checkpoint(monitor="val/loss", mode="min", folder=tmp_path / "run")
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

    callback = Watched(every=4)
    trainer_with(tmp_path, callback, epochs=2, val_check_interval=3).fit(Plain(), **loaders())
    # 3: the first score is the best; 4, 8, 12: every four; 6, 12: epochs; 9: a better score.
    assert saves == [3, 4, 6, 8, 9, 12]
    assert step_of(callback.best_path) == 12


def test_the_best_are_weights_that_were_validated(tmp_path: Path) -> None:
    """Not those of the epoch's end that came after it, under the score that Lightning still shows."""
    callback = Checkpoint()
    options = {"val_check_interval": 5, "check_val_every_n_epoch": None}
    trainer_with(tmp_path, callback, epochs=2, **options).fit(Plain(), **loaders())
    assert callback.best_score == 0.75  # at step 10; epochs end at 6 and 12
    assert step_of(callback.best_path) == 10


def test_a_monitor_that_nothing_logs_is_refused_with_what_is_logged(tmp_path: Path) -> None:
    callback = Checkpoint(monitor="val/accuracy")
    with pytest.raises(Refusal, match=r"val/accuracy: nothing logs it; logged: .*val/acc, val/loss"):
        trainer_with(tmp_path, callback).fit(Plain(), **loaders())
    with pytest.raises(Refusal, match="must be max or min"):
        Checkpoint(mode="best")


def test_without_validation_there_is_a_last_and_no_best(tmp_path: Path) -> None:
    callback = Checkpoint()
    trainer_with(tmp_path, callback).fit(Plain(), train_dataloaders=Loader())
    assert callback.best_path is None
    assert step_of(callback.last_path) == STEPS


@pytest.mark.parametrize("where", ["same folder", "new folder", "new folder without the best", "killed before best"])
def test_the_best_survives_a_resume(tmp_path: Path, where: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    epochs = 2 if where == "killed before best" else 3  # after epoch 2, the best is the last
    trainer_with(tmp_path, Checkpoint(folder=first), epochs=epochs).fit(Plain(), **loaders())
    if where != "same folder" and where != "new folder":
        (first / "checkpoints" / "best.ckpt").unlink()
    callback = Checkpoint(folder=second if where.startswith("new") else first)
    resumed = trainer_with(tmp_path, callback, epochs=4)
    resumed.fit(Plain(), **loaders(), ckpt_path=str(first / "checkpoints" / "last.ckpt"))
    if where == "new folder without the best":  # epoch 4 scores 0.5, the best of those that are there
        assert (callback.best_score, step_of(callback.best_path)) == (0.5, 4 * STEPS)
    else:
        assert (callback.best_score, step_of(callback.best_path)) == (0.75, 2 * STEPS)


# --- throughput -------------------------------------------------------------------------------------------------------


def test_throughput_counts_steps_samples_and_waiting(tmp_path: Path) -> None:
    meter = Throughput(log_every=3)
    trainer_with(tmp_path, meter).fit(Plain(), Loader(seconds=0.02))
    assert (meter.steps, meter.samples_seen) == (STEPS, STEPS * SIZE)
    assert meter.seconds_to_first_step is not None
    assert 0 < meter.seconds_to_first_step < meter.seconds
    assert 0.015 < meter.latest["time/data_wait"] < 0.2
    assert meter.samples_per_second is not None
    assert 0 < meter.samples_per_second < SIZE / 0.02
    assert 0.01 < meter.latest["memory/peak_gib"] < 1000


def test_validation_is_not_training_time(tmp_path: Path) -> None:
    class Careful(Plain):
        def on_validation_epoch_start(self) -> None:
            time.sleep(0.5)

    meter = Throughput()
    trainer_with(tmp_path, meter, epochs=2).fit(Careful(), **loaders())
    assert meter.samples_per_second is not None
    assert meter.samples_per_second > 11 * SIZE / 0.4
    assert meter.seconds > 1


def test_a_step_is_taken_apart(tmp_path: Path) -> None:
    class Slow(Plain):
        def training_step(self, batch: FakeShare, batch_idx: int) -> Tensor:
            time.sleep(0.03)
            return super().training_step(batch, batch_idx)

        def on_before_backward(self, loss: Tensor) -> None:  # after the callbacks' hook of this name
            time.sleep(0.05)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            time.sleep(0.01)

    steps = Steps()
    trainer_with(tmp_path, Throughput(log_every=4), steps).fit(Slow(), Loader(seconds=0.02))
    assert list(steps.seen) == [1, 4, 6]
    for seen in steps.seen.values():
        parts = {tag.removeprefix("split/"): value for tag, value in seen.items() if tag.startswith("split/")}
        assert list(parts) == ["data_wait", "all_reduce", "other", "compute"]
        assert 0.015 < parts["data_wait"] < 0.04
        assert 0.08 < parts["compute"] < 0.12
        assert parts["all_reduce"] == 0
        assert 0.01 < parts["other"] < 0.03
    assert "rank_speed/0" not in steps.seen[4]


def test_speed_is_that_of_training_whatever_is_loaded_to_be_tested(tmp_path: Path) -> None:
    meter = Throughput()
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
        meter = next(callback for callback in trainer.callbacks if isinstance(callback, Throughput))  # type: ignore[attr-defined]
        if meter.fresh:
            self.seen[trainer.global_step] = dict(meter.latest)


def test_measured_means_are_over_the_samples_since_the_measurement_before(tmp_path: Path) -> None:
    steps = Steps()
    trainer_with(tmp_path, Throughput(log_every=4), steps, epochs=2).fit(Counting(), **loaders())
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

    meter = Throughput(log_every=STEPS)
    trainer_with(tmp_path, meter).fit(Watched(), **loaders())
    assert meter.latest["train/loss"] == pytest.approx(sum(losses[1:]) / (STEPS - 1))
    assert "train/acc" not in meter.latest


def test_slow_steps_are_measured_sooner(tmp_path: Path) -> None:
    steps = Steps()
    trainer_with(tmp_path, Throughput(log_every=1000, log_seconds=0.0), steps).fit(Plain(), **loaders())
    assert list(steps.seen) == [1, 2, 3, 4, 5, 6]


def test_samples_seen_go_on_after_a_resume(tmp_path: Path) -> None:
    trainer_with(tmp_path, Throughput(), Checkpoint()).fit(Plain(), **loaders())
    meter = Throughput()
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    trainer_with(tmp_path, meter, Checkpoint(), epochs=2).fit(Plain(), **loaders(), ckpt_path=last)
    assert (meter.steps, meter.samples_seen) == (STEPS, 2 * STEPS * SIZE)


# --- console ----------------------------------------------------------------------------------------------------------


def test_one_line_per_epoch_with_the_epochs_own_metrics(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    class Logging(Plain):
        def on_train_epoch_end(self) -> None:  # after the callbacks' hook of this name
            self.log("train/loss", 0.125 * (self.current_epoch + 1))

    trainer_with(tmp_path, Throughput(), Console(bar=False), epochs=2).fit(Logging(), **loaders())
    first, second = said()
    assert first.startswith("epoch 1/2  step 6  train/loss 0.1250  val/acc 0.5000  val/loss 0.5000  ")
    assert first.endswith(" samples/s  lr 0.1")
    assert second.startswith("epoch 2/2  step 12  train/loss 0.2500  val/acc 0.7500  val/loss 0.2500  ")


def test_a_long_epoch_says_how_far_it_is(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    trainer_with(tmp_path, Throughput(), Console(bar=False, line_seconds=0)).fit(Counting(), **loaders())
    assert len(said()) == STEPS + 1
    assert said()[2].startswith("epoch 1/1  step 3/6  train/loss 1.0000  train/acc 0.2500")


@pytest.mark.parametrize("options", [{}, {"max_steps": 5}], ids=["whole epochs", "cut short"])
def test_a_validation_inside_an_epoch_is_a_line(
    tmp_path: Path, said: Callable[[], list[str]], options: dict[str, int]
) -> None:
    trainer_with(tmp_path, Console(bar=False), val_check_interval=2, **options).fit(Plain(), **loaders())
    lines = said()
    assert lines[:2] == [f"epoch 1/1  step {step}  val/acc 0.5000  val/loss 0.5000" for step in (2, 4)]
    assert [line.split("  ")[1] for line in lines[2:]] == [f"step {options.get('max_steps', 6)}"]


def test_the_bar_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real terminal: a pseudo one, read back."""
    program = (
        "import sys, logging, warnings\nwarnings.simplefilter('ignore')\nsys.path[:0] = sys.argv[1].split(':')\n"
        "import test_callbacks as t\n"
        "logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)\n"
        "log = logging.getLogger('lockstep'); log.addHandler(logging.StreamHandler()); log.setLevel(logging.INFO)\n"
        "console = t.Console(refresh_seconds=0)\nassert console.wants_bar\n"
        "trainer = t.trainer_with(sys.argv[2], t.Throughput(), console, epochs=2)\n"
        "trainer.fit(t.Counting(), **t.loaders())\n"
        "assert log.handlers[0].stream is sys.__stderr__\n"
    )
    terminal, inside = os.openpty()
    command = [sys.executable, "-c", program, PATHS, str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=inside, env=environment)
    os.close(inside)
    shown = b""
    try:
        while block := os.read(terminal, 65536):
            shown += block
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    assert process.wait(timeout=60) == 0, shown.decode()
    text = shown.decode()
    assert "━" in text
    assert "12/12" in text
    assert "acc 0.2500" in text
    for epoch in ("epoch 1/2  step 6", "epoch 2/2  step 12"):
        assert text.count(epoch) == 1


def test_results_of_the_test_are_a_table(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    trainer_with(tmp_path, Console(bar=False)).test(Plain(), Loader(1), verbose=False)
    assert said() == ["test     acc  count", "      0.5000    354"]


# --- dashboard --------------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def board(tmp_path: Path) -> TensorBoardLogger:
    return TensorBoardLogger(tmp_path, name="", version="tensorboard", default_hp_metric=False)


def test_curves_against_steps_and_against_samples(tmp_path: Path) -> None:
    config = {"lr": 0.1, "model": {"name": "tiny"}, "shares": [1, 2], "pieces": None}
    callbacks = Throughput(log_every=3), Dashboard(config)
    trainer = trainer_with(tmp_path, *callbacks, epochs=2, logger=board(tmp_path))
    module = Counting()
    trainer.fit(module, **loaders())
    trainer.test(module, Loader(1), verbose=False)
    curves = scalars(tmp_path / "tensorboard")
    assert curves["train/loss"] == [(1, 1.0), (3, 2.5), (6, 5.0), (9, 8.0), (12, 11.0)]
    by_samples = scalars(tmp_path / "tensorboard" / "by_samples")
    assert [step for step, _ in by_samples["train_by_samples/loss"]] == [4, 12, 24, 36, 48]
    assert curves["val/acc"] == [(6, 0.5), (12, 0.75)]
    assert by_samples["val_by_samples/acc"] == [(24, 0.5), (48, 0.75)]
    assert curves["val_class/0"] == [(6, 0.75), (12, 0.75)]
    final = scalars(tmp_path / "tensorboard" / "final")
    assert final["final/val/acc"] == [(12, 0.75)]
    assert final["final/test/acc"] == [(12, 0.5)]
    for tag in ("lr", "grad_norm", "time/step", "time/data_wait", "memory/peak_gib", "throughput/samples_per_second"):
        assert [step for step, _ in curves[tag]] == [1, 3, 6, 9, 12]
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()
    assert "config/text_summary" in tags["tensors"]
    assert "hp_metric" not in curves


def test_the_gradient_norm_is_that_of_the_step(tmp_path: Path) -> None:
    norms: list[float] = []

    class Watched(Plain):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None)))

    trainer_with(tmp_path, Throughput(log_every=4), Dashboard(), logger=board(tmp_path)).fit(Watched(), **loaders())
    shown = scalars(tmp_path / "tensorboard")["grad_norm"]
    assert [step for step, _ in shown] == [1, 4, 6]
    assert [norm for _, norm in shown] == pytest.approx([norms[0], norms[3], norms[5]])


def test_a_curve_that_the_module_draws_itself_is_left_to_it(tmp_path: Path) -> None:
    class Logging(Plain):
        def training_step(self, batch: FakeShare, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss, batch_size=SIZE)
            return loss

    options: dict[str, Any] = {"logger": board(tmp_path), "log_every_n_steps": 2, "epochs": 2}
    trainer_with(tmp_path, Throughput(log_every=2), Dashboard({"lr": 1}), **options).fit(Logging(), **loaders())
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["train/loss"]] == [1, 3, 5, 7, 9, 11]  # Lightning's
    by_samples = scalars(tmp_path / "tensorboard" / "by_samples")["train_by_samples/loss"]
    assert [samples for samples, _ in by_samples] == [4, 8, 16, 24, 32, 40, 48]


def test_csv_gets_the_same_numbers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="csv")
    trainer_with(tmp_path, Throughput(log_every=3), Dashboard({"lr": 1}), logger=logger).fit(Counting(), **loaders())
    text = (tmp_path / "csv" / "metrics.csv").read_text()
    header, *rows = text.splitlines()
    assert {"train/loss", "grad_norm", "samples", "step", "val/acc", "split/compute"} <= set(header.split(","))
    assert len(rows) == 4  # three measurements, one validation
    assert "by_samples" not in header


def test_the_dashboard_needs_throughput_before_it(tmp_path: Path) -> None:
    for callbacks in ([Dashboard()], [Dashboard(), Throughput()]):
        with pytest.raises(Refusal, match=r"callbacks\.throughput"):
            trainer_with(tmp_path, *callbacks).fit(Plain(), **loaders())


# --- several ranks ----------------------------------------------------------------------------------------------------

RANKS = """
import sys; sys.path[:0] = sys.argv[1].split(':')
import test_callbacks as t
class Apart(t.Counting):  # the ranks disagree in everything
    def train_totals(self, reset):
        return super().train_totals(reset) * t.torch.tensor([1 + 2 * self.global_rank, 1, 1])
    def training_step(self, batch, batch_idx):
        t.time.sleep(0.06 if self.global_rank == 1 else 0)
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx):
        self.log('val/acc', [0.25, 0.5, 0.125][self.current_epoch] if self.global_rank == 0 else 0.0, batch_size=1)
folder = t.Path(sys.argv[2])
t.torch.set_num_threads(1)
t.logging.basicConfig(filename=folder / 'log', level='INFO')
callbacks = t.Throughput(log_every=3), t.Console(bar=False), t.Dashboard({'lr': 1}), t.Checkpoint(every=2)
trainer = t.trainer_with(folder, *callbacks, epochs=3, strategy='ddp', devices=2, logger=t.board(folder))
trainer.fit(Apart(), **t.loaders())
"""


def test_two_ranks_measure_together_and_rank_zero_speaks(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*launch, PATHS, str(tmp_path)], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    curves = scalars(tmp_path / "tensorboard")
    assert curves["train/loss"][:3] == [(1, 2.0), (3, 5.0), (6, 10.0)]  # rank one's loss is three times rank zero's
    assert curves["train/acc"][:3] == [(1, 0.25), (3, 0.25), (6, 0.25)]
    fast, slow = ([speed for _, speed in curves[f"rank_speed/{rank}"]][-1] for rank in (0, 1))
    assert slow < SIZE / 0.06 < fast  # rank one is seen, though both take their steps at the same pace
    parts = {tag: seconds[-1][1] for tag, seconds in curves.items() if tag.startswith("split/")}
    assert parts["split/compute"] > 0.06 > 2 * parts["split/all_reduce"]  # what rank zero waits for is no all-reduce
    assert set(curves) >= {"rank_memory/0", "rank_memory/1"}
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 1
    assert (tmp_path / "log").read_text().count("INFO:lockstep:epoch") == 3
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 3 * STEPS
    assert step_of(tmp_path / "checkpoints" / "best.ckpt") == 2 * STEPS


# --- summary ----------------------------------------------------------------------------------------------------------


def test_the_digest_of_weights_sees_bits_and_names_only() -> None:
    torch.manual_seed(0)
    state = {
        "a": torch.randn(2, 3, 4, 4),
        "b": torch.randn(3).bfloat16(),
        "n": torch.tensor(7),
        "empty": torch.zeros(0),
    }
    digest = weights_sha256(state)
    assert len(digest) == 64
    other_order = dict(reversed(state.items()))
    other_format = {**state, "a": state["a"].to(memory_format=torch.channels_last)}
    assert other_format["a"].stride() != state["a"].stride()
    assert weights_sha256(other_order) == weights_sha256(other_format) == digest
    flipped = state["a"].clone()
    flipped.view(torch.int32).view(-1)[5] ^= 1
    assert weights_sha256({**state, "a": flipped}) != digest
    assert weights_sha256({"c" if name == "b" else name: value for name, value in state.items()}) != digest
    assert weights_sha256({**state, "extra": {"not": "a tensor"}}) == digest


def test_a_summary_is_written_whole_and_as_json(tmp_path: Path) -> None:
    path = tmp_path / "run" / "summary.json"
    summary = {
        "status": "completed",
        "metrics": {"val/loss": math.nan, "val/acc": 0.5},
        "layout": {"exact": True},
        "p": tmp_path,
    }
    write_summary(path, summary)
    assert json.loads(path.read_text()) == {
        "status": "completed",
        "metrics": {"val/loss": None, "val/acc": 0.5},
        "layout": {"exact": True},
        "p": str(tmp_path),
    }
    assert os.listdir(path.parent) == ["summary.json"]


def test_versions_and_git(tmp_path: Path) -> None:
    assert {"python", "torch", "lightning"} <= versions().keys()
    assert git_info(tmp_path / "nowhere") == {"commit": None, "dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    info = git_info(tmp_path)
    assert len(info["commit"]) == 40
    assert info["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_info(tmp_path) == {"commit": info["commit"], "dirty": True}


def test_the_summary_needs_no_torch() -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); import lockstep.summary; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, PATHS], check=True)
