"""Write the measurements of Meter to the loggers, and fill TensorBoard's first page."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from torch.optim import Optimizer

from lockstep.callbacks.meter import find_meter
from lockstep.errors import UserError
from lockstep.report.loggers import hyper_parameters
from lockstep.report.report_lines import peak_lr
from lockstep.step.timing import exclude_from_timing
from lockstep.vision.callbacks.first_page import boards, write


class Dashboard(Callback):
    """Writes measurements to the loggers from rank zero, whenever `Meter` has measured.

    The values are those of `Meter.latest`, and `train/lr` and `train/grad_norm` of the measured step.
    (`train/grad_norm` is the global norm of the step's gradient after all sums and before clipping.)

    TensorBoard also gets the parts of `first_page`: a page of the most important curves, the description and the config
    as text, and a row of the HParams page. Other loggers get the hyper-parameters.

    Args:
        config: the resolved config as plain containers.
        headline: step, layout and length of the run.
    """

    changes_weights = False  # so the record of settings that affect the weights leaves this callback out

    def __init__(self, config: Mapping[str, Any], headline: str) -> None:
        self._config = config
        self._headline = headline
        monitor = (config.get("model") or {}).get("monitor", "val/acc")
        self._metric = str(monitor).rpartition("/")[2]
        self._step: dict[str, Any] = {}  # lr and gradient norm of the measured step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        meter = find_meter(trainer)
        if meter is None:
            raise UserError("callbacks.dashboard needs callbacks.meter: keep both, or leave both out")
        self._meter = meter

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                about = f"{self._headline}\n{peak_lr(trainer.optimizers)}"
                write(logger.experiment, trainer.global_step, self._config, about, self._metric)
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
            for logger in trainer.loggers:
                logger.log_metrics({"epoch": trainer.current_epoch, **shown}, trainer.global_step)
                if not isinstance(logger, TensorBoardLogger):  # TensorBoard's writer saves by itself
                    logger.save()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # A resumed run does not log earlier points again, so they must be on the disk.
        for board in boards(trainer) if trainer.is_global_zero else []:
            board.experiment.flush()
