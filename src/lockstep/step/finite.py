"""A gradient that is not finite: named with its step and samples, and stopped or skipped on all ranks alike."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.launch.process_group import gather_objects
from lockstep.step.hooks import StepHook
from lockstep.step.passes import Step
from lockstep.text import join_names

LOG = logging.getLogger("lockstep")
LEAST_SCALE = 2.0**-14  # of a loss: below, what a scaler halves it for is no overflow


class NonFinite(Exception):
    """The gradient of a step is not finite. The message names the step and the samples."""


class FiniteGradientCheck(StepHook):
    """Look at each step's gradient after all sums: every rank holds the same one, so all decide alike.

    To skip a step, the host must know before the weights change. To stop, it may know a step later, so that nobody
    waits for a GPU: the answer travels while the next step is under way, and a checkpoint waits for it (`flush`).

    Args:
        policy: `stop` raises; `skip` leaves weights, buffers and optimizer as they are and goes on with the next step.
        later: whether, under `stop`, to know a step later: on a GPU.
        can_skip: whether `skip` could be chosen.
    """

    def __init__(self, policy: str, later: bool = False, can_skip: bool = True) -> None:
        self.policy = policy
        self.can_skip = can_skip
        self.later = later and policy == "stop"
        self._buffers: dict[str, Tensor] = {}  # as the step began: running statistics, say
        self._pending: Any = None  # whether a step is finite, the event after which that is known, and the step

    def before_step(self, step: Step) -> None:
        if self.policy == "skip":
            self._buffers = copy_buffers(step.module)

    def before_optimizer_step(self, step: Step) -> None:
        if self._skips_step(step):
            restore_buffers(step.module, self._buffers)
            step.batch.skipped = True

    def _skips_step(self, step: Step) -> bool:
        """Whether a step of which the parameters have the gradient is skipped.

        Raises:
            NonFinite: under `stop`, for this step or the one before.
        """
        module, strategy = step.module, step.strategy
        staged = strategy.staged  # each process has another part of the gradient, so all must be asked
        groups = strategy.optimizers[0].param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if not gradients and not staged:
            return False
        self.flush()
        wide = torch.float64 if self.later else None  # nobody looks again whether only the sum has overflowed
        sums = [gradient.sum(dtype=wide) for gradient in gradients] or [next(module.parameters()).new_zeros(())]
        finite = torch.stack(sums).isfinite().all()
        if staged:
            dist.all_reduce(finite := finite.int(), dist.ReduceOp.MIN)
        if self.later:
            answer = finite.to("cpu", non_blocking=True)
            event = torch.cuda.current_stream(finite.device).record_event() if finite.is_cuda else None
            self._pending = answer, event, step
            return False
        if bool(finite):
            return False
        names = [n for n, p in module.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        if staged:
            names = [name for part in reversed(gather_objects(names)) for name in part]  # rank zero's come last
        if not names:
            return False
        skips = self._skips(step, f" ({join_names(names, 1)})")
        if skips and _scaler(step) is None:  # which looks itself, and needs something to look at
            for parameter in module.parameters():
                parameter.grad = None
        return skips

    def flush(self) -> None:
        """Wait for what is known later.

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
        """Whether a step whose gradient is not finite, `at` some parameter, is skipped: not where a loss scaler will
        find a scale at which nothing is wrong.

        Raises:
            NonFinite: under `stop`; or the scaler has found none, so that no step trains anything any more.
        """
        samples, scaler = self._samples(step), _scaler(step)
        wrong = f"step {step.number + 1}: the gradient is not finite{at}; {samples or 'every loss was finite'}"
        if scaler is not None and not samples:
            if scaler.get_scale() < LEAST_SCALE:
                raise NonFinite(f"{wrong}, at a loss scale of {scaler.get_scale():.1g} too; precision=bf16-mixed")
            return False
        if self.policy == "stop":
            advice = "; nonfinite=skip would leave such steps out" * self.can_skip
            raise NonFinite(f"{wrong}{advice}")
        LOG.warning("%s; skipped", wrong)
        return True

    def _samples(self, step: Step) -> str:
        pairs = zip(step.batch.micro_batches, step.losses, strict=True)
        ids = [int(sample) for micro_batch, loss in pairs if not bool(loss.isfinite()) for sample in micro_batch.ids]
        if step.passes.gradients.processes > 1:
            ids = [sample for part in gather_objects(ids) for sample in part]
        return f"loss of the samples {join_names(ids, 8)} of the training set" if ids else ""


def copy_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of a module's buffers, by name."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def restore_buffers(module: torch.nn.Module, values: dict[str, Tensor]) -> None:
    """Give a module's buffers the values that `copy_buffers` returned."""
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.resize_(values[name].shape).copy_(values[name])


def _scaler(step: Step) -> torch.amp.GradScaler | None:
    """The loss scaler of a run: it finds its scale by infinities, and skips those steps."""
    return getattr(step.trainer.precision_plugin, "scaler", None)
