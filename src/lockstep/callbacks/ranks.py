"""Give every rank a sample to evaluate, and check that all ranks have the same weights and buffers."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lockstep.errors import UserError
from lockstep.launch.process_group import broadcast_from_rank_zero, gather_objects
from lockstep.lightning.logs import remove_logged
from lockstep.step.batch import evaluated_split
from lockstep.step.buffers import module_buffers
from lockstep.step.collectives import MetricStates
from lockstep.text import join_names

LOG = logging.getLogger("lockstep")

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes


class DummyBatchOnEmptyRank(Callback):
    """Removes the results of the dummy sample that a rank evaluates if an evaluation has fewer samples than ranks.

    The rank evaluates it to join every collective that `self.log` and metrics start at the end of the evaluation. This
    callback then restores the metrics, and removes the logged means of that batch.
    """

    def __init__(self) -> None:
        self._states: MetricStates | None = None

    def _save_metrics(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        is_empty = trainer.datamodule.num_local_samples(evaluated_split(trainer)) == 0
        self._states = MetricStates(trainer) if is_empty else None

    def _remove_results(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._states is not None:
            self._states.restore(trainer)
            self._states = None
            remove_logged(trainer)

    on_validation_batch_start = on_test_batch_start = _save_metrics
    on_validation_batch_end = on_test_batch_end = _remove_results


class Diverged(Exception):
    """The weights, or the optimizer, of a rank differ from those of the other ranks."""


class ReplicaConsistencyCheck(Callback):
    """Compares the parameters, buffers and settings of the optimizer of all ranks.

    It does so at the start, before each validation and each checkpoint, and at the end of each epoch and of the run. It
    compares a checksum of their bits. Settings such as the learning rate, which a schedule or callback of one rank may
    change, differ before the weights do. The steps give all ranks the same buffers,
    but a hook outside of the passes may change those of its rank. So that what is validated is what is saved, the other
    ranks then take rank zero's; with exact=true this is an error.
    """

    def __init__(self) -> None:
        self._logged = False

    def _compare(self, trainer: Any, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn is None or trainer.datamodule.layout.replicas == 1:  # no method has begun, or one process
            return
        device = trainer.strategy.root_device
        sums = [
            _checksum(each, device) for each in (trainer.strategy.replicated_parameters(), _buffers(pl_module).values())
        ]
        staged = trainer.strategy.weights == "staged"  # then each has groups of its own
        settings = [] if staged else _settings(trainer.optimizers)
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()
        weights, buffers, digests = zip(*gather_objects((*map(int, sums), digest)), strict=True)
        if others := _unusual(digests):
            names = _names_that_differ(gather_objects(settings))
            raise Diverged(f"after step {trainer.global_step} the optimizer's {names} of {others}")
        if others := _unusual(weights):
            raise Diverged(f"after step {trainer.global_step} the weights of {others}")
        if len(set(buffers)) > 1:
            self._unite_buffers(trainer, pl_module)

    def _unite_buffers(self, trainer: Any, module: LightningModule) -> None:
        """Give all ranks rank zero's buffers. Every rank calls this.

        Raises:
            UserError: with exact=true, or if the buffers of the ranks differ in more than their values.
        """
        local = _buffers(module)
        forms = gather_objects({name: (buffer.shape, buffer.dtype) for name, buffer in local.items()})
        sums = gather_objects({name: int(_checksum([buffer], buffer.device)) for name, buffer in local.items()})
        names = [name for name in dict.fromkeys(chain(*sums)) if len({each.get(name) for each in sums}) > 1]
        what = f"after step {trainer.global_step} buffer {join_names(names)} differs between the ranks"
        remedy = "change it in training_step, or outside of it alike on all ranks"
        if trainer.datamodule.layout.exact or any(each != forms[0] for each in forms):
            raise UserError(f"{what}: {remedy}")
        values = {name: local[name].cpu() for name in names} if trainer.is_global_zero else None
        for name, value in (broadcast_from_rank_zero(values) or {}).items():
            local[name].data.copy_(value)
        if not self._logged and trainer.is_global_zero:
            LOG.warning(f"{what}, so all take rank 0's: {remedy}")
        self._logged = True

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        # `trainer.training` is false here: a fit's validation is a stage of its own
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._compare(trainer, pl_module)

    on_train_start = on_train_epoch_end = on_train_end = on_save_checkpoint = _compare


def _settings(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the plain settings of each group of parameters: those that all ranks should have alike."""

    def plain(value: Any) -> Any:
        return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [
        {name: plain(each) for name, each in group.items() if isinstance(plain(each), bool | int | float | str | tuple)}
        for group in groups
    ]


def _names_that_differ(by_rank: Sequence[list[dict[str, Any]]]) -> str:
    """Return the names of the settings that differ between the ranks, each with its values."""
    names: dict[str, str] = {}
    for groups in zip(*by_rank, strict=True):
        for name in groups[0]:
            if len(values := list(dict.fromkeys(repr(group.get(name)) for group in groups))) > 1:
                names.setdefault(name, f"{name} ({join_names(values, 4)})")
    return join_names(list(names.values()), 4)


def _unusual(sums: Sequence[Any]) -> str:
    """Return text that names the ranks whose checksum differs from the usual one; empty if there are none."""
    usual = max(sums, key=sums.count)  # with two ranks that differ, this is rank zero's
    others = [str(rank) for rank, checksum in enumerate(sums) if checksum != usual]
    return f"rank{'s' * (len(others) > 1)} {', '.join(others)} differ from those of rank {sums.index(usual)}" * bool(
        others
    )


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that all ranks should have alike; those of metrics are each rank's own."""
    pairs = ((path, layer._buffers[name]) for path, layer, name in module_buffers(module))
    return {path: buffer for path, buffer in pairs if buffer is not None}


def _checksum(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a sum over the bits of tensors, int64 and 0-dim. Each tensor has a weight by its position."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for position, tensor in enumerate(tensors):
        numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        bits = numbers.detach().contiguous().view(-1).view(INTEGERS[numbers.element_size()])
        total += bits.sum(dtype=torch.int64).to(device) * (2 * position + 1)
    return total
