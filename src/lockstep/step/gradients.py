"""The gradient of a step: the sum over its pieces, on this process and over all.

The result is the gradient of the mean loss over the step's samples, also when its tail is short or pieces differ in
size: each micro-batch's mean loss is weighted by its samples over the step's samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.arithmetic.exact_sum import ExactSum, reduce_alone
from lockstep.errors import UserError
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.network_parts import segment_ids
from lockstep.step.protocols import Gradients, StepStrategy
from lockstep.text import plural

if TYPE_CHECKING:
    from lockstep.step.passes import Step

Result = tuple[Gradients, list[float]]  # gradients, and under exact the largest elements, which the next grids follow


def trained_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained now, in the module's order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@dataclass(eq=False)
class StartedSum:
    """A gradient whose sum over all processes may be under way: for each of the `parameters`, None where no process
    has one. All processes read `result` in the same order."""

    parameters: list[torch.nn.Parameter]
    wait: Callable[[], Result]

    @cached_property
    def result(self) -> Result:
        return self.wait()


@dataclass
class SumOptions:
    """What extras ask of a gradient sum, before the first step.

    Attributes:
        uses_reducer: whether DDP may send gradients in the last backward pass. False: `reduce` does.
        sums_at_once: how many steps' sums may be under way at one time.
        check_messages: whether exact sums compare what arrives with what was sent.
    """

    uses_reducer: bool = True
    sums_at_once: int = 1
    check_messages: bool = False


class GradientSum:
    """Sum the gradients of a step's pieces in whatever order the layout computes them: autograd accumulates, and DDP
    averages in the step's last backward pass.

    Args:
        strategy: the trainer's strategy.
        world_size: worker processes over all nodes that share out the pieces.

    Attributes:
        exact: whether the sum is the same in any order.
        options: what extras ask of it.
    """

    exact = False

    def __init__(self, strategy: StepStrategy, world_size: int) -> None:
        self.strategy = strategy
        self.world_size = world_size
        self.options = SumOptions()
        self._by_reducer = False  # whether DDP's reducer sends this step's gradients

    @property
    def processes(self) -> int:
        """Processes over which the gradient is summed."""
        return self.world_size

    def begin(self, step_batch: StepBatch) -> None:
        """Start a step. DDP waits for every process, so each must have a sample; and where what is trained has changed
        since DDP was made, DDP would leave that out."""
        by_ddp = self.world_size > 1 and self.options.uses_reducer
        self._by_reducer = by_ddp and step_batch.all_ranks_have_data and not self.strategy.outdated

    def weight(self, micro_batch: MicroBatch, step_batch: StepBatch) -> float:
        """Return what a micro-batch's mean loss counts for. DDP divides by the world size, so it is multiplied in."""
        return micro_batch.size / step_batch.samples * self.world_size

    def before_piece(self, number: int, step_batch: StepBatch) -> None:
        """Before a micro-batch's forward pass: in the last one, DDP's reducer may send gradients."""
        if self._by_reducer and number == len(step_batch.micro_batches) - 1:
            self.strategy.start_reducer(first=number == 0)

    def collect(self, number: int, step_batch: StepBatch) -> None:
        """After a micro-batch's backward pass."""
        if self._by_reducer and number == len(step_batch.micro_batches) - 1:
            self.strategy.finish_reducer()

    def reduce(self, step: "Step") -> "Step | None":
        """After the last pass: sum over all processes, where DDP had no part in it. A parameter that no gradient has
        reached on any process keeps none, as on one device: an optimizer would decay a weight whose gradient is 0.

        Returns:
            The step of which the parameters have the gradient now; None: none is due.
        """
        if not self._by_reducer and self.world_size > 1:
            self.apply(self.start(step.batch))
        return step

    def start(self, step_batch: StepBatch) -> StartedSum:
        """Take the gradients of this process out of the parameters, and start their sum over all processes."""
        parameters = trained_parameters(self.strategy.lightning_module)
        mine = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        if self.world_size == 1:
            return StartedSum(parameters, lambda: (mine, []))
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, mine, strict=True)]
        reached = gradients[0].new_tensor([gradient is not None for gradient in mine])
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), reached])
        work = dist.all_reduce(flat, async_op=True)

        def wait() -> Result:
            work.wait()
            *parts, reached = flat.split([*(p.numel() for p in parameters), len(parameters)])
            sums: Gradients = []
            for parameter, part, ranks in zip(parameters, parts, reached.tolist(), strict=True):
                part /= self.world_size
                sums.append(torch.empty_like(parameter).copy_(part.view(parameter.shape)) if ranks else None)
            return sums, []

        return StartedSum(parameters, wait)

    def apply(self, started: StartedSum) -> None:
        """Give the parameters the gradients of a sum."""
        for parameter, gradient in zip(started.parameters, started.result[0], strict=True):
            parameter.grad = gradient

    @property
    def waiting(self) -> int:
        """Gradients that are summed, or under way, and not applied yet."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """What the next step's gradient follows from; every process calls it. Plain data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what a checkpoint of any layout holds; an empty dict where the run before was of another kind.

        Raises:
            UserError: it holds gradients that are not applied yet.
        """
        if waiting := state.get("waiting"):
            raise UserError(
                f"the checkpoint holds {plural(len(waiting), 'gradient')} that its run would apply later: go on with "
                "the extras that it was made with"
            )


class ExactGradientSum(GradientSum):
    """Sum without regard to order, so that every layout gets the same bits (see `lockstep.arithmetic.exact_sum`).

    Each piece's gradient is taken by itself and never sent: after the last micro-batch, one all-reduce of integers. A
    piece's mean loss is weighted by its samples, which cancels the mean's division exactly, and the division by the
    step's samples comes last.
    """

    exact = True

    def __init__(self, strategy: StepStrategy, world_size: int) -> None:
        super().__init__(strategy, world_size)
        self.sums: list[ExactSum] = []  # one for each step that may be under way
        self.sum: Any = None  # the present step's
        self.everything: list[torch.nn.Parameter] = []
        self.parameters: list[torch.nn.Parameter] = []  # those that are trained
        self.exponents: list[int | None] = []  # the grids, which follow from the steps before: checkpoints hold them

    def begin(self, step_batch: StepBatch) -> None:
        module = self.strategy.lightning_module
        if not self.everything:
            self.everything = list(module.parameters())
        parameters = [p for p in self.everything if p.requires_grad]
        if not self.sums or [id(p) for p in parameters] != [id(p) for p in self.parameters]:  # unfrozen, say
            borders, mine = segment_ids(module, parameters), [self.strategy.holds(p) for p in parameters]
            self.parameters = parameters
            names: dict[int, str] = {id(p): name for name, p in module.named_parameters()}
            checked = [names[id(p)] for p in parameters] if self.options.check_messages else ()
            like = [p.detach() for p in parameters]
            self.sums = [ExactSum(like, None, borders, mine, checked) for _ in range(self.options.sums_at_once)]
            if len(self.exponents) != len(self.sums[0].exponents):
                self.exponents = self.sums[0].exponents
            for each in self.sums:
                each.exponents = self.exponents
        self.sum = self.sums[step_batch.step % len(self.sums)]
        self.sum.begin(step_batch.step)
        self._reset()

    def _reset(self) -> None:
        for parameter in self.parameters:  # also what no optimizer steps, nor resets
            parameter.grad = None

    def weight(self, micro_batch: MicroBatch, step_batch: StepBatch) -> float:
        return float(micro_batch.size)

    def before_piece(self, number: int, step_batch: StepBatch) -> None:
        """Nothing: DDP's reducer has no part in exact sums."""

    def collect(self, number: int, step_batch: StepBatch) -> None:
        self.sum.add([parameter.grad for parameter in self.parameters])
        self._reset()

    def reduce(self, step: "Step") -> "Step | None":
        self.apply(self.start(step.batch))
        return step

    def start(self, step_batch: StepBatch) -> StartedSum:
        total, units = self.sum, self.sum.pack()
        work = dist.all_reduce(units, async_op=True) if self.world_size > 1 else None

        def wait() -> Result:
            if work is not None:
                work.wait()
            sums, bounds = total.unpack(all_reduce if self.world_size > 1 else reduce_alone, step_batch.samples)
            return [g if reached else None for g, reached in zip(sums, total.present, strict=True)], bounds

        started = StartedSum(self.parameters, wait)
        if (
            self.options.sums_at_once > 1 and None in total.grids
        ):  # of a run's first step; those started until then need a grid
            total.update_grids(started.result[1])
        return started

    def apply(self, started: StartedSum) -> None:
        bounds = started.result[1]
        if self.sum is not None and len(bounds) == len(self.sum.local_groups):  # else others are trained by now
            self.sum.update_grids(bounds)
        super().apply(started)

    def state_dict(self) -> dict[str, Any]:
        """The grids: the next sums round to them."""
        return {"exponents": gather_exponents(self.strategy, self.exponents, self.sum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.exponents = list(state.get("exponents") or self.exponents)


class WrappedGradientSum(GradientSum):
    """Another gradient sum, of which an extra changes a part: all that is not overridden is the other one's."""

    def __init__(self, inner: GradientSum) -> None:
        super().__init__(inner.strategy, inner.world_size)
        self.inner = inner
        self.exact = inner.exact
        self.options = inner.options

    @property
    def processes(self) -> int:
        return self.inner.processes

    def begin(self, step_batch: StepBatch) -> None:
        self.inner.begin(step_batch)

    def weight(self, micro_batch: MicroBatch, step_batch: StepBatch) -> float:
        return self.inner.weight(micro_batch, step_batch)

    def before_piece(self, number: int, step_batch: StepBatch) -> None:
        self.inner.before_piece(number, step_batch)

    def collect(self, number: int, step_batch: StepBatch) -> None:
        self.inner.collect(number, step_batch)

    def reduce(self, step: "Step") -> "Step | None":
        return self.inner.reduce(step)

    def start(self, step_batch: StepBatch) -> StartedSum:
        return self.inner.start(step_batch)

    def apply(self, started: StartedSum) -> None:
        self.inner.apply(started)

    @property
    def waiting(self) -> int:
        return self.inner.waiting

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)


def gather_exponents(strategy: StepStrategy, exponents: list[int | None], total: ExactSum | None) -> list[int | None]:
    """Return the grids of all groups: each process knows those of the groups that it sums. Every process calls it."""
    mine = total.local_groups if total is not None else []
    gathered = strategy.gather_parts({at: exponents[at] for at in mine})
    return [gathered.get(at, exponent) for at, exponent in enumerate(exponents)]


def all_reduce(tensor: Tensor, op: str) -> None:
    """`lockstep.arithmetic.exact_sum.AllReduce` over the default process group."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
