"""Curves: what Throughput measured, and validation, against optimizer steps and against samples seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import OmegaConf
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

from lockstep.callbacks.throughput import Throughput, aside, find
from lockstep.layout import Refusal

FINAL = ("val/acc", "val/loss", "test/acc", "test/loss")  # what the HParams page compares runs by
MOST_CLASSES = 100  # more curves than that help nobody


class Dashboard(Callback):
    """Writes to the Trainer's loggers, from rank zero, whenever `Throughput` has measured.

    Against optimizer steps: what `Throughput.latest` holds, `lr` and `grad_norm` (global norm of the step's gradient
    after all sums, before clipping) of the step measured; after validation `val/...` and `val_class/<class>`, the
    accuracy of each class. On TensorBoard also `train_by_samples/...` and `val_by_samples/...` against samples seen, by
    which runs with different batch sizes can be compared, the config as text, and a row of the HParams page with
    `final/...`.

    Args:
        config: resolved config, plain containers; None: no text and no HParams row.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self._meter: Throughput
        self._by_samples: list[Any] = []
        self._step: dict[str, Any] = {}  # lr and gradient of a step that will be measured

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        meter = find(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if meter is None or callbacks.index(meter) > callbacks.index(self):
            raise Refusal("callbacks.dashboard shows what callbacks.throughput measures: keep that one, above it")
        self._meter = meter

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or self.config is None:
            return
        for board in _tensorboards(trainer):
            text = OmegaConf.to_yaml(OmegaConf.create(dict(self.config)))
            board.experiment.add_text("config", f"```yaml\n{text}```", trainer.global_step)
            _add_hparams(board, self.config)
            # In a folder of its own: what a resumed run purges after a step must not be measured in samples.
            seen = self._meter.samples_seen
            self._by_samples.append(SummaryWriter(f"{board.log_dir}/by_samples", purge_step=seen + 1 if seen else None))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.loggers and trainer.is_global_zero and self._meter.due(trainer, trainer.global_step + 1):
            gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            self._step = {"lr": optimizer.param_groups[0]["lr"], "grad_norm": torch.nn.utils.get_total_norm(gradients)}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter.fresh and trainer.is_global_zero:
            with aside(trainer):
                step = {tag: float(value) for tag, value in self._step.items()}
                self._write(trainer, {**self._meter.latest, **step})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        metrics = {tag: float(value) for tag, value in trainer.callback_metrics.items() if tag.startswith("val/")}
        confusion = getattr(pl_module, "confusion", None)
        if confusion is not None and len(confusion) <= MOST_CLASSES:
            metrics |= _by_class(confusion, _classes(trainer, len(confusion)))
        # What the module itself logs to the loggers is there already, by Lightning's hand.
        self._write(trainer, metrics, skip=set(trainer.logged_metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_final(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_final(trainer)

    def _write(self, trainer: Trainer, metrics: Mapping[str, float], skip: Iterable[str] = ()) -> None:
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
        for board in _tensorboards(trainer) if trainer.is_global_zero else []:
            board.experiment.flush()
        for writer in self._by_samples:
            writer.flush()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for writer in self._by_samples:
            writer.close()

    def _write_final(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            found = trainer.callback_metrics
            metrics = {f"final/{tag}": float(found[tag]) for tag in FINAL if tag in found}
            for board in _tensorboards(trainer):
                board.log_metrics(metrics, trainer.global_step)


def _tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def _add_hparams(board: TensorBoardLogger, config: Mapping[str, Any]) -> None:
    """Lightning's `log_hyperparams` would write made-up values of the metrics that are not known yet."""
    from torch.utils.tensorboard.summary import hparams

    for summary in hparams(dict(_flat(config)), {f"final/{tag}": 0.0 for tag in FINAL}):
        board.experiment._get_file_writer().add_summary(summary)


def _flat(config: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, bool | int | float | str) else str(value)


def _by_class(confusion: torch.Tensor, classes: list[str]) -> dict[str, float]:
    """Accuracy of each class; confusion int64 [C, C], row = label. A class without a sample has none."""
    counts = confusion.sum(dim=1).tolist()
    hits = confusion.diagonal().tolist()
    return {f"val_class/{name}": hit / count for name, hit, count in zip(classes, hits, counts, strict=True) if count}


def _classes(trainer: Trainer, count: int) -> list[str]:
    """The data's class names, else their numbers."""
    spec = getattr(getattr(getattr(trainer, "datamodule", None), "splits", None), "spec", None)
    names = getattr(spec, "classes", None)
    return [str(name) for name in (names if names is not None and len(names) == count else range(count))]
