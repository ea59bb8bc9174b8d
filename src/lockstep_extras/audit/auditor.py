"""Compare a piece that is computed twice, and find the rank that damages messages."""

import hashlib
import logging
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from lockstep.arithmetic.exact_sum import CorruptMessage
from lockstep.arithmetic.layout import Layout
from lockstep.checkpoint import paths
from lockstep.checkpoint.io import step_of
from lockstep.errors import WorkerFailed
from lockstep.files import link_file
from lockstep.launch.environment import environment
from lockstep.launch.process_group import barrier_with_timeout, broadcast_from_rank_zero, gather_objects
from lockstep.step.batch import MicroBatch
from lockstep.step.buffers import SavedBuffers, copy_buffers, restore_buffers
from lockstep.step.gradients import trained_parameters
from lockstep.step.outputs import Outputs
from lockstep.step.passes import StepPasses
from lockstep.step.step import Step
from lockstep.step.trial import without_traces
from lockstep.text import join_names, plural
from lockstep_extras.audit.choice import Choice, choose_piece, verdict

LOG = logging.getLogger("lockstep")
PATTERN = 1 << 16  # numbers in a test message
# How long `diagnose_links` waits for all ranks. Ranks whose sum is right do not call it, and the wait then times out.
BARRIER_SECONDS = 5.0
Digests = tuple[bytes, ...]  # hashes of a gradient, one for each parameter


class WrongGradient(WorkerFailed):
    """A device computed a wrong gradient, or damages messages.

    The message names the device, or the few devices one of which is at fault, and the step. For a wrong gradient it
    also names the piece and the first wrong tensor. A restart leaves the first one out, if it leaves any out.

    Args:
        message: the message.
        devices: the devices.
        may_restart: whether the run may go on.
    """

    def __init__(self, message: str, devices: Sequence[int], may_restart: bool = True) -> None:
        super().__init__(message, devices[0])
        self.may_restart = may_restart


class AuditedPasses(StepPasses):
    """Methods for `proxy`: passes that choose pieces, compute them again, and compare. All ranks decide the same.

    The owner is the device that computes a piece in the step. The auditor is the device that computes it again. If
    their results differ, all devices of the `Choice` compute the piece once more: owner, auditor and perhaps a third.
    """

    audit: "Auditor"

    def run(self, step: Step) -> Outputs:
        try:
            return super().run(step)
        except CorruptMessage as error:
            raise diagnose_links(error, step, self.audit.folder) from None

    def compute(self, step: Step) -> None:
        self.audit.choose(step)
        super().compute(step)
        self.audit.compare(step)

    def backward(self, step: Step, index: int) -> None:
        super().backward(step, index)
        self.audit.after_piece(step, step.batch.micro_batches[index])


