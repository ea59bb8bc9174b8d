"""What the callbacks show of a run: on the console, to the loggers, and of several ranks."""

import logging
import math
import os
import re
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
from conftest import torchrun_environments, wait_for
from plain import PATHS, SIZE, STEPS, Counting, FakeBatch, Plain, board, loaders, scalars, step_of, trainer_with
from torch import Tensor

from lockstep.callbacks import Console, Meter
from lockstep.errors import UserError
from lockstep.vision.callbacks import Dashboard


@pytest.fixture
def read_output(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="lockstep")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "lockstep"]


# --- console ----------------------------------------------------------------------------------------------------------


def test_one_line_per_epoch_with_the_epochs_metrics(tmp_path: Path, read_output: Callable[[], list[str]]) -> None:
    class Logging(Counting):
        def on_train_epoch_end(self) -> None:  # after the callbacks' hook of this name
            self.log("train/own", 0.125 * (self.current_epoch + 1))

    trainer_with(tmp_path, Meter(), Console(bar=False), epochs=2).fit(Logging(), **loaders())
    first, second = (line.split("  ") for line in read_output())
    assert first[:2] == ["epoch 1/2", "step 6"]
    assert {"train/loss 3.5000", "train/acc 0.2500", "train/own 0.1250", "val/acc 0.5000", "lr 0.1"} <= set(first)
    assert {"train/loss 9.5000", "train/acc 0.2500", "train/own 0.2500", "val/acc 0.7500", "lr 0.1"} <= set(second)


def test_short_epochs_may_share_a_line(tmp_path: Path, read_output: Callable[[], list[str]]) -> None:
    trainer_with(tmp_path, Console(bar=False, every_epochs=2), epochs=5).fit(Plain(), **loaders())
    assert [line.split("  ")[0] for line in read_output()] == ["epoch 2/5", "epoch 4/5", "epoch 5/5"]


def test_a_long_epoch_describes_how_far_it_is(tmp_path: Path, read_output: Callable[[], list[str]]) -> None:
    trainer_with(tmp_path, Meter(), Console(bar=False, line_seconds=0)).fit(Counting(), **loaders())
    lines = read_output()
    assert len(lines) == STEPS + 1
    assert lines[0].startswith("epoch 1/1  step 1/6  train/loss 1.0000  train/acc 0.2500 (step 1)")
    assert re.fullmatch(r"epoch 1/1  step 3/6  [\d,]+ samples/s", lines[2]), "an old measurement is not shown again"
    assert lines[5].startswith("epoch 1/1  step 6/6  train/loss 4  train/acc 0.2500 (steps 2-6)")


def test_a_line_names_the_steps_that_its_means_are_of(tmp_path: Path, read_output: Callable[[], list[str]]) -> None:
    """The line comes later than the measurement. The loss of `Counting` at step n is n."""

    class Late(Console):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step in (5, 8):
                super().on_train_batch_end(trainer, *args)

    trainer_with(tmp_path, Meter(log_every=4), Late(bar=False, line_seconds=0), epochs=2).fit(Counting(), **loaders())
    lines = read_output()
    assert lines[0].startswith("epoch 1/2  step 5/12  train/loss 3  train/acc 0.2500 (steps 2-4)")
    assert lines[1].startswith("epoch 1/2  step 6  train/loss 3.5000")
    assert lines[2].startswith("epoch 2/2  step 8/12  train/loss 7.5000  train/acc 0.2500 (steps 7-8)")


def test_an_epochs_line_has_no_validation_of_an_earlier_step(
    tmp_path: Path, read_output: Callable[[], list[str]]
) -> None:
    class Sometimes(Plain):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch != 1:
                self.log("train/rare", float(self.current_epoch))

    options: dict[str, Any] = {"val_check_interval": 5, "check_val_every_n_epoch": None}
    trainer_with(tmp_path, Console(bar=False), epochs=3, **options).fit(Sometimes(), **loaders())
    shown = [(line.split("  ")[1], "val/acc" in line, "train/rare" in line) for line in read_output()]
    assert shown == [
        *[("step 5", True, False), ("step 6", False, True), ("step 10", True, False), ("step 12", False, False)],
        *[("step 15", True, False), ("step 18", False, True)],
    ]


