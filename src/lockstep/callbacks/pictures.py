"""What a classifier gets wrong: confusion matrix, the worst mistakes, precision-recall curves, accuracy by class."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lockstep.callbacks import drawing
from lockstep.callbacks.meter import aside
from lockstep.callbacks.pace import Pace
from lockstep.callbacks.prediction_stats import THRESHOLDS, PredictionStats, curve
from lockstep.loading import Spec
from lockstep.run.checks import real, whole
from lockstep.step.loop import is_last_step

MOST_CLASSES = 100  # in a confusion matrix, and curves of the accuracy by class: more help nobody
MOST_CURVES = 20  # precision-recall curves; above, only the one over all classes


class Pictures(Callback):
    """Draws on TensorBoard after the test, after the run's last validation, and after others now and then.

    It listens to what `forward` returns in evaluation, so it serves any module that calls `self(x)` on `(x, y)` and
    gets logits or log-probabilities, one for each of the data's classes; nothing is drawn for others. Every rank counts
    its samples, and rank zero draws.

    Args:
        seconds: least time between two validations that are drawn.
        mistakes: images that are shown, those with the largest loss.
    """

    def __init__(self, seconds: float = 60.0, mistakes: int = 24) -> None:
        self.pace = Pace(real(least=0)("callbacks.pictures.seconds", seconds))
        self.mistakes = whole(1)("callbacks.pictures.mistakes", mistakes)
        self._verdicts: PredictionStats | None = None
        self._seen: tuple[Any, Any] = (None, None)  # the last forward pass: what went in, what came out
        self._hook: Any = None

    # --- listening ---

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not boards(trainer):
            return
        if is_last_step(trainer) or trainer.strategy.broadcast(self.pace.due):
            self._listen(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if boards(trainer):
            self._listen(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._count(trainer, batch, "val")

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._count(trainer, batch, "test")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "test")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    def _listen(self, trainer: Trainer, module: LightningModule) -> None:
        spec = data_spec(trainer)
        if spec is not None:
            self._verdicts = PredictionStats(spec, self.mistakes, module.device)
            self._hook = module.register_forward_hook(self._remember)

    def _remember(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self._seen = (args[0] if args else None), output

    def _count(self, trainer: Trainer, batch: Any, split: str) -> None:
        if self._verdicts is None or not isinstance(batch, tuple | list) or len(batch) != 2:
            return
        (x, y), (given, logits) = batch, self._seen
        self._seen = None, None
        idle = trainer.datamodule.stand_in(split)  # type: ignore[attr-defined]
        if given is x and not idle and self._verdicts.fits(x, logits, y):
            self._verdicts.add(x, logits.detach(), y)

    def _leave(self) -> PredictionStats | None:
        found, self._verdicts, self._seen = self._verdicts, None, (None, None)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return found

    # --- drawing ---

    def _finish(self, trainer: Trainer, module: LightningModule, split: str) -> None:
        found = self._leave()
        if found is None:
            return
        with aside(trainer), self.pace.spend():
            found.gather(trainer.strategy, trainer.world_size)
            if trainer.is_global_zero and int(found.confusion.sum()):
                for board in boards(trainer):
                    _draw(board.experiment, found, split, trainer.global_step, getattr(module, "confusion", None))


def _draw(writer: Any, found: PredictionStats, split: str, step: int, own: torch.Tensor | None) -> None:
    classes = [str(name) for name in found.spec.classes]
    confusion, scores = found.confusion.cpu(), found.scores.cpu()
    where = {"val": "validation", "test": "test"}[split]
    right, count = int(confusion.diagonal().sum()), int(confusion.sum())
    if len(classes) <= MOST_CLASSES:
        title = f"{where}, step {step}: {right:,} of {count:,} right"
        writer.add_image(
            f"confusion/{split}", drawing.confusion(confusion.numpy(), classes, title), step, dataformats="HWC"
        )
    if mistakes := found.mistakes():
        images = found.images[:mistakes, : 3 if found.spec.channels >= 3 else 1].permute(0, 2, 3, 1).cpu()
        captions = [
            (f"{sure:.0%} {classes[said]}", f"is {classes[truth]}")
            for said, sure, truth in zip(
                found.predictions.tolist(), found.probabilities.tolist(), found.labels.tolist(), strict=True
            )
        ][:mistakes]
        title = f"{where}, step {step}: the worst {mistakes} of {count - right:,} mistakes, how sure, and what is right"
        sheet = drawing.wrong(images.expand(-1, -1, -1, 3).numpy(), captions, title)
        writer.add_image(f"misclassified/{split}", sheet, step, dataformats="HWC")
    curves = {"all classes": scores.sum(dim=0)}
    if len(classes) <= MOST_CURVES:
        curves |= dict(zip(classes, scores, strict=True))
    for name, counts in curves.items():
        writer.add_pr_curve_raw(f"pr_{split}/{name}", **curve(counts), global_step=step, num_thresholds=THRESHOLDS)
    if (split == "test" or own is None) and len(classes) <= MOST_CLASSES:  # else Dashboard does, at each validation
        for tag, value in by_class(confusion, classes, f"{split}_class").items():
            writer.add_scalar(tag, value, step)


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def data_spec(trainer: Trainer) -> Spec | None:
    """What the run's data are; None where they are not ours."""
    return getattr(getattr(getattr(trainer, "datamodule", None), "splits", None), "spec", None)


def by_class(confusion: torch.Tensor, classes: list[str], group: str) -> dict[str, float]:
    """Accuracy of each class as `<group>/<class>`; confusion int64 [C, C], row = label. A class without a sample has
    none."""
    counts, hits = confusion.sum(dim=1).tolist(), confusion.diagonal().tolist()
    return {f"{group}/{name}": hit / count for name, hit, count in zip(classes, hits, counts, strict=True) if count}
