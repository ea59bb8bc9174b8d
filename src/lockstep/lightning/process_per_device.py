"""A process per device: Lightning's DDPStrategy, adapted to steps in pieces."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import Parameter

from lockstep.arithmetic.layout import Action, Layout
from lockstep.errors import UserError
from lockstep.launch.process_group import gather_objects
from lockstep.lightning.hooks import current_hook
from lockstep.lightning.strategy import Schedule, StepStrategy
from lockstep.lightning.torch_ddp import FixedBucketsDDP, number_of_collectives
from lockstep.step.batch import EvaluationShare, MicroBatch, data_of, evaluated_split
from lockstep.step.collectives import check_same_shapes, gather_headers, set_state_gathers
from lockstep.text import join_names, plural

T = TypeVar("T")
LOG = logging.getLogger("lockstep")
LOG_INSTEAD = "log a torchmetrics metric (MeanMetric for a mean, CatMetric for all values), or self.log in the step"


class ProcessPerDevice(StepStrategy, DDPStrategy):
    """A process per device.

    Gradients are views of DDP's buckets, which saves a copy. Buffers are not broadcast, because they are averaged
    once per step (see `lockstep.step.buffers`). Evaluation runs on the plain module, so ranks may have
    different numbers of batches.

    Args:
        layout: the run's layout.
        schedule: see `StepStrategy`.
        reduces_in_pass: whether both passes of a process's last micro-batch are the last ones of its step, so that
            DDP's reducer can sum in them.
        compression: compression of the gradients that are sent: `none`, `bf16`, `fp16` or `powersgd` (Vogels et al.,
            PowerSGD, 2019).
        sync_batchnorm: compute BatchNorm over the pieces that run at the same time (GPU only).
    """

    less_memory = "strategy=fsdp"

    def __init__(
        self,
        layout: Layout,
        schedule: Schedule,
        reduces_in_pass: bool = True,
        compression: str = "none",
        sync_batchnorm: bool = False,
    ) -> None:
        super().__init__(layout, schedule)
        self._reduces_in_pass = reduces_in_pass
        self._compression = compression
        self._sync_batchnorm = sync_batchnorm
        self._reducer_sends = False  # whether DDP's reducer sends this step's gradients, in the last passes
        self._reducer_active = False  # whether these passes run now
        self._grads_at_start: list[Any] = []  # address and version of each gradient when the reducer was started
        self._in_uneven_batch = False  # whether an evaluation batch runs, of which the ranks have different numbers
        self._collectives_before = 0  # started before this batch
        self._noticed: set[str] = set()  # hooks that gather from ranks with different numbers of samples
        self._parameters: list[Parameter] = []
        self._trained: list[bool] = []

    def configure_ddp(self) -> None:
        """Wrap the module and register the compression, also on CPU, where Lightning would not register it."""
        module: Any = self.model
        if self._sync_batchnorm:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # replaces layers and keeps their tensors
        self._send_buffers(module)
        self._parameters = list(module.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        # Lightning builds DDP on a stream of its own, for networks that are captured in a graph with their hooks. The
        # steps' stream did not wait for it, so a bucket might be filled with zeros after its first gradient.
        ddp = FixedBucketsDDP(
            module,
            device_ids=self.determine_ddp_device_ids(),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            # PowerSGD's hook sends several messages per bucket. With several buckets, their order could differ between
            # ranks.
            bucket_cap_mb=1 << 20 if self._compression == "powersgd" else None,
        )
        if self._compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self._compression != "none":
            hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            ddp.register_comm_hook(None, hooks[self._compression])
        self.model = ddp

    def _send_buffers(self, module: nn.Module) -> None:
        """Give all ranks the buffers that a module has on rank zero, as DDP does with parameters.

        Raises:
            UserError: the ranks have other buffers.
        """
        named = dict(module.named_buffers())
        headers = gather_objects({name: (buffer.shape, buffer.dtype) for name, buffer in named.items()})
        if different := sorted({name for rank in headers for name, _ in rank.items() ^ headers[0].items()}):
            raise UserError(
                f"strategy={self.name}: {join_names(different, 2)} has not the same shape on all ranks: make the same "
                "buffers on each of them"
            )
        for buffer in named.values():
            sent = buffer.detach().to(self.root_device).contiguous()
            dist.broadcast(torch.view_as_real(sent) if sent.is_complex() else sent, 0)
            if not torch.equal(sent, buffer.detach().to(self.root_device)):
                buffer.detach().copy_(sent)

    def use_reducer(self, wanted: bool) -> bool:
        """Let DDP's reducer sum the gradients of the next step, if this is wanted.

        It can't if parameters were frozen or unfrozen since DDP wrapped the module, because DDP would leave them out.
        """
        unchanged = [parameter.requires_grad for parameter in self._parameters] == self._trained
        self._reducer_sends = wanted and unchanged and self._reduces_in_pass
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
            raise UserError(f"strategy={self.name}: no gradient has reached {names} in a step's last piece: {remedy}")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`: through DDP if its reducer is active, else on the plain module.

        A forward pass through DDP may communicate with all ranks: the second one rebuilds the buckets. A rank without a
        sample makes no forward pass, so the others would wait for it.

        Raises:
            StepRefused: the module's code has communicated by itself. A loss that follows from the samples of other
                ranks is another one on each layout.
        """
        if self._reducer_active:
            return DDPStrategy.training_step(self, *args, **kwargs)
        before = number_of_collectives()
        result = super().training_step(*args, **kwargs)
        gathers = self.weights != "whole"  # layers of fully_shard gather their weights
        if number_of_collectives() != before and not (gathers or self.passes_communicate()):
            self.refuse_collective("communicate with other ranks", "")
        return result

    def passes_communicate(self) -> bool:
        """Return whether the module has a SyncBatchNorm, which communicates in a pass."""
        return self.world_size > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in self.lightning_module.modules())

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a value over ranks, with means of integers in float64. Inside a micro-batch, return it unchanged.

        There, ranks may have unequal numbers of pieces. `TrainingLogs` names the values that are not reduced.

        Lightning truncates the mean of integers: that of 18 samples on 4 ranks would be 4, not 4.5. The means of
        `self.log(..., sync_dist=True)` are divided by it, so they would be too large (Lightning #21859).
        """
        if self._inside:
            return tensor
        self.refuse_collective("log with sync_dist=True", "log it with on_epoch=True")
        self._check_shares(f"strategy.reduce in {current_hook(self.lightning_module)}")
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any of them, have decided so. All ranks must call it."""
        self.refuse_collective("reduce a decision", "decide in on_validation_epoch_end")
        decisions = gather_objects(bool(decision))
        return min(decisions) if all else max(decisions)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor, of the same shape on all ranks, outside of a micro-batch's forward pass.

        Raises:
            UserError: the shapes or dtypes differ, or another rank gathers something else.
        """
        self.refuse_collective("gather from other ranks", LOG_INSTEAD)
        what = f"all_gather in {current_hook(self.lightning_module)}"
        self._check_shares(what)
        check_same_shapes(gather_headers(tensor, what, group), LOG_INSTEAD)
        return super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Send an object from one rank to all ranks."""
        self.refuse_collective("broadcast", "broadcast in on_validation_epoch_start")
        return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        self.refuse_collective("wait for other ranks", "wait in on_validation_epoch_end")
        super().barrier(*args, **kwargs)

    # --- collectives of a user's code ---

    def refuse_collective(self, what: str, remedy: str) -> None:
        """Raise UserError inside a micro-batch's forward pass, and in evaluation batches whose numbers differ."""
        super().refuse_collective(what, remedy)
        if self._in_uneven_batch:
            self._in_uneven_batch = False  # collectives that follow this error are not refused
            last_hook = "test_step" if self.lightning_module.trainer.testing else "validation_step"
            hook, batches = current_hook(self.lightning_module) or last_hook, self._numbers("batches")
            raise UserError(
                f"strategy={self.name}: {hook} can't {what}, since the ranks have {batches} batches: {remedy}"
            )

    def _shares(self) -> tuple[EvaluationShare, ...]:
        """Return what each rank evaluates now: of one loader, and outside of batches of all of them."""
        trainer = self.lightning_module.trainer
        return data_of(trainer).evaluation_shares(evaluated_split(trainer))

    def _numbers(self, of: str) -> str:
        return join_names(sorted({getattr(share, of) for share in self._shares()}), 4).replace(", ", " and ", 1)

    def start_evaluation_batch(self) -> None:
        """Refuse collectives until the end of the batch if the ranks have different numbers of batches.

        A rank without a sample evaluates one that does not count. A collective would count it.
        """
        self._in_uneven_batch = len({share.batches for share in self._shares()}) > 1
        self._collectives_before = number_of_collectives()

    def end_evaluation_batch(self) -> None:
        """Check that no collective has passed by this strategy.

        All ranks have a first batch. So they all get here, and a later batch would hang.

        Raises:
            UserError: one has, and the ranks have different numbers of batches.
        """
        if self._in_uneven_batch and number_of_collectives() != self._collectives_before:
            self.refuse_collective("communicate with other ranks", LOG_INSTEAD)
        self._in_uneven_batch = False

    def on_exception(self, exception: BaseException) -> None:
        """Allow collectives again: the batch has ended."""
        self._in_uneven_batch = False
        super().on_exception(exception)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step`. It refuses collectives if the ranks have different numbers of batches."""
        self._in_uneven_batch = len({share.batches for share in self._shares()}) > 1
        try:
            return super().predict_step(*args, **kwargs)
        finally:
            self._in_uneven_batch = False

    def _check_shares(self, what: str) -> None:
        """Check a collective of a hook outside of batches, whose values may come from the samples of each rank.

        Raises:
            UserError: a rank has no sample in this evaluation, so it would add a value that does not count.
        """
        hook, trainer = current_hook(self.lightning_module), self.lightning_module.trainer
        if not hook.startswith(("on_validation", "on_test", "on_predict")):
            return
        shares, data, split = self._shares(), data_of(trainer), evaluated_split(trainer)
        of_loaders = [data.evaluation_shares(each) for each in data.evaluation_splits(split.partition(".")[0])]
        if any(not share.samples for each in of_loaders for share in each):
            samples = min(sum(share.samples for share in each) for each in of_loaders)
            few = f"{plural(samples, 'sample')} on {len(shares)} ranks leave a rank without one"
            raise UserError(f"strategy={self.name}: {what}: {few}: {LOG_INSTEAD}")
        if len({share.samples for share in shares}) > 1 and hook not in self._noticed:
            self._noticed.add(hook)
            LOG.warning(
                "%s: the ranks have %s samples, so the mean of their means is not the mean over samples: "
                "gather sums and counts, or log a torchmetrics metric",
                *(what, self._numbers("samples")),
            )

    def prepare_metrics(self) -> None:
        """Let the user's metrics gather states of any size, and be refused as other collectives are."""
        set_state_gathers(self.lightning_module.trainer)

    def on_train_start(self) -> None:
        """Call `prepare_metrics`."""
        super().on_train_start()
        self.prepare_metrics()

    def on_validation_start(self) -> None:
        """Call `prepare_metrics`."""
        super().on_validation_start()
        self.prepare_metrics()

    def on_test_start(self) -> None:
        """Call `prepare_metrics`."""
        super().on_test_start()
        self.prepare_metrics()

    def on_predict_start(self) -> None:
        """Call `prepare_metrics`."""
        super().on_predict_start()
        self.prepare_metrics()


def _state(gradient: Tensor | None) -> tuple[int, int] | None:
    """Return a gradient's address and version counter. A reference to it would keep memory that DDP frees."""
    return None if gradient is None else (gradient.data_ptr(), gradient._version)
