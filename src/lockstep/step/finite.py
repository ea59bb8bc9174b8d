"""The check for gradients that are not finite. All ranks stop, or skip the step, together."""

import logging
import math
from cmath import isfinite
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.errors import NonFinite
from lockstep.launch.process_group import gather_objects
from lockstep.step.batch import MicroBatch, repeated
from lockstep.step.buffers import SavedBuffers, copy_buffers, restore_buffers
from lockstep.step.hook import StepHook
from lockstep.step.step import Step
from lockstep.step.trial import modes_restored, trial_passes
from lockstep.text import join_names

LOG = logging.getLogger("lockstep")
LEAST_SCALE = 2.0**-14  # loss scale below which a gradient that is not finite is no overflow
RECENT = 20  # steps whose losses are kept, to see a loss that grows
GROWTH = 100  # times the smallest recent loss: a loss that has grown so much explodes
LARGE_WEIGHT = 1e5
MAX_SEARCHES = 3  # of the samples of skipped steps, which take a pass for each sample


class Diagnosis(NamedTuple):
    """What one rank finds out about a step whose gradient is not finite.

    Attributes:
        wrong_loss: whether the loss of one of its pieces is not finite.
        wrong_values: ids of samples that have values that are not finite.
        wrong_losses: ids of samples whose own loss is not finite.
        searched: how many samples' own losses were computed.
        growth: the smallest and the latest loss of the recent steps, if it explodes.
        large_weights: whether a weight is too large, or not finite.
    """

    wrong_loss: bool = False
    wrong_values: tuple[int, ...] = ()
    wrong_losses: tuple[int, ...] = ()
    searched: int = 0
    growth: tuple[float, float] | None = None
    large_weights: bool = False


