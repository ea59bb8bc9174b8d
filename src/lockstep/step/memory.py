"""What a step does when it runs out of memory: it is repeated with more pieces, or refused with the number that fits.

On a GPU the allocator says when memory is out. A CPU has no memory of its own for each worker, and its kernel promises
more than it has; there `memory_budget` stands in: the bytes of all live tensors are counted at each operation.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.arithmetic.layout import Layout, Refusal

LOG = logging.getLogger("lockstep")
MIB = 1 << 20
T = TypeVar("T")


class Memory:
    """What a device's memory allows.

    Args:
        processes: worker processes over all nodes.
        budget: bytes that this process may use on each of its devices; None: what the device has.
        repeats: a step that runs out of memory is repeated with more pieces, on all ranks alike; else it is refused.

    Attributes:
        peak: most bytes that a step has used so far, where that is known (a GPU, or a budget on a CPU).
    """

    def __init__(self, world_size: int, budget: float | None = None, repeats: bool = False) -> None:
        self.world_size = world_size
        self.budget = budget
        self.repeats = repeats
        self._live: LiveTensors | None = None
        self._ready = False

    @property
    def peak(self) -> int | None:
        if torch.cuda.is_initialized():
            return max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        return self._live.peak if self._live is not None else None

    def _forget_peak(self) -> None:
        if torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        if self._live is not None:
            self._live.peak = self._live.used

    def take(
        self,
        trainer: Any,
        step_batch: Any,
        logged: Mapping[str, nn.Module],
        gradients: Any,
        attempt: Callable[[Any], T],
    ) -> tuple[Any, T]:
        """`attempt(share)`, which computes the gradients of a step's share, and the share that it succeeded with: all
        or nothing, on all ranks alike, since a rank sends nothing before every rank has its gradients.

        Raises:
            Refusal: the memory is out, and the number of pieces is fixed, or there are no smaller ones.
        """
        data = trainer.datamodule
        if step_batch.num_pieces != data.layout.pieces:  # a loader process fetched it before the number changed
            step_batch = self._recut(trainer, step_batch, data.layout)
        undo = Undo(trainer.lightning_module, logged) if self.repeats else None
        finer = data.layout.finer()
        while True:
            done = self._try(trainer, step_batch, attempt)
            if undo is None:
                if done is None:
                    raise Refusal(self._advice(trainer, step_batch, gradients, attempt))
                return step_batch, done
            if not self._anyone(done is None):
                assert done is not None
                return step_batch, done
            done = None  # on a rank that had the memory: it goes back before more is asked for
            undo()
            self._forget_peak()
            layout = next(finer, None)
            if layout is None:
                raise Refusal(
                    f"step {step_batch.step + 1}: out of memory: {self._limit(data.layout)}, in pieces of one sample"
                )
            if trainer.is_global_zero:
                LOG.warning(
                    "step %d: out of memory; repeated, and on from here, in %d pieces",
                    step_batch.step + 1,
                    layout.pieces,
                )
            data.layout = layout
            step_batch = self._recut(trainer, step_batch, layout)

    def _try(self, trainer: Any, step_batch: Any, attempt: Callable[[Any], T]) -> T | None:
        """The attempt's result, None if memory ran out. Outside of `except`, its frames hold no tensor any more."""
        try:
            with self._watched(trainer):
                return attempt(step_batch)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return None

    def _watched(self, trainer: Any) -> AbstractContextManager[Any]:
        if self.budget is None:
            return nullcontext()
        strategy, module = trainer.strategy, trainer.lightning_module
        devices = getattr(strategy, "devices", None) or [strategy.root_device]
        if strategy.root_device.type == "cuda":
            for device in () if self._ready else devices:
                total = torch.cuda.get_device_properties(device).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, self.budget / total), device)
            self._ready = True
            return nullcontext()
        if self._live is None:
            self._live = LiveTensors(self.budget * len(devices))  # dp's logical devices are one process
        states = [
            value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()
        ]
        held = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters()), *states]
        self._live.hold(tensor for tensor in held if isinstance(tensor, Tensor))
        return self._live

    def _anyone(self, failed: bool) -> bool:
        """Whether some rank ran out of memory: the ranks' agreement, one number on the CPU."""
        if self.world_size == 1:
            return failed
        flag = torch.tensor([int(failed)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _recut(self, trainer: Any, step_batch: Any, layout: Layout) -> Any:
        return trainer.datamodule.recut(step_batch, layout.pieces).to(trainer.strategy.root_device)

    def _limit(self, layout: Layout) -> str:
        device = "the device's memory" if self.budget is None else f"memory_budget={self.budget / MIB:g} MiB"
        return f"{device} does not hold a step of {layout.batch_size} samples"

    def _advice(self, trainer: Any, step_batch: Any, gradients: Any, attempt: Callable[[Any], T]) -> str:
        """Why a step with a fixed number of pieces is refused: this rank tries by itself how many would fit."""
        layout = trainer.datamodule.layout
        pieces = f"{layout.pieces} piece{'s' * (layout.pieces > 1)}"
        wrong = f"step {step_batch.step + 1}: out of memory: {self._limit(layout)} in {pieces}"
        if self.world_size > 1 and not layout.exact:  # DDP still waits for the rest of a backward pass that has failed
            return f"{wrong}; give more, or accumulate_grad_batches=auto, which finds how many fit"
        gradients.late = True
        for finer in layout.finer():
            for parameter in trainer.lightning_module.parameters():
                parameter.grad = None
            step_batch = self._recut(trainer, step_batch, finer)
            if self._try(trainer, step_batch, attempt) is not None:
                accumulate = f"accumulate_grad_batches={finer.accumulate}"
                why = "exact=true keeps their number" if layout.exact else "accumulate_grad_batches=auto finds that"
                return f"{wrong}; pieces={finer.pieces} ({accumulate}) would fit, {why}"
        return f"{wrong}, nor in pieces of one sample"


def out_of_memory(error: RuntimeError) -> bool:
    """Whether memory is what an operation lacked."""
    return isinstance(error, torch.OutOfMemoryError) or is_oom_error(error)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that live in this process, as a GPU's allocator does; what a kernel takes for
    itself while it runs is not seen.

    Args:
        limit: bytes, beyond which an operation raises torch.OutOfMemoryError.

    Attributes:
        used, peak: bytes, now and at most.
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.used = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were made elsewhere."""
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self._count(part)
        if self.used > self.limit:
            raise torch.OutOfMemoryError(f"{func}: {self.used / MIB:.1f} of {self.limit / MIB:g} MiB")
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            del self._storages[key]
            self.used -= size

        self._storages[key] = weakref.ref(storage, freed)  # torch keeps this object as long as the memory
        self.used += size
        self.peak = max(self.peak, self.used)


class Undo:
    """Puts back what forward and backward passes change beside gradients: buffers (BatchNorm's statistics), metrics,
    sums that a module keeps as attributes, and what was logged. Randomness needs none of it, each piece is seeded.

    Args:
        module: the LightningModule.
        logged: Lightning's results, metrics by name.
    """

    def __init__(self, module: nn.Module, logged: Mapping[str, nn.Module]) -> None:
        self.module = module
        self.logged: Any = logged
        self.names = set(logged)
        parts = [part for root in (module, *logged.values()) for part in root.modules()]
        self.attributes = [(vars(part), {k: _kept(v) for k, v in vars(part).items() if _plain(v)}) for part in parts]
        self.buffers = [
            (buffer, buffer.clone()) for part in parts for buffer in part._buffers.values() if buffer is not None
        ]

    def __call__(self) -> None:
        """Back to when this object was made; gradients are dropped."""
        for parameter in self.module.parameters():
            parameter.grad = None
        for name in set(self.logged) - self.names:
            del self.logged[name]
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)
            for now, attributes in self.attributes:
                for name, (value, before) in attributes.items():
                    if isinstance(value, list):
                        value[:] = before
                    elif isinstance(value, Tensor) and not value.is_inference():
                        value.copy_(before)
                    now[name] = before if isinstance(value, Tensor) and value.is_inference() else value


def _plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str | list)
        or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
    )


def _kept(value: Any) -> tuple[Any, Any]:
    copy = value.detach().clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
    return value, copy


def advice(error: BaseException, step_batch: Any, layout: Layout) -> str | None:
    """What to say of a step that failed: that memory ran out and what takes less of it; None if it failed otherwise."""
    if not (isinstance(error, RuntimeError) and out_of_memory(error)):
        return None
    wrong = f"step {step_batch.step + 1}: out of memory in pieces of {layout.piece_size} samples"
    finer = next(layout.finer(), None)
    if finer is None:
        return f"{wrong}; the batch_size can't be cut finer"
    return f"{wrong}; pieces={finer.pieces} (accumulate_grad_batches={finer.accumulate}) takes less"