class Auditor:
    """Chooses pieces, computes them again, and compares the results; see `AuditedPasses`.

    Args:
        share: `extras.audit.share`, the fraction of steps in which one piece is computed again. (It has nothing to do
            with the shares of devices in a layout.)
        seed: the run's seed.
        layout: the layout, which assigns pieces to devices.
        folder: the run's folder.

    Attributes:
        checked_pieces: number of pieces that were computed again with the same bits since this process began.
    """

    def __init__(self, share: float, seed: int, layout: Layout, folder: Path) -> None:
        self.share, self.seed, self.layout, self.folder = share, seed, layout, folder
        self.checked_pieces = 0
        self.choice: Choice | None = None  # of the current step
        self._start_buffers: SavedBuffers = []  # the module's buffers before the current step
        self._owner_digests: Digests | None = None  # the owner's result; None on other ranks
        # By device: the last step, counted from 1, at which the device's result was found right or, before its first
        # comparison, the last step before this process began. Checkpoints up to that step are good.
        self._good_steps: dict[int, int] = {}
        self._devices = range(layout.num_devices)
        # With ddp, several replicas (processes with a whole network) have a device each. With dp, one process has all.
        self._local_devices = {environment().rank} if layout.replicas > 1 else set(self._devices)

    def choose(self, step: Step) -> None:
        """Choose the piece that is computed again, and copy the buffers if there is one."""
        order = step.data.order
        sizes = order.piece_sizes(order.position(step.number)[1])
        layout = step.data.assignment.layout_at(step.number)
        self.choice, self._owner_digests = choose_piece(self.share, self.seed, step.number, sizes, layout), None
        self._good_steps = self._good_steps or dict.fromkeys(self._devices, step.number)
        self._start_buffers = copy_buffers(step.module) if self.choice else []

    def after_piece(self, step: Step, micro_batch: MicroBatch) -> None:
        """Record the owner's result: the parameters have the gradient of the piece."""
        if self.choice and self.choice.piece == micro_batch.piece:
            self._owner_digests = digests([parameter.grad for parameter in trained_parameters(step.module)])

    def compare(self, step: Step) -> None:
        """Compute the chosen piece again and compare the two results, before the gradient is summed.

        Raises:
            WrongGradient: The results differ.
        """
        if self.choice is None:
            return
        piece, (owner, auditor, *_) = self.choice.piece, self.choice.devices

        def compute_locally(devices: Sequence[int]) -> list[tuple[int, Digests]]:
            local_devices = [device for device in devices if device in self._local_devices]
            return [(device, digests(self._compute_again(step, piece, device))) for device in local_devices]

        local_result = [] if self._owner_digests is None else [(owner, self._owner_digests)]
        results = _gather_flat(local_result + compute_locally([auditor]))
        one, other = (result for _, result in results)
        if one == other:
            self.checked_pieces += 1
            self._good_steps |= dict.fromkeys((owner, auditor), step.number + 1)
            return
        wrong, permanent = verdict(results + _gather_flat(compute_locally(self.choice.devices)))
        names = [name for name, p in step.module.named_parameters() if p.requires_grad]
        differing = [name for name, a, b in zip(names, one, other, strict=True) if a != b]
        local_names = [(device, self._name(step.trainer, device)) for device in sorted(self._local_devices)]
        device_names = dict(_gather_flat(local_names))
        suspects = " or ".join(device_names[device] for device in wrong)
        tensors = join_names(differing, 1) + f" ({len(differing)} of {plural(len(names), 'tensor')})"
        times = "twice" if permanent else "once; it was right the second time"
        good_step = min(self._good_steps[device] for device in wrong) if permanent else step.number
        text = f"step {step.number + 1}, piece {piece}: {suspects} computed a wrong gradient of {tensors}, {times}"
        text += f"; the step was not applied, and checkpoints up to step {good_step} are good"
        goes_back = go_back(step, self.folder, good_step)
        raise WrongGradient(text, wrong, goes_back and not (permanent and len(wrong) > 1))

    def _compute_again(self, step: Step, piece: int, device: int) -> list[Tensor | None]:
        """Compute a piece again on a device of this process, with the buffers that the step began with."""
        with restoring_module(step, self._start_buffers):
            micro_batch = step.data.fetch_piece(step.batch, piece, device)
            loss, outputs, _ = step.training_step(step.prepared(micro_batch), micro_batch)
            step.differentiate(loss, micro_batch, outputs.get("weight"))
            return [parameter.grad for parameter in trained_parameters(step.module)]

    def _name(self, trainer: Any, device: int) -> str:
        """Return the name of a device of this process for messages."""
        devices = getattr(trainer.strategy, "devices", [trainer.strategy.root_device])
        kind = "rank" if self.layout.replicas > 1 else "device"
        return f"{kind} {device} ({devices[device % len(devices)]} on {platform.node()})"


class LogAuditCount(Callback):
    """Logs at the end of a run how many pieces were computed again."""

    def __init__(self, audit: Auditor) -> None:
        self.audit = audit

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if count := self.audit.checked_pieces:
            LOG.info(f"audit: {plural(count, 'piece')} computed again, all with the same bits")
        else:
            LOG.info("audit: no piece was computed again")


