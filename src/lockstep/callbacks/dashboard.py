"""Curves: what Meter measured, and validation, against optimizer steps and against samples seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

from lockstep.arithmetic.layout import Refusal
from lockstep.callbacks import first_page
from lockstep.callbacks.meter import Meter, aside, find
from lockstep.callbacks.pace import Pace
from lockstep.callbacks.pictures import MOST_CLASSES, boards, by_class, data_spec
from lockstep.run.checks import flag

HISTOGRAM_SECONDS = 30.0  # least time between two sets of histograms


class Dashboard(Callback):
    """Writes to the Trainer's loggers, from rank zero, whenever `Meter` has measured.

    Against optimizer steps: what `Meter.latest` holds, `lr` and `grad_norm` (global norm of the step's gradient
    after all sums, before clipping) of the step measured; after validation `val/...` and `val_class/<class>`, the
    accuracy of each class. On TensorBoard also `train_by_samples/...` and `val_by_samples/...` against samples seen, by
    which runs with different batch sizes can be compared, and what `first_page` has: the page of curves that matter,
    start-up line and config as text, the model's graph, a row of the HParams page. Other loggers get the
    hyper-parameters of that row.

    Args:
        config: resolved config, plain containers; None: no text and no hyper-parameters.
        headline: the run in one line; None: no such text.
        histograms: also show weights and gradients, of measured steps, once in HISTOGRAM_SECONDS.
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, headline: str | None = None, histograms: bool = False
    ) -> None:
        self.histograms = flag("callbacks.dashboard.histograms", histograms)
        self.config = config
        self.headline = headline
        self._meter: Meter
        self._pace = Pace(HISTOGRAM_SECONDS)
        self._final: dict[str, float] = {}
        self._drawn = False  # the graph
        self._by_samples: list[Any] = []
        self._step: dict[str, Any] = {}  # lr and gradient of a step that will be measured

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        meter = find(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if meter is None or callbacks.index(meter) > callbacks.index(self):
            raise Refusal("callbacks.dashboard shows what callbacks.throughput measures: keep that one, above it")
        self._meter = meter

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self.config is not None:
            for logger in trainer.loggers:
                if not isinstance(logger, TensorBoardLogger):
                    logger.log_hyperparams(dict(first_page.hyper_parameters(self.config)))
        for board in boards(trainer):
            with aside(trainer):
                first_page.write(board.experiment, trainer.global_step, self.config, self.headline)
            if self.config is not None:
                first_page.write_row(board.log_dir, self.config, {}, trainer.global_step)
            # In a folder of its own: what a resumed run purges after a step must not be measured in samples.
            seen = self._meter.samples_seen
            self._by_samples.append(SummaryWriter(f"{board.log_dir}/by_samples", purge_step=seen + 1))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.loggers and trainer.is_global_zero and self._meter.due(trainer, trainer.global_step + 1):
            gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            self._step = {"lr": optimizer.param_groups[0]["lr"], "grad_norm": torch.nn.utils.get_total_norm(gradients)}
            if self.histograms and self._pace.due:
                with self._pace.spend():
                    self._add_histograms(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter.fresh and trainer.is_global_zero:
            with aside(trainer):
                step = {tag: float(value) for tag, value in self._step.items()}
                own = set() if hasattr(pl_module, "train_totals") else set(trainer.callback_metrics)
                self._write(trainer, {**self._meter.latest, **step}, skip=own)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        metrics = {tag: float(value) for tag, value in trainer.callback_metrics.items() if tag.startswith("val/")}
        confusion = getattr(pl_module, "confusion", None)
        if confusion is not None and len(confusion) <= MOST_CLASSES:
            metrics |= by_class(confusion, _classes(trainer, len(confusion)), "val_class")
        self._write(trainer, metrics, skip=set(trainer.logged_metrics))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not self._drawn:  # not earlier: nobody waits for it before the first step
            self._drawn = True
            with aside(trainer):
                for board in boards(trainer):
                    first_page.add_graph(board.experiment, trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_final(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_final(trainer)

    def _write(self, trainer: Trainer, metrics: Mapping[str, float], skip: Iterable[str]) -> None:
        """`skip`: what the module itself logs against steps. It is there already, by Lightning's hand."""
        samples = self._meter.samples_seen
        by_step = {tag: value for tag, value in metrics.items() if tag not in skip}
        by_samples = {
            tag.replace("/", "_by_samples/", 1): value
            for tag, value in metrics.items()
            if tag in ("train/loss", "train/acc", "val/loss", "val/acc")
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_metrics(by_step, trainer.global_step)
            else:
                logger.log_metrics({**by_step, "samples": samples}, trainer.global_step)
                logger.save()
        for writer in self._by_samples:
            for tag, value in by_samples.items():
                writer.add_scalar(tag, value, samples)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # What was drawn before a checkpoint is never drawn again, so it must be on the disk.
        for board in boards(trainer) if trainer.is_global_zero else []:
            board.experiment.flush()
        for writer in self._by_samples:
            writer.flush()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for writer in self._by_samples:
            writer.close()

    def _write_final(self, trainer: Trainer) -> None:
        """The HParams row anew, with what is known by now."""
        if not trainer.is_global_zero or self.config is None:
            return
        found = trainer.callback_metrics
        self._final |= {tag: float(found[tag]) for tag in first_page.FINAL if tag in found}
        if (speed := self._meter.samples_per_second) is not None:
            self._final |= {"throughput/samples_per_second": speed, "time/seconds": self._meter.seconds}
        for board in boards(trainer):
            first_page.write_row(board.log_dir, self.config, self._final, trainer.global_step)

    def _add_histograms(self, trainer: Trainer, module: LightningModule) -> None:
        step = trainer.global_step + 1  # the one that is about to end
        for board in boards(trainer):
            for name, parameter in module.named_parameters():
                board.experiment.add_histogram(f"weights/{name}", parameter.detach(), step)
                if parameter.grad is not None and bool(parameter.grad.isfinite().all()):
                    board.experiment.add_histogram(f"gradients/{name}", parameter.grad, step)


def _classes(trainer: Trainer, count: int) -> list[str]:
    """The data's class names, else their numbers."""
    spec = data_spec(trainer)
    names = getattr(spec, "classes", None)
    return [str(name) for name in (names if names is not None and len(names) == count else range(count))]
