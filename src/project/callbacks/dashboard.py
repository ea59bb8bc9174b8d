"""Curves of what Meter measured, against optimizer steps, and TensorBoard's first page."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lockstep import Interrupted, UserError, exclude_from_timing, find_meter, hyper_parameters, is_last_step, peak_lr
from project.callbacks.first_page import PICTURE, boards, draw, write

PICTURE_SECONDS = 60.0  # least time between two pictures of the run
MOST_POINTS = 1000  # of a training curve in the picture


class Dashboard(Callback):
    """Writes to the Trainer's loggers, from rank zero, whenever `Meter` has measured: what `Meter.latest` holds, and
    `train/lr` and `train/grad_norm` (global norm of the step's gradient after all sums, before clipping) of that step.

    TensorBoard also gets what `first_page` has: the run in one picture (`view/run`: status, best validation, test,
    speed, loss and accuracy; after a validation once a minute at most, and at the end), the page of curves that matter,
    start-up line and config as text, the values of a row of the HParams page. Other loggers get the
    hyper-parameters of that row.

    Args:
        config: resolved config, plain containers.
        headline: step, layout and length of the run.
    """

    changes_weights = False

    def __init__(self, config: Mapping[str, Any], headline: str) -> None:
        self._config = config
        self._headline = headline
        self._next_picture = time.monotonic() + PICTURE_SECONDS
        self._curves: dict[str, list[tuple[int, float]]] = {}  # of the picture, since the run began
        self._step: dict[str, Any] = {}  # lr and gradient of a step that will be measured

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        meter = find_meter(trainer)
        if meter is None:
            raise UserError("callbacks.dashboard shows what callbacks.meter measures: keep that one")
        self._meter = meter

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                about = f"{self._headline}\n{peak_lr(trainer.optimizers)}"
                write(logger.experiment, trainer.global_step, self._config, about)
            elif not (trainer.global_step and isinstance(logger, MLFlowLogger)):  # there they can't be changed
                logger.log_hyperparams(dict(hyper_parameters(self._config)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        strategy: Any = trainer.strategy
        takes_part = trainer.is_global_zero or strategy.staged
        if takes_part and trainer.loggers and self._meter.due(trainer, trainer.global_step + 1):
            norm = strategy.gradient_norm(list(pl_module.parameters()))
            self._step = {"train/lr": optimizer.param_groups[0]["lr"], "train/grad_norm": norm}

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if not (self._meter.fresh and trainer.is_global_zero):
            return
        with exclude_from_timing(trainer):
            shown = {**self._meter.latest, **{tag: float(value) for tag, value in self._step.items()}}
            # What the module itself logs against steps is there already, by Lightning's hand.
            shown = {tag: value for tag, value in shown.items() if tag not in trainer.logged_metrics}
            self._add_points(trainer.global_step, self._meter.latest, "train/")
            for logger in trainer.loggers:
                logger.log_metrics({"epoch": trainer.current_epoch, **shown}, trainer.global_step)
                if not isinstance(logger, TensorBoardLogger):  # which writes by itself
                    logger.save()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._add_points(
            trainer.global_step, {tag: float(value) for tag, value in trainer.callback_metrics.items()}, "val/"
        )
        if time.monotonic() >= self._next_picture and not is_last_step(trainer):
            self._picture(trainer, "running")
            self._next_picture = time.monotonic() + PICTURE_SECONDS

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not (data and data.splits.test is not None and is_overridden("test_step", pl_module)):
            self._picture(trainer, "completed")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._picture(trainer, "completed")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        interrupted = isinstance(exception, Interrupted | KeyboardInterrupt)
        with suppress(OSError):  # a full disk, say
            self._picture(trainer, "interrupted" if interrupted else "failed")

    def _add_points(self, step: int, metrics: Mapping[str, float], split: str) -> None:
        for tag in (f"{split}loss", f"{split}acc"):
            if tag in metrics:
                self._curves.setdefault(tag, []).append((step, metrics[tag]))
                if split == "train/" and len(self._curves[tag]) > MOST_POINTS:
                    del self._curves[tag][1::2]

    def _picture(self, trainer: Trainer, status: str) -> None:
        writers = boards(trainer) if trainer.is_global_zero and self._curves else []
        if not writers:
            return
        with exclude_from_timing(trainer):
            title = f"{status} at step {trainer.global_step}, {self._meter.samples_per_second or 0:,.0f} samples/s"
            if points := self._curves.get("val/acc"):
                best, step = max((acc, step) for step, acc in points)
                title += f"\nbest val/acc {best:.4f} (step {step})"
            if "test/acc" in trainer.callback_metrics:
                title += f", test/acc {float(trainer.callback_metrics['test/acc']):.4f}"
            for board in writers:
                board.experiment.add_figure(PICTURE, draw(self._curves, title), trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"curves": self._curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._curves = state_dict["curves"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # What was drawn before a checkpoint is never drawn again, so it must be on the disk.
        for board in boards(trainer) if trainer.is_global_zero else []:
            board.experiment.flush()
