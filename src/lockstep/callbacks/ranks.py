"""Give every rank a sample to evaluate, and check that all ranks have the same weights."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lockstep.launch.process_group import gather_objects
from lockstep.step.collectives import MetricStates
from lockstep.step.lightning_quirks import remove_logged

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes


class DummyBatchOnEmptyRank(Callback):
    """Removes the results of the dummy sample that a rank evaluates if an evaluation has fewer samples than ranks.

    The rank evaluates it to join every collective that `self.log` and metrics start at the end of the evaluation. This
    callback then restores the metrics, and removes the logged means of that batch.
    """

    def __init__(self) -> None:
        self._states: MetricStates | None = None

    def _save_metrics(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        is_empty = trainer.datamodule.num_local_samples("test" if trainer.testing else "val") == 0
        self._states = MetricStates(trainer) if is_empty else None

    def _remove_results(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._states is not None:
            self._states.restore(trainer)
            self._states = None
            remove_logged(trainer)

    on_validation_batch_start = on_test_batch_start = _save_metrics
    on_validation_batch_end = on_test_batch_end = _remove_results


class Diverged(Exception):
    """The weights of a rank differ from those of the other ranks."""


class ReplicaConsistencyCheck(Callback):
    """Compares the parameters of all ranks at the start and before each checkpoint.

    It compares a checksum of their bits.
    """

    def _compare(self, trainer: Any, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.datamodule.layout.replicas == 1:
            return
        sums = gather_objects(int(_checksum(pl_module)))
        usual = max(sums, key=sums.count)  # with two ranks that differ, this is rank zero's
        others = [str(rank) for rank, checksum in enumerate(sums) if checksum != usual]
        if others:
            ranks = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"
            first = sums.index(usual)
            raise Diverged(f"after step {trainer.global_step} the weights of {ranks} differ from those of rank {first}")

    on_train_start = on_save_checkpoint = _compare


def _checksum(module: torch.nn.Module) -> torch.Tensor:
    """Return a sum over the bits of all parameters, int64 and 0-dim. Each tensor has a weight by its position."""
    total = torch.zeros((), dtype=torch.int64, device=next(module.parameters()).device)
    for position, parameter in enumerate(module.parameters()):
        bits = parameter.detach().contiguous().view(-1).view(INTEGERS[parameter.element_size()])
        total += bits.sum(dtype=torch.int64) * (2 * position + 1)
    return total