@contextmanager
def restoring_module(step: Step, start_buffers: SavedBuffers) -> Iterator[None]:
    """Set the module's buffers to `start_buffers` and its gradients to None for the body of a `with` statement.

    Afterwards all is as before. In the body, the module logs nothing.
    """
    gradients = [parameter.grad for parameter in step.module.parameters()]
    with without_traces(step.module, step.trainer):
        restore_buffers(start_buffers)
        step.buffers.restore_parameters()  # the end of the step sets them
        for parameter in step.module.parameters():
            parameter.grad = None
        yield
    for parameter, gradient in zip(step.module.parameters(), gradients, strict=True):
        parameter.grad = gradient


def go_back(step: Step, folder: Path, good_step: int) -> bool:
    """Let a restart continue from the newest checkpoint that wrong values have not affected. Every rank calls this.

    Args:
        step: the step in which they were found.
        folder: the run's folder.
        good_step: the last step that is known to be free of them.

    Returns:
        Whether a restart may continue: there is such a checkpoint, or none at all.
    """
    last, may_continue = paths.last(folder), True
    if step.trainer.is_global_zero:
        step.trainer.strategy.checkpoint_io.wait()
        if last.exists():
            saved = last, *reversed(paths.step_checkpoints(last.parent).values())
            good = next((path for path in saved if 0 <= step_of(path) <= good_step), None)
            if may_continue := good is not None:
                link_file(good, last)
    return broadcast_from_rank_zero(may_continue)


def diagnose_links(damaged: CorruptMessage, step: Step, folder: Path) -> Exception:
    """Return the error for a step whose sum arrived damaged.

    If the sum is damaged on all ranks, each rank sends a test message to the next rank and to the one after that. A
    rank that sends or gets two damaged messages is at fault. With two ranks, either may be at fault. If the sum is
    damaged on some ranks only, these ranks return `damaged`.

    Args:
        damaged: the error of this rank.
        step: the step.
        folder: the run's folder.
    """
    if not barrier_with_timeout(f"a damaged sum in step {step.number + 1}", BARRIER_SECONDS):
        return damaged
    rank, world = dist.get_rank(), dist.get_world_size()
    pattern, wrong = torch.arange(PATTERN, device=step.strategy.root_device), []
    for distance in (1, 2)[: world - 1]:
        source, received = (rank - distance) % world, torch.zeros_like(pattern)
        send = dist.P2POp(dist.isend, pattern.clone(), (rank + distance) % world)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, source)]):
            work.wait()
        wrong += [] if torch.equal(received, pattern) else [(source, rank)]
    links = _gather_flat(wrong)  # pairs (sender, receiver) of damaged messages
    faulty = tuple(end for end, count in Counter(end for link in links for end in link).items() if count > 1)
    diagnosis = "test messages arrive undamaged"
    if faulty:
        diagnosis = f"what rank {' or '.join(map(str, faulty))} sends or gets is damaged again"
    elif links:
        diagnosis = "what rank {} sends to rank {} is damaged again".format(*links[0])
    may_restart = go_back(step, folder, step.number)  # so many steps were applied before
    return WrongGradient(f"{damaged}; {diagnosis}", faulty or (links[0] if links else range(world)), may_restart)


def _gather_flat(local_items: list[Any]) -> list[Any]:
    """Return the items of all ranks, in the order of ranks. Every rank must call it."""
    return [each for items in gather_objects(local_items) for each in items]


def digests(gradients: Sequence[Tensor | None]) -> Digests:
    """Return a 64-bit hash of each gradient's bits; empty bytes for None."""

    def digest(tensor: Tensor | None) -> bytes:
        if tensor is None:
            return b""
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.blake2b(flat.numpy().data, digest_size=8).digest()

    return tuple(map(digest, gradients))
