"""`strategy=ddp`: Lightning's DDPStrategy, adapted to steps in pieces."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import Parameter

from lockstep.errors import UserError
from lockstep.step.batch import MicroBatch
from lockstep.step.strategy import Action, PieceStrategy
from lockstep.strategies.torch_quirks import FixedBucketsDDP
from lockstep.text import join_names


class DistributedDataParallel(PieceStrategy, DDPStrategy):
    """A process per device.

    Gradients are views of DDP's buckets, which saves a copy. Buffers are not broadcast, because they are averaged
    once per step (see `lockstep.step.buffers`). Evaluation runs on the plain module, so ranks may have
    different numbers of batches.

    Args:
        compression: compression of the gradients that are sent: `none`, `bf16`, `fp16` or `powersgd` (Vogels et al.,
            PowerSGD, 2019).
        sync_batchnorm: compute BatchNorm over the pieces that run at the same time (GPU only).
    """

    def __init__(self, compression: str = "none", sync_batchnorm: bool = False) -> None:
        super().__init__()
        self._compression = compression
        self._sync_batchnorm = sync_batchnorm
        self._reducer_sends = False  # whether DDP's reducer sends this step's gradients, in the last passes
        self._reducer_active = False  # whether these passes run now
        self._grads_at_start: list[Any] = []  # address and version of each gradient when the reducer was started
        self._inside = False  # whether a micro-batch's forward pass runs, in which collectives are refused
        self._parameters: list[Parameter] = []
        self._trained: list[bool] = []

    def configure_ddp(self) -> None:
        """Wrap the module and register the compression, also on CPU, where Lightning would not register it."""
        module: Any = self.model
        if self._sync_batchnorm:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # replaces layers and keeps their tensors
        self._parameters = list(module.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        device_ids = self.determine_ddp_device_ids()
        # a side stream, as in Lightning: torch's notes on CUDA ask for it, so that DDP can be captured in a graph
        with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):
            ddp = FixedBucketsDDP(
                module,
                device_ids=device_ids,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                # PowerSGD's hook sends several messages per bucket. With several buckets, their order could differ
                # between ranks.
                bucket_cap_mb=1 << 20 if self._compression == "powersgd" else None,
            )
        if self._compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self._compression != "none":
            hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            ddp.register_comm_hook(None, hooks[self._compression])
        self.model = ddp

    def use_reducer(self, wanted: bool) -> bool:
        """Let DDP's reducer sum the gradients of the next step, if this is wanted.

        It can't if parameters were frozen or unfrozen since DDP wrapped the module, because DDP would leave them out.
        """
        unchanged = [parameter.requires_grad for parameter in self._parameters] == self._trained
        self._reducer_sends = wanted and unchanged
        return self._reducer_sends

    def schedule(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Action, int]]:
        """Yield the passes of a step's micro-batches in order. DDP's reducer takes part in those of the last one."""
        for action, index in super().schedule(micro_batches):
            reduces = self._reducer_sends and index == len(micro_batches) - 1
            if reduces and action is Action.FORWARD:
                self._start_reducer(first=index == 0)
            yield action, index
            if reduces and action is Action.BACKWARD:
                self._finish_reducer()

    def _start_reducer(self, first: bool) -> None:
        """Let DDP's reducer sum over all processes in the passes until `_finish_reducer`.

        Args:
            first: whether these are the first passes of a step. If not, the gradients of earlier passes are added.
        """
        self._grads_at_start = [None if first else _state(p.grad) for p in self._parameters]
        self._reducer_active = True

    def _finish_reducer(self) -> None:
        """Check that the backward pass has produced a gradient for every trained parameter.

        DDP writes each of them to a bucket, so the gradient's address or version changes.

        Raises:
            UserError: a trained parameter's gradient has not changed.
        """
        self._reducer_active = False
        pairs = zip(self._parameters, self._grads_at_start, strict=True)
        if missing := {id(p) for p, at_start in pairs if p.requires_grad and _state(p.grad) == at_start}:
            names = join_names(name for name, p in self.lightning_module.named_parameters() if id(p) in missing)
            remedy = "use them in every training_step, or freeze them by requires_grad_(False)"
            raise UserError(f"strategy=ddp: no gradient has reached {names} in a step's last piece: {remedy}")

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> Iterator[None]:
        """Return the context of a micro-batch's forward pass. It refuses collectives."""
        self._inside = True
        try:
            with super().micro_batch(micro_batch, seed):
                yield
        finally:
            self._inside = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`: through DDP if its reducer is active, else on the plain module.

        A forward pass through DDP may communicate with all ranks: the second one rebuilds the buckets. A rank without a
        sample makes no forward pass, so the others would wait for it.
        """
        if self._reducer_active:
            return DDPStrategy.training_step(self, *args, **kwargs)
        return super().training_step(*args, **kwargs)

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a value over ranks, with means of integers in float64.

        Lightning truncates the mean of integers: that of 18 samples on 4 ranks would be 4, not 4.5. The means of
        `self.log(..., sync_dist=True)` are divided by it, so they would be too large (Lightning #21859).
        """
        self._refuse_inside("log with sync_dist=True")
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all ranks, outside of a micro-batch's forward pass."""
        self._refuse_inside("gather from other ranks")
        return super().all_gather(tensor, group, sync_grads)

    def _refuse_inside(self, what: str) -> None:
        """Raise UserError inside a micro-batch's forward pass."""
        if self._inside:
            why = "since other ranks may have fewer pieces"
            instead = "return the number beside the loss, and the run logs its mean over all samples"
            raise UserError(f"strategy=ddp: training_step can't {what}, {why}: {instead}")


def _state(gradient: Tensor | None) -> tuple[int, int] | None:
    """Return a gradient's address and version counter. A reference to it would keep memory that DDP frees."""
    return None if gradient is None else (gradient.data_ptr(), gradient._version)
