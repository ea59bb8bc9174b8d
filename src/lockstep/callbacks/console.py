"""Show a run on the console of rank zero: a bar on a terminal, a line per epoch anywhere else."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lockstep.callbacks.meter import Meter, find_meter
from lockstep.checkpoint.callback import Checkpoint
from lockstep.checkpoint.io import weights_in_use
from lockstep.lightning.epochs import is_last_step
from lockstep.step.outputs import numbers_of
from lockstep.text import duration

LOG = logging.getLogger("lockstep")
BAR = "{desc} {bar} {n_fmt}/{total_fmt}{postfix}  {left}"


class Console(Callback):
    """Logs a line per epoch, a line per validation inside an epoch, and the test's result.

    The lines go through the logger `lockstep`, to the console and to train.log. On a terminal, a bar below them shows
    the numbers that `training_step` returned on rank zero a moment ago, and the step that they are of. They are no
    means, and the host does not wait for a GPU to get them. Elsewhere, a long epoch logs its progress from time to
    time, with the latest means of `Meter` and the steps that they are of.

    Args:
        bar: whether to draw the bar; None: when standard error is a terminal.
        refresh_seconds: least time between two redraws of the bar.
        line_seconds: least time between two lines inside an epoch, where there is no bar.
        every_epochs: epochs between two lines; the last epoch always has one.
    """

    changes_weights = False

    def __init__(
        self, bar: bool | None = None, refresh_seconds: float = 0.2, line_seconds: float = 30.0, every_epochs: int = 1
    ) -> None:
        if every_epochs < 1:
            raise ValueError(f"every_epochs={every_epochs}: must be at least 1")
        self._wants_bar = sys.stderr.isatty() if bar is None else bar
        self._pause = refresh_seconds if self._wants_bar else line_seconds
        self._every_epochs = every_epochs
        self._next = math.inf  # time of the next redraw or line; only rank zero sets it
        self._meter: Meter | None = None
        self._shown: dict[str, float] = {}  # the measurement of the last line inside an epoch
        self._bar: Any = None
        self._numbers = ""  # those of a step, as text
        self._arriving: tuple[int, Arriving] | None = None  # a step, and its numbers on their way from the device
        self._drawing = contextlib.ExitStack()  # open while the bar is drawn; log lines then go above the bar
        self._old: dict[str, Any] = {}  # metrics that a line at an earlier step has shown
        self._ended = ""  # the beginning of an epoch's line, until the line is logged

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._meter = find_meter(trainer)
        self._next = time.monotonic() + self._pause
        if self._wants_bar:
            self._drawing.enter_context(logging_redirect_tqdm([LOG]))
            steps = {"total": trainer.estimated_stepping_batches, "initial": trainer.global_step}
            self._bar = self._drawing.enter_context(Bar(**steps, bar_format=BAR, leave=False, dynamic_ncols=True))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch % self._every_epochs == 0:
            self._log_epoch(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + self._pause
        if not self._bar:
            latest = self._meter.latest if self._meter else {}
            train = "" if latest is self._shown else _metrics(latest, "train/")  # a measurement is shown once
            if train and self._meter:
                train += f" ({_steps(*self._meter.measured_steps)})"
            self._shown = latest
            LOG.info(_line(f"{_step(trainer)}/{trainer.estimated_stepping_batches}", train, self._speed()))
            return
        if self._arriving is None and batch.num_local_samples and not batch.skipped:
            self._arriving = trainer.global_step, Arriving(numbers_of(outputs))
        if self._arriving and self._arriving[1].done:
            step, arrived = self._arriving
            self._numbers, self._arriving = f"{_metrics(arrived.numbers)} ({_steps(step, step)})", None
        self._bar.n = trainer.global_step
        self._bar.set_description_str(_epoch(trainer), refresh=False)
        self._bar.set_postfix_str(_line(self._numbers, self._speed()))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking or trainer.is_last_batch or is_last_step(trainer):
            return  # at an epoch's end the epoch's line has these metrics
        LOG.info(_line(_step(trainer), _metrics(self._new_metrics(trainer), "val")))
        self._old = dict(trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            # The module may log more in its own hook, which runs later, so the line is logged at the next hook.
            self._ended = _step(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_epoch(trainer)
        self._stop_bar()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_bar()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        test_metrics = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
        if test_metrics and trainer.is_global_zero:
            path, step = weights_in_use(trainer)
            name = Path(path).name if path else "last weights"
            saved = next((each for each in trainer.checkpoint_callbacks if isinstance(each, Checkpoint)), None)
            by = f" by {saved.monitor}" if saved and path and Path(path) == saved.best_path else ""
            title = f"test ({name}{by}, step {step})"
            LOG.info(_line(title, *(f"{name[5:]} {_short(float(value))}" for name, value in test_metrics.items())))

    # --- lines ---

    def _log_epoch(self, trainer: Trainer) -> None:
        if self._ended:
            lr = f"lr {trainer.optimizers[0].param_groups[0]['lr']:.3g}"
            LOG.info(_line(self._ended, _metrics(self._new_metrics(trainer)), self._speed(), lr))
            self._old = dict(trainer.callback_metrics)
            self._ended, self._next = "", time.monotonic() + self._pause
            self._shown = self._meter.latest if self._meter else {}  # its steps are among those of this line

    def _new_metrics(self, trainer: Trainer) -> dict[str, Any]:
        """Return the metrics that were logged since the last such line. Lightning keeps others: they are older."""
        return {name: value for name, value in trainer.callback_metrics.items() if self._old.get(name) is not value}

    def _speed(self) -> str:
        """Return the speed, and of data that is fetched the share of a step that the slowest rank waits for it."""
        speed = self._meter.samples_per_second if self._meter else None
        if self._meter is None or not speed:
            return ""
        latest = self._meter.latest
        fetches = "data/cache_hits" in latest
        waiting = f", {latest['workers/data_wait'] / latest['workers/step_seconds']:.0%} waiting" if fetches else ""
        return f"{speed:,.0f} samples/s{waiting}"

    def _stop_bar(self) -> None:
        self._drawing.close()
        self._bar, self._next = None, math.inf


class Bar(tqdm):
    """A bar that shows the remaining time with its unit."""

    @property
    def format_dict(self) -> dict[str, Any]:
        known = super().format_dict
        made = known["n"] - known["initial"]
        left = duration(known["elapsed"] / made * (known["total"] - known["n"])) if made > 0 else "?"
        return {**known, "left": f"{left} left"}


class Arriving:
    """A copy of numbers from a device to the host that does not block.

    Args:
        outputs: 0-dim tensors by name, all on one device.
    """

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        self._names = list(outputs)
        values = torch.stack([value.detach().double() for value in outputs.values()])
        self._values = values.to("cpu", non_blocking=True)
        self._event = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None

    @property
    def done(self) -> bool:
        """True when the numbers are on the host."""
        return self._event is None or bool(self._event.query())

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers by name. Read them only when `done`."""
        return dict(zip(self._names, self._values.tolist(), strict=True))


def _epoch(trainer: Trainer) -> str:
    return f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"


def _step(trainer: Trainer) -> str:
    return f"{_epoch(trainer)}  step {trainer.global_step}"


def _steps(first: int, last: int) -> str:
    return f"step {last}" if first == last else f"steps {first}-{last}"


def _metrics(values: Mapping[str, Any], begin: str = "") -> str:
    """Return the metrics whose names start with `begin` as text, without test metrics and counts."""
    names = [name for name in values if name.startswith(begin) and not name.startswith("test/")]
    names = [name for name in names if not name.endswith(("/correct", "/count"))]
    # A metric that is logged for steps and epochs has three names. Keep the plain one.
    names = [n for n in names if not (n.endswith(("_step", "_epoch")) and n.rpartition("_")[0] in values)]
    names.sort(key=lambda name: (not name.startswith("train"), not name.startswith("val")))
    return "  ".join(f"{name} {_short(float(values[name]))}" for name in names)


def _short(value: float) -> str:
    """Return a number as text with four significant digits or so."""
    if value.is_integer() and abs(value) >= 2:
        return f"{value:.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"


def _line(*parts: str) -> str:
    """Join the parts that are not empty."""
    return "  ".join(part for part in parts if part)
