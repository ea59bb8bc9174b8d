"""A gradient that is not finite: named with its step and samples, and stopped or skipped on all ranks alike."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.launch.process_group import of_ranks
from lockstep.text import join_names

LOG = logging.getLogger("lockstep")
LEAST_SCALE = 2.0**-14  # of a loss: below, what a scaler halves it for is no overflow


class NonFinite(Exception):
    """The gradient of a step is not finite. The message names the step and the samples."""


class FiniteGradientCheck:
    """Looks at each step's gradient after all sums: every rank holds the same one, so all decide alike.

    To skip a step, the host must know before the weights change. To stop, it may know a step later, so that nobody
    waits for a GPU: the answer travels while the next step is under way, and a checkpoint waits for it (`settle`).

    Args:
        policy: `stop` raises; `skip` leaves weights, buffers and optimizer as they are and goes on with the next step.
        world_size: worker processes over all nodes.
        later: whether, under `stop`, to know a step later: on a GPU.
        staged: whether each process holds another part of the gradient, so that all must be asked.
    """

    def __init__(self, policy: str, world_size: int, later: bool = False, staged: bool = False) -> None:
        self.policy = policy
        self.world_size = world_size
        self.later = later and policy == "stop"
        self.staged = staged
        self._asked: Any = None  # whether a step is finite, the event after which that is known, and the step

    def look(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        step_batch: Any,
        losses: list[Tensor],
        scaler: torch.amp.GradScaler | None = None,
    ) -> bool:
        """To be called between a step's last sum and its optimizer step. Returns whether the step is skipped.

        Args:
            losses: of this process's micro-batches.
            scaler: finds its scale by infinities, and skips those steps.

        Raises:
            NonFinite: under `stop`, for this step or the one before.
        """
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients and not self.staged:
            return False
        self.settle()
        wide = torch.float64 if self.later else None  # nobody looks again whether only the sum has overflowed
        sums = [gradient.sum(dtype=wide) for gradient in gradients] or [next(module.parameters()).new_zeros(())]
        finite = torch.stack(sums).isfinite().all()
        if self.staged:
            dist.all_reduce(finite := finite.int(), dist.ReduceOp.MIN)
        if self.later:
            told = finite.to("cpu", non_blocking=True)
            event = torch.cuda.current_stream(finite.device).record_event() if finite.is_cuda else None
            self._asked = told, event, (step_batch, losses, scaler)
            return False
        if bool(finite):
            return False
        names = [n for n, p in module.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        if self.staged:
            names = [name for found in reversed(of_ranks(names)) for name in found]  # rank zero's come last
        if not names:
            return False
        skips = self._skips(step_batch, losses, scaler, f" ({join_names(names, 1)})")
        if skips and scaler is None:  # which looks itself, and needs something to look at
            for parameter in module.parameters():
                parameter.grad = None
        return skips

    def settle(self) -> None:
        """Waits for what is known later.

        Raises:
            NonFinite: the last step's gradient was not finite.
        """
        if self._asked is not None:
            (finite, event, step), self._asked = self._asked, None
            if event is not None:
                event.synchronize()
            if not bool(finite):
                self._skips(*step)

    def _skips(self, step_batch: Any, losses: list[Tensor], scaler: torch.amp.GradScaler | None, at: str = "") -> bool:
        """Whether a step whose gradient is not finite, `at` some parameter, is skipped: not where a loss scaler will
        find a scale at which nothing is wrong.

        Raises:
            NonFinite: under `stop`; or the scaler has found none, so that no step trains anything any more.
        """
        samples = self._samples(step_batch, losses)
        wrong = f"step {step_batch.step + 1}: the gradient is not finite{at}; {samples or 'every loss was finite'}"
        if scaler is not None and not samples:
            if scaler.get_scale() < LEAST_SCALE:
                raise NonFinite(f"{wrong}, at a loss scale of {scaler.get_scale():.1g} too; precision=bf16-mixed")
            return False
        if self.policy == "stop":
            raise NonFinite(f"{wrong}; nonfinite=skip would leave such steps out")
        LOG.warning("%s; skipped", wrong)
        return True

    def _samples(self, step_batch: Any, losses: list[Tensor]) -> str:
        pairs = zip(step_batch.micro_batches, losses, strict=True)
        found = [int(sample) for micro_batch, loss in pairs if not bool(loss.isfinite()) for sample in micro_batch.ids]
        if self.world_size > 1:
            found = [sample for part in of_ranks(found) for sample in part]
        return f"loss of the samples {join_names(found, 8)} of the training set" if found else ""
