"""`strategy=ddp`: Lightning's DDPStrategy, with what a step in pieces needs."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import Parameter

from lockstep.errors import UserError
from lockstep.step.batch import MicroBatch
from lockstep.strategies.base import PieceStrategy
from lockstep.strategies.torch_quirks import FixedBucketsDDP
from lockstep.text import join_names


class DistributedDataParallel(PieceStrategy, DDPStrategy):
    """A process per device.

    Buckets are views of the gradients (no copy), buffers are not broadcast (running statistics are averaged once a
    step, see `lockstep.step.batch_norm`), and evaluation runs on the plain module, so that ranks may have different
    numbers of batches.

    Args:
        compression: gradients on the wire: `none`, `bf16`, `fp16` or `powersgd` (Vogels et al., PowerSGD, 2019).
        sync_batchnorm: BatchNorm over the pieces that run at once (CUDA).
    """

    def __init__(self, compression: str = "none", sync_batchnorm: bool = False) -> None:
        super().__init__()
        self._compression = compression
        self._sync_batchnorm = sync_batchnorm
        self._syncs = False  # whether DDP's reducer sums in the passes under way
        self._before: list[Any] = []  # the states of all gradients when they began
        self._inside = False  # of a micro-batch's forward pass, which is not collective
        self._parameters: list[Parameter] = []
        self._trained: list[bool] = []

    def configure_ddp(self) -> None:
        """Wraps the module. Lightning registers communication hooks on CUDA only; gloo takes them too."""
        module: Any = self.model
        if self._sync_batchnorm:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # layers are replaced, their tensors stay
        self._parameters = list(module.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        device_ids = self.determine_ddp_device_ids()
        with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):  # torch's notes on CUDA
            ddp = FixedBucketsDDP(
                module,
                device_ids=device_ids,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                # PowerSGD's hook sends more of a bucket later on: several would meet in another order on each rank
                bucket_cap_mb=1 << 20 if self._compression == "powersgd" else None,
            )
        if self._compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self._compression != "none":
            hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            ddp.register_comm_hook(None, hooks[self._compression])
        self.model = ddp

    @property
    def outdated(self) -> bool:
        """Whether other parameters are trained than when DDP was made: frozen or unfrozen since."""
        return [parameter.requires_grad for parameter in self._parameters] != self._trained

    def start_reducer(self, first: bool) -> None:
        """DDP's reducer sums over all processes in the passes until `finish_reducer`; they are a step's `first`, or add
        to what others have left."""
        self._before = [None if first else _state(p.grad) for p in self._parameters]
        self._syncs = True

    def finish_reducer(self) -> None:
        """After the backward pass.

        Raises:
            UserError: it has left a gradient as it was. One that it reached has been added to, and lies in a bucket.
        """
        self._syncs = False
        pairs = zip(self._parameters, self._before, strict=True)
        if missing := {id(p) for p, left in pairs if p.requires_grad and _state(p.grad) == left}:
            names = join_names(name for name, p in self._module.named_parameters() if id(p) in missing)
            why = "and DDP waits for it: use it in every training_step, or freeze it by requires_grad_(False)"
            raise UserError(f"strategy=ddp: no gradient has reached {names} in a step's last piece, {why}")

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> Iterator[None]:
        self._inside = True
        try:
            with super().micro_batch(micro_batch, seed):
                yield
        finally:
            self._inside = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module computes what DDP does not sum: DDP's forward pass has nothing to add, and its second one
        talks to all ranks (it rebuilds buckets), of which one may have no sample."""
        if self._syncs:
            return DDPStrategy.training_step(self, *args, **kwargs)
        return super().training_step(*args, **kwargs)

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Lightning takes the mean of whole numbers in whole numbers: 18 samples on 4 ranks would be 4 on each, and
        means that `self.log(..., sync_dist=True)` divides by it too large (Lightning #21859)."""
        self._refuse_inside("log with sync_dist=True")
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._refuse_inside("gather from other ranks")
        return super().all_gather(tensor, group, sync_grads)

    def _refuse_inside(self, what: str) -> None:
        if self._inside:
            why = "other ranks may have fewer pieces, and a step would be another one on each layout"
            instead = "return a number beside the loss, and its mean over all samples is measured"
            raise UserError(f"strategy=ddp: training_step can't {what}: {why}; {instead}")

    @property
    def _module(self) -> Any:
        return self.lightning_module


def _state(gradient: Tensor | None) -> tuple[int, int] | None:
    """Where a gradient lies and how often it was written to: a reference would keep the memory of what DDP moves."""
    return None if gradient is None else (gradient.data_ptr(), gradient._version)
