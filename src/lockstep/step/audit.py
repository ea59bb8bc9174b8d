"""`audit=<share>`: of that share of steps one piece is computed again, by another device than its owner, and must come
to the same bits. Else the step is not applied, and the run ends with the name of the device that computed wrong."""

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.arithmetic.audit import Choice, chosen, verdict
from lockstep.arithmetic.exact_sum import Damaged
from lockstep.arithmetic.layout import Layout
from lockstep.launch.endings import WorkerFailed
from lockstep.launch.environment import environment
from lockstep.launch.process_group import all_come, of_ranks
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.text import join_names, plural

PATTERN = 1 << 16  # numbers of a message that is sent to see how it comes
MEETING_SECONDS = 5.0  # that ranks which see a damaged sum wait for those that may not
Gradients = list[Tensor | None]
Digests = tuple[bytes, ...]  # of a gradient, by parameter


class WrongGradient(WorkerFailed):
    """A device has computed a wrong gradient, or sends or gets wrong messages; or one of several does. The message
    names it, and the step; of what was computed the piece and the tensor, too."""


class Audit:
    """Chooses the pieces that are computed again, and judges what they come to. All ranks do so alike.

    Args:
        share: of the steps.
        seed: the run's.
        layout: who computes which piece.

    Attributes:
        pieces: so many have been computed again and were right, since this process began.
    """

    def __init__(self, share: float, seed: int, layout: Layout) -> None:
        self.share, self.seed, self.layout = share, seed, layout
        self.pieces = 0
        self.choice: Choice | None = None  # of the step under way
        self._first: Digests | None = None  # the owner's, on its rank
        self._right: dict[int, int] = {}  # by device, steps up to which it was known to be right
        self._devices = range(layout.num_devices)
        self._own = {environment().rank} if layout.replicas > 1 else set(self._devices)

    def begin(self, trainer: Any, step_batch: StepBatch) -> Choice | None:
        """Before a step's passes: what is to be computed again of it."""
        order = trainer.datamodule.order
        sizes = list(map(len, order.pieces(*order.position(step_batch.step))))
        self.choice, self._first = chosen(self.share, self.seed, step_batch.step, sizes, self.layout), None
        self._right = self._right or dict.fromkeys(self._devices, step_batch.step)
        return self.choice

    def note(self, micro_batch: MicroBatch, gradients: list[Gradients]) -> None:
        """After the passes of a micro-batch: the gradients of its pieces."""
        if self.choice and self.choice.piece in micro_batch.pieces:
            self._first = digests(gradients[micro_batch.pieces.index(self.choice.piece)])

    def compare(self, trainer: Any, step_batch: StepBatch, again: Callable[[int, int], Gradients]) -> None:
        """After the last micro-batch, before the gradient is summed: every rank calls it.

        Args:
            again: computes a piece on a device of this process.

        Raises:
            WrongGradient: it came to something else.
        """
        assert self.choice is not None
        piece, (owner, auditor, *_) = self.choice.piece, self.choice.devices

        def asked(devices: Sequence[int]) -> list[tuple[int, Digests]]:
            return [(device, digests(again(piece, device))) for device in devices if device in self._own]

        first = [] if self._first is None else [(owner, self._first)]
        results = _of_all(first + asked([auditor]))
        one, other = (result for _, result in results)
        if one == other:
            self.pieces += 1
            self._right |= dict.fromkeys((owner, auditor), step_batch.step + 1)
            return
        wrong, still = verdict(results + _of_all(asked(self.choice.devices)))
        names = [name for name, p in trainer.lightning_module.named_parameters() if p.requires_grad]
        odd = [name for name, a, b in zip(names, one, other, strict=True) if a != b]
        places = dict(_of_all([(device, self._place(trainer, device)) for device in sorted(self._own)]))
        who = " or ".join(places[device] for device in wrong)
        what = join_names(odd, 1) + f" ({len(odd)} of {plural(len(names), 'tensor')})"
        how = "and again when asked once more" if still else "once: asked once more it was right"
        right = min(self._right[device] for device in wrong) if still else step_batch.step
        told = f"step {step_batch.step + 1}, piece {piece}: {who} computed a wrong gradient of {what}, {how}"
        found = WrongGradient(f"{told}; it was not applied, and checkpoints up to step {right} are as good as known")
        found.without, found.right = tuple(wrong), right
        raise found

    def _place(self, trainer: Any, device: int) -> str:
        """A device of this process, for people."""
        there = getattr(trainer.strategy, "devices", [trainer.strategy.root_device])
        name = "rank" if self.layout.replicas > 1 else "device"
        return f"{name} {device} ({there[device % len(there)]} on {platform.node()})"


def asked_again(damaged: Damaged, step: int, device: torch.device) -> Exception:
    """What to raise for a step's sum that came damaged. Where all ranks see it, each sends a pattern to the next rank,
    then to the one after that: who sends or gets two that come wrong is named. Of two ranks it may be either. A sum
    that came wrong to some only is told by them."""
    if not all_come(f"a damaged sum in step {step}", MEETING_SECONDS):
        return damaged
    rank, world = dist.get_rank(), dist.get_world_size()
    pattern, wrong = torch.arange(PATTERN, device=device), []
    for away in (1, 2)[: world - 1]:
        source, got = (rank - away) % world, torch.zeros_like(pattern)
        to = dist.P2POp(dist.isend, pattern.clone(), (rank + away) % world)
        for work in dist.batch_isend_irecv([to, dist.P2POp(dist.irecv, got, source)]):
            work.wait()
        wrong += [] if torch.equal(got, pattern) else [(source, rank)]
    links = _of_all(wrong)
    odd = tuple(end for end, count in Counter(end for link in links for end in link).items() if count > 1)
    told = "asked once more, all comes as it was sent"
    if odd:
        told = f"what rank {' or '.join(map(str, odd))} sends or gets comes wrong again"
    elif links:
        told = "what rank {} sends to rank {} comes wrong again".format(*links[0])
    found = WrongGradient(f"{damaged}; {told}")
    found.without, found.right = odd or (links[0] if links else tuple(range(world))), step
    return found


def _of_all(mine: list[Any]) -> list[Any]:
    """What all ranks have, by rank."""
    return [each for part in of_ranks(mine) for each in part]


def trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def digests(gradients: Gradients) -> Digests:
    """A hash of the bits of each, 64 bits long; empty where there is none."""

    def digest(tensor: Tensor | None) -> bytes:
        if tensor is None:
            return b""
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.blake2b(flat.numpy().data, digest_size=8).digest()

    return tuple(map(digest, gradients))
