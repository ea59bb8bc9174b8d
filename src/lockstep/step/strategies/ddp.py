"""`strategy=ddp`: Lightning's DDPStrategy, with what a step in pieces needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor, nn
from torch.nn import Module, Parameter

from lockstep.arithmetic.layout import Refusal
from lockstep.step.strategies.single import PieceMixin


class SettledDDP(nn.parallel.DistributedDataParallel):
    """Its buckets are from the first step on what they stay. torch makes a start's first backward pass with one bucket,
    and new ones from what it has seen; a ring adds an element's parts in the order that its place in a bucket gives, so
    on three or more ranks a run that goes on would make its first step with other bits.

    Private, since nothing public settles them: here they follow from the parameters, last to first, as gradients come.
    """

    def __init__(self, module: Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]


class DistributedDataParallel(PieceMixin, DDPStrategy):
    """A process per device.

    Buckets are views of the gradients (no copy), buffers are not broadcast (running statistics are averaged once a
    step, see `lockstep.step.batch_norm`), and evaluation runs on the plain module, so that ranks may have different
    numbers of batches.

    Args:
        compression: gradients on the wire: `none`, `bf16`, `fp16` or `powersgd` (Vogels et al., PowerSGD, 2019).
        sync_batchnorm: BatchNorm over the pieces that run at once (CUDA).
    """

    def __init__(self, compression: str = "none", sync_batchnorm: bool = False) -> None:
        super().__init__(gradient_as_bucket_view=True, broadcast_buffers=False)
        self._compression = compression
        self._apart = False
        self._inside = False
        self._shared: dict[str, Tensor] = {}
        self._parameters: list[Parameter] = []
        self._trained: list[bool] = []
        self._left: list[tuple[int, int] | None] = []
        if sync_batchnorm:
            self._layer_sync = TorchSyncBatchNorm()

    def _setup_model(self, model: Module) -> Any:
        self._parameters = list(model.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        device_ids = self.determine_ddp_device_ids()
        with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):  # torch's notes on CUDA
            return SettledDDP(model, device_ids=device_ids, **self._ddp_kwargs)

    @property
    def outdated(self) -> bool:
        """Whether other parameters are trained than when DDP was made: frozen or unfrozen since."""
        return [parameter.requires_grad for parameter in self._parameters] != self._trained

    def remember(self, micro_batches: int) -> None:
        """Takes down, before DDP's turn, which gradients the `turns` before it have left."""
        self._left = [_state(p.grad) for p in self._parameters] if micro_batches else [None] * len(self._parameters)

    def unreached(self) -> list[str]:
        """Names of the trained parameters whose gradient DDP's backward pass left as it was: none, or earlier turns'.
        One that it reached has been added to, and lies in a bucket."""
        pairs = zip(self._parameters, self._left, strict=True)
        missing = {id(p) for p, left in pairs if p.requires_grad and _state(p.grad) == left}
        if not missing:
            return []
        named = self.lightning_module.named_parameters()  # type: ignore[union-attr]
        return [name for name, p in named if id(p) in missing]

    def _register_ddp_hooks(self) -> None:
        """Lightning registers hooks on CUDA only; gloo takes them too."""
        if self._compression == "none":
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        model: Any = self.model
        if self._compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            model.register_comm_hook(None, hooks[self._compression])

    @contextmanager
    def micro_batch(self, micro_batch: Any, seeds: list[int]) -> Iterator[None]:
        """Inside, `self.log(..., sync_dist=True)` does not talk to other ranks: they may have fewer turns."""
        self._inside = True
        try:
            with super().micro_batch(micro_batch, seeds):
                yield
        finally:
            self._inside = False

    def share_logged(self, results: Mapping[str, Any]) -> None:
        """After a step in which every rank had a turn: what they have logged in their last ones with `sync_dist=True`,
        together."""
        for key, result in results.items():
            new = result._forward_cache is not self._shared.get(key)  # not left from a step before
            if new and result.is_tensor and result.meta.on_step and result.meta.sync.should:
                self._shared[key] = result._forward_cache = result.meta.sync(result._forward_cache)

    def hold_logged(self, results: dict[str, Any]) -> None:
        """After a step in which a rank had no turn: it holds what others have logged, without a value, and joins what
        Lightning starts for that at the epoch's end. One that had a turn in an earlier step of this epoch does already,
        but the epoch may have gone on from a checkpoint here."""
        mine = {key: _described(result) for key, result in results.items() if not result.has_reset}
        told: list[Any] = [None] * self.world_size
        dist.all_gather_object(told, mine)
        for key, (meta, should, rank_zero_only, dtype) in chain.from_iterable(each.items() for each in told):
            if key not in results:
                meta.sync = _Sync(fn=self.reduce, _should=should, rank_zero_only=rank_zero_only)
                result = results[key] = _ResultMetric(meta, is_tensor=dtype is not None).to(self.root_device)
                if dtype is None:
                    result.value = self.lightning_module.get_submodule(meta.metric_attribute)  # type: ignore[union-attr]
                else:
                    result.value = result.value.to(dtype)
            results[key].has_reset = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Turns inside keep their gradients to this process. The plain module computes them: DDP's forward pass has
        nothing to add, and its second one talks to all ranks (it rebuilds buckets), of which one may have no sample."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._apart:
            return super().training_step(*args, **kwargs)
        with self._plain("train"):
            return self.lightning_module.training_step(*args, **kwargs)  # type: ignore[union-attr]

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Lightning takes the mean of whole numbers in whole numbers: 18 samples on 4 ranks would be 4 on each, and
        means that `self.log(..., sync_dist=True)` divides by it too large (Lightning #21859)."""
        if self._inside:
            return tensor
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._inside:
            raise Refusal(
                "strategy=ddp: training_step can't gather from other ranks: these may have fewer pieces, and a step "
                "would be another one on each layout; gather in validation, or log with sync_dist=True"
            )
        return super().all_gather(tensor, group, sync_grads)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._plain("val"):
            return self.lightning_module.validation_step(*args, **kwargs)  # type: ignore[union-attr]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._plain("test"):
            return self.lightning_module.test_step(*args, **kwargs)  # type: ignore[union-attr]

    @contextmanager
    def _plain(self, stage: str) -> Iterator[None]:
        with getattr(self.precision_plugin, f"{stage}_step_context")():
            yield


def _described(result: _ResultMetric) -> tuple[_Metadata, bool, bool, torch.dtype | None]:
    """What another process needs to make a result like this one: its metadata, how it is shared, its type."""
    sync = result.meta.sync
    return (
        replace(result.meta, _sync=None),
        sync.should,
        sync.rank_zero_only,
        result.value.dtype if result.is_tensor else None,
    )


def _state(gradient: Tensor | None) -> tuple[int, int] | None:
    """Where a gradient lies and how often it was written to: a reference would keep the memory of what DDP moves."""
    return None if gradient is None else (gradient.data_ptr(), gradient._version)