class FiniteGradientCheck(StepHook):
    """Check each step's gradient after its sum. All ranks have the same gradient, so all make the same decision.

    With `skip`, the host needs the result before the weights change. With `stop`, it may get the result one step later,
    so that it need not wait for the GPU: the result is copied during the next step, and `flush` waits for it before a
    checkpoint.

    Args:
        policy: `stop` raises `NonFinite`; `skip` leaves weights, buffers and optimizer unchanged and continues.
        one_step_later: whether `stop` may get the result one step later; for GPUs.
        compiled: whether torch compiles the networks. The search for a sample runs them uncompiled.

    Attributes:
        skip_advice: what an error message suggests where another policy could help.
    """

    skip_advice = "nonfinite=skip skips such steps"

    def __init__(self, policy: str, one_step_later: bool = False, compiled: bool = False) -> None:
        self.policy = policy
        self.compiled = compiled
        self._losses: deque[tuple[int, list[Tensor]]] = deque(maxlen=RECENT)  # of recent steps, with their numbers
        self._searches = 0
        self.one_step_later = one_step_later and policy == "stop"
        self._buffers: SavedBuffers = []  # as they were before the step
        self._pending: Any = None  # a step's result, the event after which it can be read, and the step

    def before_step(self, step: Step) -> None:
        """Save the buffers (running statistics, for example), in case the step is skipped."""
        if self.policy == "skip":
            self._buffers = copy_buffers(step.module)

    def before_optimizer_step(self, step: Step) -> None:
        """Check the gradient. If the step is skipped, restore the buffers and mark the step."""
        self._losses.append((step.number, step.losses))
        if self._skips_step(step):
            restore_buffers(self._buffers)
            step.buffers.restore_parameters()
            step.batch.skipped = True

    def _skips_step(self, step: Step) -> bool:
        """Check the gradients in `.grad`. Return True if this step must be skipped.

        Raises:
            NonFinite: with `stop`, because of this step or the step before.
        """
        module, strategy = step.module, step.strategy
        groups = step.trainer.optimizers[0].param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if not gradients and strategy.weights == "whole":
            return False
        self.flush()
        number = finite_if_all_are(gradients or [torch.zeros(1, device=strategy.root_device)], self.one_step_later)
        if strategy.weights != "whole":
            dist.all_reduce(number := number.abs().to(strategy.root_device, torch.double))
        if self.one_step_later:
            answer = number.to("cpu", non_blocking=True)
            event = torch.cuda.current_stream(number.device).record_event() if number.is_cuda else None
            self._pending = answer, event, step
            return False
        if isfinite(number.item()):
            return False
        trained = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
        names = [name for name, gradient in trained if not bool(strategy.local_part(gradient).isfinite().all())]
        if strategy.weights != "whole":
            # Backward passes begin in the last stage, so its names come first.
            names = list(dict.fromkeys(name for part in reversed(gather_objects(names)) for name in part))
        if not names:
            return False
        skips = self._skips(step, f" ({join_names(names, 1)})")
        if skips and _scaler(step) is None:  # a scaler checks the gradients itself, so it needs them
            for parameter in chain(module.parameters(), *(group["params"] for group in groups)):
                parameter.grad = None
        return skips

    def flush(self) -> None:
        """Wait for the result of the last step.

        Raises:
            NonFinite: the last step's gradient was not finite.
        """
        if self._pending is not None:
            (number, event, step), self._pending = self._pending, None
            if event is not None:
                event.synchronize()
            if not isfinite(number.item()):
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
        diagnoses, scaler = self._diagnoses(step), _scaler(step)
        wrong = f"step {step.number + 1}: the gradient is not finite{at}, {cause(diagnoses)}"
        if scaler is not None and not any(each.wrong_loss for each in diagnoses):
            if scaler.get_scale() < LEAST_SCALE:
                raise NonFinite(f"{wrong} and the loss scale is {scaler.get_scale():.1g}: use precision=bf16-mixed")
            return False
        if self.policy == "stop":
            raise NonFinite(wrong + self._advice(diagnoses))
        LOG.warning("%s: the step is skipped", wrong)
        return True

    def _advice(self, diagnoses: Sequence[Diagnosis]) -> str:
        """Return what would be right, for the error message; empty if nothing is known."""
        skip = self.skip_advice
        if any(each.wrong_values for each in diagnoses):
            return ": correct the data" + f"; {skip}" * bool(skip)
        if any(each.growth or each.large_weights for each in diagnoses):
            return ": use a smaller learning rate"
        return f": {skip}" * bool(skip)

    def _diagnoses(self, step: Step) -> list[Diagnosis]:
        """Return what each rank finds out about the step; a later rank's samples follow those of an earlier one."""
        pairs = list(zip(step.batch.micro_batches, step.losses, strict=True))
        bad = [micro_batch for micro_batch, loss in pairs if not bool(loss.isfinite())]
        suspects = bad or step.batch.micro_batches
        values = [sample for micro_batch in suspects for sample in samples_with_wrong_values(micro_batch)]
        # One step later, the weights are not those of the step. A stage can't compute a loss alone.
        search = bad and not values and not self.one_step_later and step.strategy.weights != "staged"
        self._searches += 1
        wrong_losses, searched = [], 0
        with step.strategy.whole_weights():
            for micro_batch in bad if search and self._searches <= MAX_SEARCHES else []:
                wrong_losses += samples_with_wrong_loss(step, micro_batch, self.compiled)
                searched += micro_batch.size
        growth = self._growth(step)
        large = not self.one_step_later and any(
            not float(part.abs().max()) < LARGE_WEIGHT
            for p in step.module.parameters()
            if step.strategy.holds(p) and (part := step.strategy.local_part(p.detach())).numel()
        )
        local = Diagnosis(bool(bad), tuple(values), tuple(wrong_losses), searched, growth, large)
        return gather_objects(local) if step.gradients.replicas > 1 else [local]

    def _growth(self, step: Step) -> tuple[float, float] | None:
        """Return the smallest and the latest loss until `step`, if the latest one is much larger.

        The loss of an earlier step may be infinite: its gradient may have been finite. That of `step` may be infinite
        because of one sample.
        """
        losses = [
            abs(float(loss))
            for number, step_losses in self._losses
            for loss in step_losses
            if number < step.number or (number == step.number and bool(loss.isfinite()))
        ]
        losses = [loss for loss in losses if not math.isnan(loss)]
        return (min(losses), losses[-1]) if losses and losses[-1] > GROWTH * max(min(losses), 1.0) else None


