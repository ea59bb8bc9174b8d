"""The gradient of a step: the sum over its pieces, on this process and over all processes.

The result is the gradient of the mean loss over the step's samples, also if the step is short or its pieces differ in
size: the mean loss of each micro-batch is weighted by its samples, divided by the step's samples. If `training_step`
returns weights, each loss is weighted by its weight, divided by their sum, which is known after the last pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.arithmetic.exact_sum import ExactSum, reduce_alone
from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.network_parts import segment_ids
from lockstep.step.strategy import PieceStrategy


def trained_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that require a gradient, in the module's order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class GradientSum:
    """Sum the gradients of a step's pieces, up to rounding.

    Autograd accumulates the gradients of this process, and DDP averages over processes in the last backward pass.

    Args:
        strategy: the trainer's strategy.
        replicas: the processes over which the gradient is summed; see `Layout.replicas`.

    Attributes:
        exact: whether the sum has the same bits in any order.
        exact_sum: the class of the exact sums of a step: of gradients, of buffers and of BatchNorm's statistics.
    """

    exact = False
    exact_sum = ExactSum

    def __init__(self, strategy: PieceStrategy, replicas: int) -> None:
        self.strategy = strategy
        self.replicas = replicas
        self._reducer_sends = False  # whether DDP's reducer sends this step's gradients in the last backward pass

    def begin(self, step_batch: StepBatch) -> None:
        """Start a step. Let DDP's reducer send its gradients, unless a process has no sample, for which DDP would wait.

        Args:
            step_batch: the part of the step that this process computes.
        """
        self._reducer_sends = self.strategy.use_reducer(self.replicas > 1 and step_batch.all_ranks_have_data)

    def weight(self, micro_batch: MicroBatch, step_batch: StepBatch) -> float:
        """Return the weight of a micro-batch's mean loss.

        It includes the factor `replicas`, because DDP divides by it.
        """
        return micro_batch.size / step_batch.samples * self.replicas

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients `reduce` sums."""
        return trained_parameters(self.strategy.lightning_module)

    def collect(self) -> None:
        """Collect the gradient after a backward pass. Here autograd has added it to those before."""

    def reduce(self, step_batch: StepBatch) -> None:
        """Sum over all processes after the last pass, unless DDP's reducer has done so.

        If no process has a gradient for a parameter, its gradient stays None, as on one device: with a gradient of 0,
        an optimizer would apply weight decay.
        """
        scale, is_summed = self.scale(step_batch), self._reducer_sends or self.replicas == 1
        if scale == 1 and is_summed:
            return
        parameters = self.parameters()
        if scale != 1:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
        if is_summed or not parameters:
            return
        flat = flattened(parameters)
        dist.all_reduce(flat)
        for parameter, gradient in zip(parameters, unflattened(parameters, flat, self.replicas), strict=True):
            parameter.grad = gradient

    def scale(self, step_batch: StepBatch) -> float:
        """Return the factor by which the sum of weighted losses becomes their mean; 1 without weights."""
        samples = step_batch.samples if self.replicas > 1 else step_batch.num_local_samples
        return samples / step_batch.weight if step_batch.weight else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later gradients depend, as plain data. Every process calls this."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint of any layout.

        Args:
            state: the result of `state_dict`; empty if the checkpoint's run used another kind of sum.

        Raises:
            UserError: an extra of that run has left a state that would be lost.
        """
        if any(value for name, value in state.items() if name != "exponents"):
            raise UserError(
                "the checkpoint has gradients that its run had not applied yet: resume it with the extras of that run"
            )


class ExactGradientSum(GradientSum):
    """Sum independently of the order, so that every layout gets the same bits (see `lockstep.arithmetic.exact_sum`).

    The gradient of each piece is rounded and added as integers. One all-reduce of integers follows the last
    micro-batch. A piece's mean loss is multiplied by its number of samples, which makes it a sum over samples. The
    total is divided by the step's number of samples once, at the end.
    """

    exact = True

    def __init__(self, strategy: PieceStrategy, replicas: int) -> None:
        super().__init__(strategy, replicas)
        self.sum: Any = None  # the sum of the current step
        self.all_parameters: dict[str, torch.nn.Parameter] = {}
        self.trained: dict[str, torch.nn.Parameter] = {}  # of these, those that require a gradient
        # for each group of parameters that share a grid, the exponent from which the next sum's grid follows
        # (`ExactSum.exponents`); it is chosen from the gradients of earlier steps, so checkpoints have it
        self.exponents: list[int | None] = []

    def begin(self, step_batch: StepBatch) -> None:
        """Start a step. Make a new sum if other parameters are trained than before."""
        self.all_parameters = self.all_parameters or dict(self.strategy.lightning_module.named_parameters())
        trained = {name: p for name, p in self.all_parameters.items() if p.requires_grad}
        if self.sum is None or trained.keys() != self.trained.keys():
            self.trained = trained
            self.sum = self._new_sum()
        self.sum.begin(step_batch.step)
        self._reset()

    def _new_sum(self) -> ExactSum:
        """Return a sum of the trained parameters, with the exponents of a checkpoint or of the last sum."""
        parameters = list(self.trained.values())
        new = self._make_sum(parameters, segment_ids(self.strategy.lightning_module, parameters))
        if len(self.exponents) != len(new.exponents):  # the groups are others now
            self.exponents = new.exponents
        new.exponents = self.exponents
        return new

    def _make_sum(self, parameters: list[torch.nn.Parameter], segments: list[int]) -> ExactSum:
        """Return a sum of the gradients of `parameters`; `segments` are their `segment_ids`."""
        summed_here = [self.strategy.holds(p) for p in parameters]
        return self.exact_sum([p.detach() for p in parameters], None, segments, summed_here, list(self.trained))

    def _reset(self) -> None:
        """Drop the gradients, also of parameters that belong to no optimizer and that `zero_grad` does not reach."""
        for parameter in self.trained.values():
            parameter.grad = None

    def weight(self, micro_batch: MicroBatch, step_batch: StepBatch) -> float:
        """Return the micro-batch's number of samples. `reduce` divides the sum by the step's number of samples."""
        return float(micro_batch.size)

    def collect(self) -> None:
        """Add the gradient of a piece to the sum and drop it."""
        self.sum.add([parameter.grad for parameter in self.trained.values()], unchanged=True)
        self._reset()

    def reduce(self, step_batch: StepBatch) -> None:
        """Sum over all processes, set the parameters' gradients, and choose the grids of later sums."""
        gradients = self.sum.total(all_reduce if self.replicas > 1 else reduce_alone, self.divisor(step_batch))
        triples = zip(self.trained.values(), gradients, self.sum.present, strict=True)
        for parameter, gradient, present in triples:
            self.set_gradient(parameter, gradient if present else None)

    def divisor(self, step_batch: StepBatch) -> float:
        """Return the number by which the sum over samples is divided: of the samples, or the sum of their weights."""
        return step_batch.samples if step_batch.weight is None else step_batch.weight or 1.0

    def set_gradient(self, parameter: torch.nn.Parameter, gradient: Tensor | None) -> None:
        """Set the gradient of a parameter to its sum; None: no process has one."""
        parameter.grad = gradient

    def state_dict(self) -> dict[str, Any]:
        """Return the exponents from which the next sums' grids follow. Every process calls this."""
        return {"exponents": gather_exponents(self.strategy, self.sum) if self.sum else self.exponents}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the exponents from `state_dict`; see `GradientSum.load_state_dict`."""
        super().load_state_dict(state)
        self.exponents = list(state.get("exponents") or self.exponents)
        self.sum = None  # that of an earlier `fit` has other exponents


def flattened(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """Return the gradients of parameters as one vector, behind them 1 or 0 for each: whether it has a gradient."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    has_gradient = gradients[0].new_tensor([p.grad is not None for p in parameters])
    return torch.cat([*(gradient.flatten() for gradient in gradients), has_gradient])


