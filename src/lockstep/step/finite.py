"""The check for gradients that are not finite. All ranks stop, or skip the step, together."""

import logging
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import NonFinite
from lockstep.launch.process_group import gather_objects
from lockstep.step.buffers import SavedBuffers, copy_buffers, restore_buffers
from lockstep.step.passes import Step, StepHook
from lockstep.text import join_names

LOG = logging.getLogger("lockstep")
LEAST_SCALE = 2.0**-14  # loss scale below which a gradient that is not finite is no overflow


class FiniteGradientCheck(StepHook):
    """Check each step's gradient after its sum. All ranks have the same gradient, so all make the same decision.

    With `skip`, the host needs the result before the weights change. With `stop`, it may get the result one step later,
    so that it need not wait for the GPU: the result is copied during the next step, and `flush` waits for it before a
    checkpoint.

    Args:
        policy: `stop` raises `NonFinite`; `skip` leaves weights, buffers and optimizer unchanged and continues.
        one_step_later: whether `stop` may get the result one step later; for GPUs.
        can_skip: whether the run could use `skip`. An error message then suggests it.
    """

    def __init__(self, policy: str, one_step_later: bool = False, can_skip: bool = True) -> None:
        self.policy = policy
        self.can_skip = can_skip
        self.one_step_later = one_step_later and policy == "stop"
        self._buffers: SavedBuffers = []  # as they were before the step
        self._pending: Any = None  # a step's result, the event after which it can be read, and the step

    def before_step(self, step: Step) -> None:
        """Save the buffers (running statistics, for example), in case the step is skipped."""
        if self.policy == "skip":
            self._buffers = copy_buffers(step.module)

    def before_optimizer_step(self, step: Step) -> None:
        """Check the gradient. If the step is skipped, restore the buffers and mark the step."""
        if self._skips_step(step):
            restore_buffers(self._buffers)
            step.batch.skipped = True

    def _skips_step(self, step: Step) -> bool:
        """Check the gradients in `.grad`. Return True if this step must be skipped.

        Raises:
            NonFinite: with `stop`, because of this step or the step before.
        """
        module, strategy = step.module, step.strategy
        staged = strategy.staged  # each process has another part of the gradient, so all results are combined
        groups = strategy.optimizers[0].param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if not gradients and not staged:
            return False
        self.flush()
        # A float32 sum may overflow, and with `one_step_later` nothing checks the elements again.
        wide = torch.float64 if self.one_step_later else None
        sums = [gradient.sum(dtype=wide) for gradient in gradients] or [next(module.parameters()).new_zeros(())]
        finite = torch.stack(sums).isfinite().all()
        if staged:
            dist.all_reduce(finite := finite.int(), dist.ReduceOp.MIN)
        if self.one_step_later:
            answer = finite.to("cpu", non_blocking=True)
            event = torch.cuda.current_stream(finite.device).record_event() if finite.is_cuda else None
            self._pending = answer, event, step
            return False
        if bool(finite):
            return False
        names = [n for n, p in module.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        if staged:
            # Backward passes begin in the last stage, so its names come first.
            names = [name for part in reversed(gather_objects(names)) for name in part]
        if not names:
            return False
        skips = self._skips(step, f" ({join_names(names, 1)})")
        if skips and _scaler(step) is None:  # a scaler checks the gradients itself, so it needs them
            for parameter in module.parameters():
                parameter.grad = None
        return skips

    def flush(self) -> None:
        """Wait for the result of the last step.

        Raises:
            NonFinite: the last step's gradient was not finite.
        """
        if self._pending is not None:
            (finite, event, step), self._pending = self._pending, None
            if event is not None:
                event.synchronize()
            if not bool(finite):
                self._skips(step)

    def _skips(self, step: Step, at: str = "") -> bool:
        """Handle a step whose gradient is not finite. Return True if the step must be skipped.

        With a loss scaler and finite losses, the scaler handles the step: it lowers its scale.

        Args:
            step: the step.
            at: the parameter whose gradient is not finite, for the message.

        Raises:
            NonFinite: with `stop`; or the loss scale is so small that the scaler can't help.
        """
        samples, scaler = self._bad_samples(step), _scaler(step)
        wrong = f"step {step.number + 1}: the gradient is not finite{at}, {samples or 'though every loss is finite'}"
        if scaler is not None and not samples:
            if scaler.get_scale() < LEAST_SCALE:
                raise NonFinite(f"{wrong} and the loss scale is {scaler.get_scale():.1g}: use precision=bf16-mixed")
            return False
        if self.policy == "stop":
            advice = ": nonfinite=skip skips such steps" * self.can_skip
            raise NonFinite(f"{wrong}{advice}")
        LOG.warning("%s: the step is skipped", wrong)
        return True

    def _bad_samples(self, step: Step) -> str:
        """Return text that names the samples, on all ranks, of pieces whose loss is not finite; empty if none."""
        pairs = zip(step.batch.micro_batches, step.losses, strict=True)
        ids = [int(sample) for micro_batch, loss in pairs if not bool(loss.isfinite()) for sample in micro_batch.ids]
        if step.passes.gradients.world_size > 1:
            ids = [sample for part in gather_objects(ids) for sample in part]
        return f"nor is the loss of samples {join_names(ids, 8)} of the training set" if ids else ""


def _scaler(step: Step) -> torch.amp.GradScaler | None:
    """Return the loss scaler of a run, if it has one. It lowers its scale after infinities and skips those steps."""
    return getattr(step.trainer.precision_plugin, "scaler", None)