def finite_if_all_are(gradients: Sequence[Tensor], exactly: bool = False) -> Tensor:
    """Return a number that is finite if all elements are, 0-dim: the host need not wait for it.

    On a GPU it is the largest element, which takes few kernels for all tensors together. On a CPU it is the sum, which
    takes less time.

    Args:
        gradients: the tensors, on a GPU or in the host's memory.
        exactly: whether the answer must be right. Without it, the sum of finite elements may overflow.
    """
    parts = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in gradients]
    parts = [part for part in parts if part.numel()] or [torch.zeros(1, device=gradients[0].device)]
    device = next((part.device for part in parts if part.device.type != "cpu"), None)
    if exactly or device is not None:
        norms = torch._foreach_norm(parts, math.inf)
        return torch.stack([norm if device in (None, norm.device) else norm.to(device) for norm in norms]).max()
    return torch.stack([part.sum() for part in parts]).sum()


def cause(diagnoses: Sequence[Diagnosis]) -> str:
    """Return text about a gradient that is not finite: it names samples only if they are the cause."""
    values = [sample for each in diagnoses for sample in each.wrong_values]
    losses = [sample for each in diagnoses for sample in each.wrong_losses]
    growth = next((each.growth for each in diagnoses if each.growth), None)
    grown = f", after the loss has grown from {growth[0]:.3g} to {growth[1]:.3g}" if growth else ""
    if values:
        return f"since {_samples(values)} {'have' if len(values) > 1 else 'has'} values that are not finite"
    if losses and len(losses) < sum(each.searched for each in diagnoses):
        return f"nor is the loss of {_samples(losses)}{grown}"
    if any(each.wrong_loss for each in diagnoses):
        return f"nor is the loss of the step's samples{grown}"
    return f"though every loss is finite{grown}"


def _samples(ids: Sequence[int]) -> str:
    return f"sample{'s' * (len(ids) > 1)} {join_names(ids, 8)} of the training set"


def samples_with_wrong_values(micro_batch: MicroBatch) -> list[int]:
    """Return the ids of the samples of a micro-batch that have a value (of an image or label) that is not finite."""
    finite = torch.ones(micro_batch.size, dtype=torch.bool)
    for leaf in tree_leaves(micro_batch.batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim and len(leaf) == micro_batch.size:
            finite &= leaf.isfinite().flatten(1).all(1).cpu() if leaf.ndim > 1 else leaf.isfinite().cpu()
    return [int(sample) for sample in micro_batch.ids[~finite.numpy()]]


def samples_with_wrong_loss(step: Step, micro_batch: MicroBatch, compiled: bool) -> list[int]:
    """Return the ids of the samples of a micro-batch whose own loss is not finite; all of them if this is unknown.

    Each loss is computed in evaluation mode, from the weights before the step, so that BatchNorm does not spread it. If
    the step has made running statistics not finite, it is computed in training mode, of a batch that has the sample
    twice.
    """
    module, wrong = step.module, []
    usable = all(bool(buffer.isfinite().all()) for buffer in module.buffers())
    try:
        with modes_restored(module), trial_passes(module, step.trainer, compiled), torch.no_grad():
            module.train(not usable)
            batch = step.prepared(micro_batch)
            for row, sample in enumerate(micro_batch.ids):
                one = repeated(batch, micro_batch.size, range(row, row + 1), 1 if usable else 2)
                if not bool(step.training_step(one, micro_batch)[0].isfinite()):
                    wrong.append(int(sample))
    except Exception as error:  # a module may need larger batches
        LOG.debug("the sample whose loss is not finite is unknown: %s", error)
        return [int(sample) for sample in micro_batch.ids]
    return wrong


def _scaler(step: Step) -> torch.amp.GradScaler | None:
    """Return the loss scaler of a run, if it has one. It lowers its scale after infinities and skips those steps."""
    return getattr(step.trainer.precision_plugin, "scaler", None)