def unflattened(parameters: Sequence[torch.nn.Parameter], flat: Tensor, replicas: int) -> list[Tensor | None]:
    """Return the gradients of parameters from the sum of the results of `flattened` over all processes."""
    sums: list[Tensor | None] = []
    *parts, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, part, num_ranks in zip(parameters, parts, counts.tolist(), strict=True):
        part /= replicas  # as DDP does; `weight` includes this factor
        sums.append(torch.empty_like(parameter).copy_(part.view(parameter.shape)) if num_ranks else None)
    return sums


def gradient_sum(
    strategy: PieceStrategy,
    layout: Layout,
    plain: type[GradientSum] = GradientSum,
    exact: type[GradientSum] = ExactGradientSum,
) -> GradientSum:
    """Return the sum of a step's gradients on a layout.

    Args:
        strategy: computes the pieces.
        layout: the layout.
        plain: the class of a sum up to rounding. With one piece nothing is added, so it is exact, too.
        exact: the class of a sum that is independent of the order.
    """
    return (exact if layout.exact and layout.pieces > 1 else plain)(strategy, layout.replicas)


def gather_exponents(strategy: PieceStrategy, exact_sum: ExactSum) -> list[int | None]:
    """Return `ExactSum.exponents`, on rank zero each from the process that sums the group. Every process calls this."""
    gathered = strategy.gather_dicts({group: exact_sum.exponents[group] for group in exact_sum.local_groups})
    return [gathered.get(group, exponent) for group, exponent in enumerate(exact_sum.exponents)]


def all_reduce(tensor: Tensor, op: str) -> None:
    """Reduce a tensor in place over the default process group: an `AllReduce` for exact sums.

    Args:
        tensor: the tensor, changed in place.
        op: `sum` or `max`.
    """
    dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
