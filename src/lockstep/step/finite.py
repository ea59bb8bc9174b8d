"""A gradient that is not finite: named with its step and samples, and stopped or skipped on all ranks alike."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.arithmetic.layout import listed

LOG = logging.getLogger("lockstep")
ADVICE = "nonfinite=skip would leave such steps out"
Step = tuple[Any, list[Tensor], torch.amp.GradScaler | None]  # its batch, its micro-batches' losses, a loss scaler
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
        self._asked: tuple[Tensor, Any, Step] | None = None

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
        if self.later:
            self.settle()
            sums = [g.sum(dtype=torch.float64) for g in gradients]
            finite = torch.stack(sums or [next(module.parameters()).new_zeros(())]).isfinite().all()
            if self.staged:
                dist.all_reduce(finite := finite.int(), dist.ReduceOp.MIN)
            self._asked = *_on_its_way(finite), (step_batch, losses, scaler)
            return False
        sums = [g.sum() for g in gradients]
        cuda = bool(sums) and sums[0].is_cuda
        right = math.isfinite(sum(torch.stack(sums).tolist() if cuda else [each.item() for each in sums]))
        if self.staged:
            dist.all_reduce(told := torch.tensor(float(right)), dist.ReduceOp.MIN)
            right = bool(told)
        if right:
            return False
        names = [n for n, p in module.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        if self.staged:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, names)
            names = [name for found in reversed(everyone) for name in found]  # rank zero's come last
        if not names:  # only the sum overflowed
            return False
        message = self._message((step_batch, losses, scaler), f" ({listed(names, 1)})")
        if message is None:
            return False
        if self.policy == "stop":
            raise NonFinite(f"{message}; {ADVICE}")
        LOG.warning("%s; skipped", message)
        if scaler is not None:  # it looks itself, and needs something to look at
            return True
        for parameter in module.parameters():
            parameter.grad = None
        return True

    def settle(self) -> None:
        """Waits for what is known later.

        Raises:
            NonFinite: the last step's gradient was not finite.
        """
        if self._asked is None:
            return
        (finite, event, step), self._asked = self._asked, None
        if event is not None:
            event.synchronize()
        if not bool(finite) and (message := self._message(step)) is not None:
            raise NonFinite(f"{message}; {ADVICE}")

    def _message(self, step: Step, where: str = "") -> str | None:
        """What is wrong; None: a loss scaler will find a scale at which nothing is.

        Raises:
            NonFinite: it has found none, so that no step trains anything any more.
        """
        step_batch, losses, scaler = step
        samples = self._samples(step_batch, losses)
        wrong = f"step {step_batch.step + 1}: the gradient is not finite{where}; {samples or 'every loss was finite'}"
        if scaler is None or samples:
            return wrong
        if scaler.get_scale() < LEAST_SCALE:
            raise NonFinite(f"{wrong}, at a loss scale of {scaler.get_scale():.1g} too; precision=bf16-mixed")
        return None

    def _samples(self, step_batch: Any, losses: list[Tensor]) -> str:
        pairs = zip(step_batch.micro_batches, losses, strict=True)
        found = [int(sample) for micro_batch, loss in pairs if not bool(loss.isfinite()) for sample in micro_batch.ids]
        if self.world_size > 1:
            parts: list[Any] = [None] * self.world_size
            dist.all_gather_object(parts, found)
            found = [sample for part in parts for sample in part]
        if not found:
            return ""
        return f"loss of the samples {listed(found, 8)} of the training set"


def _on_its_way(flag: Tensor) -> tuple[Tensor, Any]:
    """A copy of a flag on the host, and the event after which it is there; None: it is."""
    if not flag.is_cuda:
        return flag, None
    there = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(flag.device))
    return there, event
