"""`strategy=ddp`: Lightning's DDPStrategy, with what a step in pieces needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.strategies.single import PieceMixin

COMMUNICATION_TIMEOUT = timedelta(minutes=5)  # a rank that is silent for longer is taken for dead


class DistributedDataParallel(PieceMixin, DDPStrategy):
    """A process per device.

    Buckets are views of the gradients (no copy), buffers are not broadcast (running statistics are averaged once a
    step, see `lockstep.running_stats`), and evaluation runs on the plain module, so that ranks may have different
    numbers of batches.

    Args:
        compression: gradients on the wire: `none`, `bf16`, `fp16` or `powersgd` (Vogels et al., PowerSGD, 2019).
        sync_batchnorm: BatchNorm over the pieces that run at once (CUDA).
    """

    def __init__(self, compression: str = "none", sync_batchnorm: bool = False) -> None:
        super().__init__(
            timeout=COMMUNICATION_TIMEOUT,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
        self._compression = compression
        self._apart = False
        self._inside = False
        self._shared: dict[str, Tensor] = {}
        self._parameters: list[Parameter] = []
        self._trained: list[bool] = []
        if sync_batchnorm:
            self._layer_sync = TorchSyncBatchNorm()

    def _setup_model(self, model: Module) -> Any:
        self._parameters = list(model.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        return super()._setup_model(model)

    @property
    def outdated(self) -> bool:
        """Whether other parameters are trained than when DDP was made: frozen or unfrozen since."""
        return [parameter.requires_grad for parameter in self._parameters] != self._trained

    def unreached(self) -> list[str]:
        """Names of the trained parameters that a backward pass left without a gradient."""
        if all(p.grad is not None or not p.requires_grad for p in self._parameters):
            return []
        named = self.lightning_module.named_parameters()  # type: ignore[union-attr]
        return [name for name, p in named if p.grad is None and p.requires_grad]

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
    def turn(self, turn: Any, seeds: list[int]) -> Iterator[None]:
        """Inside, `self.log(..., sync_dist=True)` does not talk to other ranks: they may have fewer turns."""
        self._inside = True
        try:
            with super().turn(turn, seeds):
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