@pytest.mark.parametrize("options", [{}, {"max_steps": 5}], ids=["whole epochs", "cut short"])
def test_a_validation_inside_an_epoch_is_a_line(
    tmp_path: Path, read_output: Callable[[], list[str]], options: dict[str, int]
) -> None:
    trainer_with(tmp_path, Console(bar=False), val_check_interval=2, **options).fit(Plain(), **loaders())
    lines = read_output()
    assert lines[:2] == [f"epoch 1/1  step {step}  val/acc 0.5000  val/loss 0.5000" for step in (2, 4)]
    assert [line.split("  ")[1] for line in lines[2:]] == [f"step {options.get('max_steps', 6)}"]


BAR = """
import os, pathlib, sys; sys.path[:0] = sys.argv[1].split(':')
folder = pathlib.Path(sys.argv[2])
os.dup2(os.open(sys.argv[3], os.O_RDWR | os.O_NOCTTY), 2)
(folder / "opened").touch()
import logging, warnings
warnings.simplefilter('ignore')
import plain as t
from lockstep.callbacks import Console, Meter
t.torch.set_num_threads(1)
logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
log = logging.getLogger('lockstep'); log.addHandler(logging.StreamHandler()); log.setLevel(logging.INFO)
trainer = t.trainer_with(folder, Meter(), Console(refresh_seconds=0), epochs=2)
trainer.fit(t.Counting(), **t.loaders())
assert log.handlers[0].stream is sys.__stderr__
"""


@pytest.mark.usefixtures("processes")
def test_the_bar_leaves_whole_lines(tmp_path: Path) -> None:
    """On a real terminal: a pseudo one, read back."""
    program, (terminal, inside) = tmp_path / "bar.py", os.openpty()
    program.write_text(BAR)
    termios.tcsetwinsize(inside, (40, 150))
    process = forks.Fork(
        [str(program), PATHS, str(tmp_path), os.ttyname(inside)], tmp_path, os.environ | {"TERM": "xterm"}
    )
    wait_for((tmp_path / "opened").exists, process)
    os.close(inside)
    shown = b""
    try:
        while block := os.read(terminal, 65536):
            shown += block
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    read_output = process.communicate(timeout=60)
    assert process.returncode == 0, (shown.decode(), *read_output)
    text = shown.decode()
    assert "█" in text
    assert "12/12" in text
    assert "acc 0.2500" in text
    for step in (2, 5, 8, 11):  # between two measurements, which are at steps 1, 6, 7 and 12
        assert f"loss {step}  acc 0.2500 (step {step})" in text
    assert re.search(r"\b\d+ s left", text)
    for epoch in ("epoch 1/2  step 6", "epoch 2/2  step 12"):
        assert text.count(epoch) == 1


def test_a_metric_that_lightning_forks_is_shown_once(tmp_path: Path, read_output: Callable[[], list[str]]) -> None:
    class Forked(Plain):
        def training_step(self, batch: FakeBatch, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log_dict({"train/loss": loss, "train/time_step": 0.5}, on_step=True, on_epoch=True, batch_size=1)
            return loss

    trainer = trainer_with(tmp_path, Console(bar=False))
    trainer.fit(Forked(), **loaders())
    assert {"train/loss_step", "train/loss_epoch"} <= set(trainer.callback_metrics)  # the control
    (line,) = read_output()
    assert (line.count("train/loss"), line.count("train/time_step ")) == (1, 1)
    assert f"train/loss {float(trainer.callback_metrics['train/loss_epoch']):.4f}" in line


# --- dashboard --------------------------------------------------------------------------------------------------------


CONFIG = {"lr": 0.1, "model": {"name": "tiny", "_target_": "mine"}, "shares": [1, 2], "pieces": None, "resume": "last"}


def test_the_gradient_norm_is_that_of_the_step(tmp_path: Path) -> None:
    norms: list[float] = []

    class Watched(Plain):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None)))

    trainer_with(tmp_path, Meter(log_every=4), Dashboard(CONFIG, ""), logger=board(tmp_path)).fit(
        Watched(), **loaders()
    )
    shown = scalars(tmp_path / "tensorboard")["train/grad_norm"]
    assert [step for step, _ in shown] == [1, 4, 6]
    assert [norm for _, norm in shown] == pytest.approx([norms[0], norms[3], norms[5]])


