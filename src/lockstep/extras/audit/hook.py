"""Compares a piece that is computed twice, and finds who sends or gets damaged messages."""

import hashlib
import logging
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torchmetrics import Metric

from lockstep.arithmetic.exact_sum import Damaged
from lockstep.arithmetic.layout import Layout
from lockstep.extras.audit.choice import Choice, chosen, verdict
from lockstep.launch.endings import WorkerFailed
from lockstep.launch.environment import environment
from lockstep.launch.process_group import all_come, of_ranks
from lockstep.step.batch import MicroBatch
from lockstep.step.finite import copied, put_back
from lockstep.step.gradients import trained
from lockstep.step.hooks import StepHook
from lockstep.step.passes import Step
from lockstep.step.protocols import Gradients
from lockstep.strategies.base import twin
from lockstep.text import join_names, plural

LOG = logging.getLogger("lockstep")
PATTERN = 1 << 16  # numbers of a message that is sent to see how it comes
MEETING_SECONDS = 5.0  # that ranks which see a damaged sum wait for those that may not
Digests = tuple[bytes, ...]  # of a gradient, by parameter


class WrongGradient(WorkerFailed):
    """A device has computed a wrong gradient, or sends or gets wrong messages; or one of several does. The message
    names it, and the step; of what was computed the piece and the tensor, too."""


class AuditHook(StepHook):
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
        self._start: dict[str, Tensor] = {}  # the module's buffers as that step began
        self._first: Digests | None = None  # the owner's result, on its rank
        self._right: dict[int, int] = {}  # by device, steps up to which it was known to be right
        self._devices = range(layout.num_devices)
        self._own = {environment().rank} if layout.replicas > 1 else set(self._devices)

    def before_step(self, step: Step) -> None:
        """Choose what is computed again."""
        order = step.data.order
        sizes = list(map(len, order.pieces(*order.position(step.number))))
        layout = step.data.deal.layout_at(step.number)
        self.choice, self._first = chosen(self.share, self.seed, step.number, sizes, layout), None
        self._right = self._right or dict.fromkeys(self._devices, step.number)
        self._start = copied(step.module) if self.choice else {}

    def after_piece(self, step: Step, micro_batch: MicroBatch) -> None:
        if self.choice and self.choice.piece == micro_batch.piece:
            self._first = digests([parameter.grad for parameter in trained(step.module)])

    def after_passes(self, step: Step) -> None:
        """Compare the two results, before the gradient is summed.

        Raises:
            WrongGradient: they differ.
        """
        if self.choice is None:
            return
        piece, (owner, auditor, *_) = self.choice.piece, self.choice.devices

        def computed(devices: Sequence[int]) -> list[tuple[int, Digests]]:
            mine = [device for device in devices if device in self._own]
            return [(device, digests(self._again(step, piece, device))) for device in mine]

        first = [] if self._first is None else [(owner, self._first)]
        results = _of_all(first + computed([auditor]))
        one, other = (result for _, result in results)
        if one == other:
            self.pieces += 1
            self._right |= dict.fromkeys((owner, auditor), step.number + 1)
            return
        wrong, still = verdict(results + _of_all(computed(self.choice.devices)))
        names = [name for name, p in step.module.named_parameters() if p.requires_grad]
        odd = [name for name, a, b in zip(names, one, other, strict=True) if a != b]
        places = dict(_of_all([(device, self._place(step.trainer, device)) for device in sorted(self._own)]))
        who = " or ".join(places[device] for device in wrong)
        what = join_names(odd, 1) + f" ({len(odd)} of {plural(len(names), 'tensor')})"
        how = "and again when asked once more" if still else "once: asked once more it was right"
        right = min(self._right[device] for device in wrong) if still else step.number
        text = f"step {step.number + 1}, piece {piece}: {who} computed a wrong gradient of {what}, {how}"
        error = WrongGradient(f"{text}; it was not applied, and checkpoints up to step {right} are as good as known")
        error.without, error.right = tuple(wrong), right
        raise error

    def on_error(self, step: Step, error: Exception) -> None:
        """After a damaged message: find out who sent or got it."""
        if isinstance(error, Damaged):
            raise asked_again(error, step.number, step.strategy.root_device) from None

    def _again(self, step: Step, piece: int, device: int) -> Gradients:
        """Compute a piece on a device of this process once more, from the buffers as the step began."""
        with leaving_no_trace(step, self._start):
            step.compute(step.data.fetch_piece(step.batch, piece, device))
            return [parameter.grad for parameter in trained(step.module)]

    def _place(self, trainer: Any, device: int) -> str:
        """A device of this process, for people."""
        devices = getattr(trainer.strategy, "devices", [trainer.strategy.root_device])
        name = "rank" if self.layout.replicas > 1 else "device"
        return f"{name} {device} ({devices[device % len(devices)]} on {platform.node()})"


class Tells(Callback):
    """Logs at a run's end how many pieces were computed again."""

    def __init__(self, hook: AuditHook) -> None:
        self.hook = hook

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        LOG.info(f"audit: {plural(self.hook.pieces, 'piece')} computed again, all the same bits")


class Silent:
    """What the twin of a module has before its class: it logs nothing, since the first time was enough."""

    def log(self, *args: Any, **kwargs: Any) -> None: ...

    log_dict = log


@contextmanager
def leaving_no_trace(step: Step, start: dict[str, Tensor]) -> Iterator[None]:
    """What is computed inside begins with the buffers `start`, and changes neither module nor gradients, metrics, logs
    or random state."""
    module, strategy = step.module, step.strategy
    gradients, now, device = [p.grad for p in module.parameters()], copied(module), strategy.root_device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), strategy.computing_with(silent(module)):
        put_back(module, start)
        for parameter in module.parameters():
            parameter.grad = None
        yield
    put_back(module, now)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient


def silent(module: Any) -> Any:
    """Return a twin that logs nothing, and whose numbers, lists, dicts and metrics change without the module's own."""
    found = twin(module, Silent)
    kept = {name: copy(value) if isinstance(value, dict | list) else value for name, value in vars(module).items()}
    for name, child in module.named_children():
        if any(isinstance(layer, Metric) for layer in child.modules()) and not list(child.parameters()):
            kept["_modules"][name] = deepcopy(child)
    object.__setattr__(found, "__dict__", kept)
    return found


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


def digests(gradients: Gradients) -> Digests:
    """A hash of the bits of each, 64 bits long; empty where there is none."""

    def digest(tensor: Tensor | None) -> bytes:
        if tensor is None:
            return b""
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.blake2b(flat.numpy().data, digest_size=8).digest()

    return tuple(map(digest, gradients))
