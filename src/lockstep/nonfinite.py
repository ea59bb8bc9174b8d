"""A gradient that is not finite: named with its step and samples, and stopped or skipped on all ranks alike."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LOG = logging.getLogger("lockstep")


class NonFinite(Exception):
    """The gradient of a step is not finite. The message names the step and the samples."""


class Watch:
    """Looks at each step's gradient after all sums: every rank holds the same one, so all decide alike.

    Args:
        policy: `stop` raises; `skip` leaves weights and optimizer as they are and goes on with the next step.
        processes: worker processes over all nodes.
    """

    def __init__(self, policy: str, processes: int) -> None:
        self.policy = policy
        self.processes = processes

    def look(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, share: Any, losses: list[tuple[Tensor, int]]
    ) -> None:
        """To be called between a step's last sum and its optimizer step.

        Raises:
            NonFinite: under `stop`.
        """
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients or bool(torch.stack([g.sum() for g in gradients]).isfinite().all()):
            return
        names = [n for n, p in module.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        if not names:  # only the sum overflowed
            return
        where = f"{names[0]}, ..." if len(names) > 1 else names[0]
        message = f"step {share.step + 1}: the gradient is not finite ({where}); {self._samples(share, losses)}"
        if self.policy == "stop":
            raise NonFinite(f"{message}; nonfinite=skip would leave such steps out")
        LOG.warning("%s; skipped", message)
        for parameter in module.parameters():
            parameter.grad = None

    def _samples(self, share: Any, losses: list[tuple[Tensor, int]]) -> str:
        turns = [turn for turn, (loss, _) in zip(share.turns, losses, strict=True) if not bool(loss.isfinite())]
        found = [int(sample) for turn in turns for sample in turn.ids]
        if self.processes > 1:
            parts: list[Any] = [None] * self.processes
            dist.all_gather_object(parts, found)
            found = [sample for part in parts for sample in part]
        if not found:
            return "every loss was finite"
        return f"loss of the samples {', '.join(map(str, found[:8]))}{', ...' * (len(found) > 8)} of the training set"