def test_a_curve_that_the_module_draws_itself_is_left_to_it(tmp_path: Path) -> None:
    class Logging(Plain):
        def training_step(self, batch: FakeBatch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss, batch_size=SIZE)
            return loss

    options: dict[str, Any] = {"logger": board(tmp_path), "log_every_n_steps": 2, "epochs": 2}
    trainer_with(tmp_path, Meter(log_every=2), Dashboard(CONFIG, ""), **options).fit(Logging(), **loaders())
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["train/loss"]] == [1, 3, 5, 7, 9, 11]  # Lightning's


def test_the_dashboard_needs_a_meter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"callbacks\.meter"):
        trainer_with(tmp_path, Dashboard(CONFIG, "")).fit(Plain(), **loaders())


# --- several ranks ----------------------------------------------------------------------------------------------------

RANKS = """
import sys; sys.path[:0] = sys.argv[1].split(':')
import logging, pathlib
import plain as t
from lockstep.callbacks import Checkpoint, Console, Meter
from lockstep.vision.callbacks import Dashboard
from lockstep.arithmetic.layout import Layout
from lockstep.strategies import DDP
class Apart(t.Counting):  # the ranks disagree in everything
    def training_step(self, batch, batch_idx):
        values = super().training_step(batch, batch_idx)
        values["loss"] = values["loss"] * (1 + 2 * self.global_rank)
        batch.returned = [{name: value.detach() for name, value in values.items()}]
        return values
    def validation_step(self, batch, batch_idx):
        self.log('val/acc', [0.25, 0.5, 0.125][self.current_epoch] if self.global_rank == 0 else 0.0, batch_size=1)
folder = pathlib.Path(sys.argv[2])
t.torch.set_num_threads(1)
logging.basicConfig(filename=folder / 'log', level='INFO')
callbacks = Meter(log_every=3), Console(bar=False), Dashboard({'lr': 1}, ''), Checkpoint(folder, every=2)
ddp = {'strategy': DDP().build(Layout('ddp', 'cpu', 2, 1, 4, 2)).strategy, 'devices': 2}
trainer = t.trainer_with(folder, *callbacks, epochs=3, logger=t.board(folder), **ddp)
trainer.fit(Apart(), **{**t.loaders(), 'train_dataloaders': t.Loader(seconds=0.02 * trainer.global_rank)})
assert trainer.callback_metrics['train/loss'] == 2 * sum(range(13, 19)) / 6
"""


def test_the_speed_of_data_that_is_fetched_has_its_share_of_waiting() -> None:
    console = Console(bar=False)
    measured = {"workers/step_seconds": 0.5, "workers/data_wait": 0.02}
    for latest, line in (
        (measured | {"data/cache_hits": 1.0}, "1,200 samples/s, 4% waiting"),
        (measured, "1,200 samples/s"),
    ):
        console._meter = SimpleNamespace(samples_per_second=1200.4, latest=latest)  # type: ignore[assignment]
        assert console._speed() == line


@pytest.mark.usefixtures("processes")
def test_two_ranks_measure_together_and_rank_zero_speaks(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    ranks = [
        forks.Fork([str(script), PATHS, str(tmp_path)], tmp_path, os.environ | env) for env in torchrun_environments()
    ]
    read_output = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], read_output
    curves = scalars(tmp_path / "tensorboard")
    assert curves["train/loss"][:3] == [(1, 2.0), (3, 5.0), (6, 10.0)]  # rank one's loss is three times rank zero's
    assert curves["train/acc"][:3] == [(1, 0.25), (3, 0.25), (6, 0.25)]
    assert min(value for _, value in curves["workers/data_wait"]) > 0.02  # rank one's loader; rank zero need not wait
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 1
    assert (tmp_path / "log").read_text().count("INFO:lockstep:epoch") == 3
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 3 * STEPS
    assert step_of(tmp_path / "checkpoints" / "best.ckpt") == 2 * STEPS
