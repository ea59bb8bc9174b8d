"""The LightningModule that trains any net which maps images to logits."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import fraction
from lockstep.step.hooks import overrides
from lockstep.step.metrics import Evaluation
from project.models.optimizer import build_optimizer
from project.models.schedule import lr_factor

Batch = tuple[Tensor, Tensor]
MOST_COUNTED = 8192  # samples of which predictions and labels wait to be added up


class ImageClassifier(LightningModule):
    """Classifies images [n, channels, image_size, image_size] float into num_classes; labels are int64 [n].

    lr is the peak learning rate of a whole step (batch_size samples); optimizer and scheduler are the plain dicts of
    conf/optimizer and conf/scheduler; total_steps counts the optimizer steps of the whole run. Override `losses` for
    another loss. Refusal: label_smoothing, schedule or optimizer out of range.
    """

    confusion: Tensor | None = None  # of the last evaluation: int64 [C, C] on the CPU, row = label, column = prediction

    def __init__(
        self,
        net: nn.Module,
        *,
        channels: int,
        image_size: int,
        num_classes: int,
        lr: float,
        optimizer: dict[str, Any],
        scheduler: dict[str, Any],
        total_steps: int,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise Refusal(f"num_classes={num_classes}: a classifier needs two at least, the data set's Spec names them")
        fraction("model.label_smoothing", label_smoothing)
        lr_factor(total_steps, **scheduler)  # refuses a schedule before anything is trained,
        build_optimizer(nn.Linear(1, 1), lr, **optimizer)  # and an optimizer
        self.save_hyperparameters(ignore=["net"], logger=False)  # for load_from_checkpoint
        self.net, self.num_classes, self.label_smoothing = net, num_classes, label_smoothing
        self.lr, self.optimizer, self.scheduler, self.total_steps = lr, optimizer, scheduler, total_steps
        self.example_input_array = torch.zeros(2, channels, image_size, image_size)
        # Rows: since train_totals was last reset, since the epoch began. Columns: sum of losses, correct, samples.
        # No buffer: DDP broadcasts those from rank zero, and they belong to the weights.
        self._sums = torch.zeros(2, 3, dtype=torch.float64)
        self._sums_epoch = -1
        self._counted: list[tuple[Tensor, Tensor, Tensor]] = []  # pieces that are not in the sums yet
        self.evaluation = Evaluation(num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Loss of each sample [n]; their mean is trained on. Labels are smoothed in training only."""
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = self.losses(logits, y).mean()
        self._count(loss.detach(), logits, y)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        own = overrides(self, "losses", ImageClassifier)  # whose weights may be float32
        self.evaluation.update(self.losses(logits if own else logits.double(), y).double(), logits, y)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logits [n, C]."""
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self, self.lr, **self.optimizer)
        schedule = LambdaLR(optimizer, lr_factor(self.total_steps, **self.scheduler))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # Training metrics, on the device, read by callbacks when they log. Many pieces are added at a time: done for each,
    # the seven small operations would take a small network half a per cent of its step.

    def _count(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        self._counted.append((loss, logits.argmax(1), y if y.ndim == 1 else y.argmax(1)))  # mixed labels are [n, C]
        if len(self._counted) >= min(64, MOST_COUNTED // len(y)):
            self._totals()

    def _totals(self) -> Tensor:
        """The sums, with what waited; they may be written to."""
        if self._counted:
            _, found, labels = zip(*self._counted, strict=True)
            loss = torch.stack([loss.double() * len(y) for loss, _, y in self._counted]).sum()
            correct = (torch.cat(found) == torch.cat(labels)).sum()
            samples = loss.new_full((), sum(map(len, labels)))
            self._sums = self._sums.to(loss.device) + torch.stack((loss, correct, samples))
            self._counted.clear()
        return self._sums

    def train_totals(self, reset: bool) -> Tensor:
        """[sum of losses, correct, samples] float64 of THIS process since the last reset, on its device."""
        since = self._totals()[0]
        totals = since.clone()
        if reset:
            since.zero_()
        return totals

    def _summed(self, sums: Tensor) -> Tensor:
        """`sums` added over all processes, on the CPU; every process must call it."""
        return self.trainer.strategy.reduce(sums.to(self.device, copy=True), reduce_op="sum").cpu()

    def on_train_epoch_start(self) -> None:
        # Not at the epoch's end: a checkpoint taken there, or in mid-epoch, says which epoch its totals belong to.
        if self._sums_epoch != self.current_epoch:
            self._totals()[1], self._sums_epoch = 0, self.current_epoch

    def on_train_epoch_end(self) -> None:
        loss, correct, samples = self._summed(self._totals()[1]).tolist()
        if samples:
            # Not to the loggers: there, the dashboard draws the means between two of its points under these names.
            self._log({"train/loss": loss / samples, "train/acc": correct / samples}, logger=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["train_totals"] = {"epoch": self._sums_epoch, "sums": self._summed(self._totals())}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if saved := checkpoint.get("train_totals"):
            # The saved sums are those of all processes, however many these were: one carries them on.
            self._sums = saved["sums"].clone() if self.global_rank == 0 else torch.zeros_like(saved["sums"])
            self._sums_epoch = saved["epoch"]
            self._counted.clear()
        own = type(self).configure_optimizers is not ImageClassifier.configure_optimizers
        if checkpoint.get("optimizer_states") and not own:
            self._follow_config(checkpoint)

    def _follow_config(self, checkpoint: dict[str, Any]) -> None:
        """A resumed run's lr, momentum and so on are those of its config, not of the run before: only what the
        optimizer has gathered is kept."""
        made = self.configure_optimizers()
        optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
        groups, counted = checkpoint["optimizer_states"][0]["param_groups"], checkpoint["lr_schedulers"][0]
        for group, new, factor in zip(groups, optimizer.param_groups, schedule.lr_lambdas, strict=False):
            group |= {name: value for name, value in new.items() if name != "params"}
            group["lr"] = self.lr * factor(counted["last_epoch"])
        counted["base_lrs"] = schedule.base_lrs

    # Evaluation: counted in integers (see metrics.py), logged at its end.

    def on_validation_epoch_start(self) -> None:
        self.evaluation.reset()

    def on_test_epoch_start(self) -> None:
        self.evaluation.reset()

    def on_validation_epoch_end(self) -> None:
        self._log_eval("val")

    def on_test_epoch_end(self) -> None:
        self._log_eval("test")

    def _log_eval(self, stage: str) -> None:
        found, self.confusion = self.evaluation.compute()
        self._log({f"{stage}/{name}": value for name, value in found.items()})

    def _log(self, values: dict[str, float], logger: bool = True) -> None:
        # All processes hold the same numbers. A maximum keeps them, where Lightning's mean over 3 ranks could round,
        # and without sync_dist it warns. float64 keeps counts above 2**24 whole.
        tensors = {k: torch.tensor(v, dtype=torch.float64, device=self.device) for k, v in values.items()}
        self.log_dict(tensors, logger=logger, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
