"""Write the measurements of Meter to the loggers, and fill TensorBoard's first page."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lockstep.callbacks.meter import find_meter
from lockstep.errors import UserError
from lockstep.launch.signals import Interrupted
from lockstep.lightning.epochs import is_last_step
from lockstep.report.loggers import hyper_parameters
from lockstep.report.report_lines import peak_lr
from lockstep.step.timing import exclude_from_timing
from lockstep.vision.callbacks.first_page import PICTURE, boards, draw, write

PICTURE_SECONDS = 60.0  # least time between two pictures of the run
MOST_POINTS = 1000  # most points of a training curve in the picture


class Dashboard(Callback):
    """Writes measurements to the loggers from rank zero, whenever `Meter` has measured.

    The values are those of `Meter.latest`, and `train/lr` and `train/grad_norm` of the measured step.
    (`train/grad_norm` is the global norm of the step's gradient after all sums and before clipping.)

    TensorBoard also gets the parts of `first_page`: a picture of the run (`view/run`, with status, best validation,
    test, speed, loss, and accuracy or the metric that the model names as `monitor`), a page of the most important
    curves, the description and the config as text, and a row of the HParams page. The picture is drawn after
    validations, once a minute at most, and at the end. Other loggers get the hyper-parameters.

    Args:
        config: the resolved config as plain containers.
        headline: step, layout and length of the run.
    """

    changes_weights = False  # so the record of settings that affect the weights leaves this callback out

    def __init__(self, config: Mapping[str, Any], headline: str) -> None:
        self._config = config
        self._headline = headline
        model = config.get("model") or {}
        self._monitor = model.get("monitor", "val/acc")
        self._next_picture = time.monotonic() + PICTURE_SECONDS
        self._curves: dict[str, list[tuple[int, float]]] = {}  # points (step, value) by tag since the run began
        self._fits = False
        self._step: dict[str, Any] = {}  # lr and gradient norm of the measured step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        meter = find_meter(trainer)
        if meter is None:
            raise UserError("callbacks.dashboard needs callbacks.meter: keep both, or leave both out")
        self._meter = meter
        self._fits = stage == "fit"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                about = f"{self._headline}\n{peak_lr(trainer.optimizers)}"
                write(logger.experiment, trainer.global_step, self._config, about, self._name)
            elif not (trainer.global_step and isinstance(logger, MLFlowLogger)):  # MLflow's can't change
                parameters: dict[str, Any] = {}
                of_module: Mapping[str, Any] = pl_module.hparams  # Lightning has sent them already
                for name, value in hyper_parameters(self._config):
                    differs = of_module.get(name, value) != value  # trackers have one value of a name
                    parameters[f"run.{name}" if differs else name] = value
                logger.log_hyperparams(parameters)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        strategy: Any = trainer.strategy
        takes_part = trainer.is_global_zero or strategy.weights != "whole"
        if takes_part and trainer.loggers and self._meter.due(trainer, trainer.global_step + 1):
            norm = strategy.gradient_norm(list(pl_module.parameters()))
            self._step = {"train/lr": optimizer.param_groups[0]["lr"], "train/grad_norm": norm}

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if not (self._meter.just_measured and trainer.is_global_zero):
            return
        with exclude_from_timing(trainer):
            shown = {**self._meter.latest, **{tag: float(value) for tag, value in self._step.items()}}
            # Lightning has already sent the values that the module itself logs at steps.
            shown = {tag: value for tag, value in shown.items() if tag not in trainer.logged_metrics}
            self._add_points(trainer.global_step, self._meter.latest, "train/")
            for logger in trainer.loggers:
                logger.log_metrics({"epoch": trainer.current_epoch, **shown}, trainer.global_step)
                if not isinstance(logger, TensorBoardLogger):  # TensorBoard's writer saves by itself
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
        with suppress(OSError):  # the disk may be full
            self._picture(trainer, "interrupted" if interrupted else "failed")

    @property
    def _name(self) -> str:
        return str(self._monitor).rpartition("/")[2]

    def _mode(self, trainer: Any) -> str | None:
        """Return `max` or `min` of the model's metric, from a callback that follows it too; None without one."""
        followers = [each for each in trainer.callbacks if getattr(each, "monitor", None) == self._monitor]
        return next((each.mode for each in followers if hasattr(each, "mode")), None)

    def _add_points(self, step: int, metrics: Mapping[str, float], split: str) -> None:
        for tag in {f"{split}loss", f"{split}{self._name}"}:
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
            if (points := self._curves.get(self._monitor)) and (mode := self._mode(trainer)):
                sign = 1 if mode == "max" else -1
                _, step, best = max((sign * value, step, value) for step, value in points)
                title += f"\nbest {self._monitor} {best:.4f} (step {step})"
            if (tested := f"test/{self._name}") in trainer.callback_metrics:
                title += f", {tested} {float(trainer.callback_metrics[tested]):.4f}"
            for board in writers:
                board.experiment.add_figure(PICTURE, draw(self._curves, title, self._name), trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"curves": self._curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._fits:  # Lightning restores it for the test of the best checkpoint, too
            self._curves = state_dict["curves"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # A resumed run does not draw earlier points again, so they must be on the disk.
        for board in boards(trainer) if trainer.is_global_zero else []:
            board.experiment.flush()
