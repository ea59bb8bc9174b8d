"""What keeps ranks together: each has a sample to evaluate, and holds the same weights."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torchmetrics import Metric

from lockstep.step.lightning_quirks import forget_logged

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class DummyBatchOnEmptyRank(Callback):
    """Where an evaluation has fewer samples than ranks, one without a sample evaluates one all the same, so that it
    joins every collective that `self.log` and metrics start at the evaluation's end, and then forgets it: metrics and
    logged means of the batch are reset."""

    def __init__(self) -> None:
        self._updates: list[tuple[Metric, int]] = []

    def _take_down(self, trainer: Any, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self._updates = [(part, part.update_count) for part in pl_module.modules() if isinstance(part, Metric)]

    def _forget(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not trainer.datamodule.stand_in("test" if trainer.testing else "val"):
            return
        for metric, before in self._updates:
            if metric.update_count != before:  # others are those of the epoch that is under way
                metric.reset()
        forget_logged(trainer)

    on_validation_batch_start = on_test_batch_start = _take_down
    on_validation_batch_end = on_test_batch_end = _forget


class Diverged(Exception):
    """A rank's weights are not those of the others."""


class ReplicaConsistencyCheck(Callback):
    """At the start and before each checkpoint, compares a checksum of the parameters' bits over all ranks, with one
    all-gather of a number."""

    def _compare(self, trainer: Any, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.datamodule.layout.replicas == 1:
            return
        sums = trainer.strategy.all_gather(_checksum(pl_module)).flatten().tolist()
        usual = max(sums, key=sums.count)  # of two ranks, rank zero's
        others = [str(rank) for rank, checksum in enumerate(sums) if checksum != usual]
        if others:
            ranks = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"
            first = sums.index(usual)
            raise Diverged(f"after step {trainer.global_step} the weights of {ranks} are not those of rank {first}")

    on_train_start = on_save_checkpoint = _compare


def _checksum(module: torch.nn.Module) -> torch.Tensor:
    """A sum over the bits of all parameters, int64: elements weigh 1, tensors by their position."""
    total = torch.zeros((), dtype=torch.int64, device=next(module.parameters()).device)
    for position, parameter in enumerate(module.parameters()):
        bits = parameter.detach().contiguous().view(-1).view(INTEGERS[parameter.element_size()])
        total += bits.sum(dtype=torch.int64) * (2 * position + 1)
    return total
