"""Run `strategy=pipeline`: one process per device, each with one stage of the network.

The network is a sequence of parts: the entries of its nn.Sequential, or the modules that its method `stages()` returns.
A stage is one or more neighbouring parts.

Every process runs the module's own `training_step` on every piece, up to its call of `self(x)`. There, the first stage
computes from `x` and sends its output to the next stage. Each later stage computes from what it receives. The last
stage, on rank zero, sends its output to all processes and continues to the loss. The other processes leave their
`training_step` at the call. Later they run it a second time, with gradients disabled. This time `self(x)` returns the
last stage's output, so every rank has the losses, metrics and logs. In the backward pass, gradients are sent the other
way: an autograd node at the end of a stage receives the gradient, and another at its beginning sends one.

The schedule is 1F1B (Narayanan et al., PipeDream, 2019). A stage with r stages after it starts with r forward passes,
and then alternates between forward and backward passes. So it stores the activations of r + 1 pieces, however many
pieces a step has. Backward passes run in the order of the pieces, as on one device, so sums have the same bits.
"""

import logging
import math
import pickle
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lockstep.arithmetic.exact_sum import dense
from lockstep.arithmetic.layout import Layout
from lockstep.errors import StepRefused, UserError
from lockstep.lightning.precision import ClipsByStrategy
from lockstep.lightning.strategy import Schedule, StepStrategy
from lockstep.step.batch import StepBatch
from lockstep.step.network_parts import contents, parts_of
from lockstep.step.outputs import Outputs
from lockstep.step.passes import StepPasses
from lockstep.step.step import Step
from lockstep.step.strategy import T, generators, proxy
from lockstep.step.trial import modes_restored

LOG = logging.getLogger("lockstep")
TIMED_PASSES = 3  # forward passes in which each part is timed; the shortest time is used
# Bytes of the message before a tensor: its dtype, shape and strides, and the states of the random generators, of which
# the CPU's has 5,056 bytes.
HEADER = 1 << 13
MAX_IN_FLIGHT = 2  # most unfinished sends to one rank
# An input of `_Receive` and `_Send` that requires a gradient. With it autograd runs the backward of both, even if the
# stage has no trained parameters.
ANCHOR = torch.zeros((), requires_grad=True)


class StagedStrategy(StepStrategy, DDPStrategy):
    """One process per device, each with one stage. Rank zero has the last stage.

    Parameters of other stages keep their names and shapes, and their values are nan.

    Args:
        layout: the run's layout.
        schedule: see `StepStrategy`.
        split: numbers or names of the parts with which the second and later stages begin; empty: the
            parts' times are measured, and the cut makes the slowest stage as fast as possible.

    Attributes:
        waited_seconds: time that this process has waited for other stages.
    """

    def __init__(self, layout: Layout, schedule: Schedule, split: tuple[int | str, ...] = ()) -> None:
        super().__init__(layout, schedule)
        self.waited_seconds = 0.0
        self._split = split
        self._stage: Any = None
        self._is_first_stage = False
        self._rank_of: dict[int, int] = {}  # by id of a parameter, buffer or layer
        self._rank_of_name: dict[str, int] = {}  # by name of a parameter or buffer
        self._sends: dict[int, deque[Any]] = defaultdict(deque)  # unfinished sends, by the rank that receives
        self._group_back: Any = None  # the process group for sends towards the first stage
        self._step = ""  # the name of the module's step method that is running
        self._calls = 0  # calls of forward() in it

    # --- the cut ---

    def setup(self, trainer: pl.Trainer) -> None:
        Strategy.setup(self, trainer)  # that of DDPStrategy would wrap the module for DDP
        loop: Any = trainer.fit_loop.epoch_loop
        if not isinstance(loop.passes, StagedPasses):
            loop.passes = proxy(loop.passes, StagedPasses)

    def _setup_model(self, model: nn.Module) -> Any:
        if self._stage is None:
            self._cut(model)
            self._is_first_stage = self.global_rank == self.world_size - 1
            self.precision_plugin = proxy(self.precision_plugin, ClipsByStrategy)
            vars(self.precision_plugin)["strategy"] = self  # Lightning's class does not declare it
        return model

    def _cut(self, model: Any) -> None:
        """Cut the network into stages. Keep this rank's stage, and free the memory of the others.

        Raises:
            UserError: The network can't be cut into this number of stages.
        """
        parts, stages, kind = parts_of(model), self.world_size, type(model).__name__
        if not parts:
            needs = "an nn.Sequential as its only network, or a method stages() that returns its modules in order"
            wrong = f"strategy=pipeline: {kind} can't be cut into stages"
            raise UserError(f"{wrong}: it needs {needs} (lockstep docs pipeline)")
        if len(parts) < stages:
            raise UserError(f"strategy=pipeline: {kind} has {len(parts)} parts for {stages} stages: use fewer devices")
        seconds = self.broadcast(self._measure_parts(model, parts))
        starts = stage_starts(model, parts, self._split, stages) if self._split else balanced(seconds, stages)
        for rank, start, end in zip(reversed(range(stages)), [0, *starts], [*starts, len(parts)], strict=True):
            stage = nn.Sequential(*parts[start:end])
            if any(self._rank_of.get(id(parameter), rank) != rank for parameter in stage.parameters()):
                raise UserError(
                    f"strategy=pipeline: stages of {kind} share a parameter: use another strategy.split=[...]"
                )
            self._rank_of |= dict.fromkeys(map(id, contents(stage)), rank)
            if rank == self.global_rank:
                self._stage = stage
        self._rank_of_name = {name: self._owner(value) for name, value in model.state_dict(keep_vars=True).items()}
        for layer in model.modules():
            if isinstance(layer, Metric):  # every rank gets all samples
                layer.distributed_available_fn = lambda: False
        for name, parameter in model.named_parameters():
            if not self.holds(parameter):
                if parameter.requires_grad:
                    parameter.register_hook(partial(_refuse, name))
                parameter.data = parameter.new_full((), math.nan).expand(parameter.shape)
        if self.root_device.type == "cuda":  # in one group, NCCL's sends of both directions would wait for each other
            self._group_back = dist.new_group()
        if self.is_global_zero:
            LOG.info("%d parts, stages begin with part %s", len(parts), ", ".join(map(str, [0, *starts])))

    def _measure_parts(self, model: Any, parts: list[nn.Module]) -> list[float]:
        """Return the seconds that the forward pass of each part takes for a piece.

        Raises:
            UserError: The parts, called one after the other, don't give the result of `forward`.
        """
        seconds, reason = [math.inf] * len(parts), ""
        with modes_restored(model), torch.no_grad(), self.precision_plugin.forward_context():
            model.eval()
            x = y = self._example(model)
            wanted = model.forward(x.clone())
            try:
                for _ in range(TIMED_PASSES):
                    y = x.clone()
                    for index, part in enumerate(parts):
                        start = time.perf_counter()
                        y = part(y)
                        if x.is_cuda:
                            torch.cuda.synchronize()
                        seconds[index] = min(seconds[index], time.perf_counter() - start)
            except Exception as error:
                reason = f" (part {index}: {str(error).splitlines()[0]})"
        same = isinstance(wanted, Tensor) and wanted.shape == y.shape
        if reason or not (same and torch.allclose(wanted, y, rtol=0, atol=0, equal_nan=True)):
            what = f"the parts of {type(model).__name__} in order don't give the result of its forward(){reason}"
            raise UserError(f"strategy=pipeline: {what}: stages() must return all parts, in order")
        return seconds

    def _example(self, model: Any) -> Any:
        """Return the tensor that the step method of this run passes to `forward` for a piece of the data."""
        trains = model.trainer.state.fn == "fit"
        name = "training_step" if trains else f"{model.trainer.state.stage.value}_step"
        args = model.trainer.datamodule.piece("train" if trains else "test"), 0
        return self.call(name, *args[: len(signature(getattr(model, name)).parameters)])

    def _owner(self, thing: Any) -> int:
        """Return the rank whose stage has a parameter, buffer or layer; 0 if no stage has it."""
        return self._rank_of.get(id(thing), 0)

    def holds(self, thing: Any) -> bool:
        return self._owner(thing) == self.global_rank

    # --- passes ---

    def passes_communicate(self) -> bool:
        return True

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step method of the module.

        In the first run of `training_step` on a stage before the last, return the tensor from which this stage's
        backward pass starts. In the second run, with gradients disabled, return what the method returns.
        """
        self._step, self._calls = name, 0
        try:
            output = getattr(proxy(self.lightning_module, _StagedForward), name)(*args, **kwargs)
        except _StepLeft as error:
            return error.args[0]
        if not self._calls:
            raise UserError(f"strategy=pipeline: {name} called no self(x): it must call self(x), not single layers")
        return output

    def forward(self, args: Any, kwargs: Any) -> Any:
        self._calls += 1
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            raise UserError("strategy=pipeline: forward() got other arguments: call self(x) with one tensor")
        if self._stage is None:  # before the cut, `_example` needs the argument
            raise _StepLeft(args[0])
        if self._step != "training_step":
            return self._evaluate(args[0])
        if self._calls > 1:
            raise UserError("strategy=pipeline: training_step must call forward() once only; or use strategy=ddp")
        return self._train(args[0])

    def _train(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # the second run: the last stage has computed this piece
            return self.receive(0)
        y: Tensor = self._stage(x if self._is_first_stage else _Receive.apply(ANCHOR, self))
        if self.global_rank:
            raise _StepLeft(_Send.apply(y, ANCHOR, self))
        return self._send_to_all(y)

    def _evaluate(self, x: Tensor) -> Tensor:
        y: Tensor = self._stage(x if self._is_first_stage else self.receive(self.global_rank + 1))
        if not self.global_rank:
            return self._send_to_all(y)
        self.send(y, self.global_rank - 1)
        return self.receive(0)

    def _send_to_all(self, y: Tensor) -> Tensor:
        for rank in range(1, self.world_size):
            self.send(y, rank)
        return y

    # --- sending and receiving ---

    def send(self, tensor: Tensor, receiver: int) -> None:
        """Send a tensor, its memory layout and the states of the random generators to the rank `receiver`.

        The memory layout affects the rounding of kernels. The next stage's layers continue the random numbers.
        """
        if not tensor.is_floating_point():
            raise UserError(
                f"strategy=pipeline: {tensor.dtype} from a stage has no gradient: use another strategy.split=[...]"
            )
        # of an expanded dimension (stride 0), one element is sent
        unexpanded = tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
        stored = unexpanded if dense(unexpanded) else unexpanded.contiguous()
        strides = [new if old else 0 for old, new in zip(tensor.stride(), stored.stride(), strict=True)]
        states = [generator.get_state().numpy() for generator in generators(self.root_device)]
        header = bytearray(pickle.dumps((tensor.dtype, tensor.shape, strides, states)).ljust(HEADER))
        group = self._group_back if receiver > self.global_rank else None
        messages = torch.frombuffer(header, dtype=torch.uint8), _flat(stored)
        self._sends[receiver].append([(dist.isend(message, receiver, group), message) for message in messages])
        while len(self._sends[receiver]) > MAX_IN_FLIGHT:
            for work, _ in self._sends[receiver].popleft():
                work.wait()

    def receive(self, source: int) -> Tensor:
        """Wait for a tensor from rank `source` and return it. Set the random generators to the states sent with it."""
        began = time.perf_counter()
        group = self._group_back if source < self.global_rank else None
        header = torch.empty(HEADER, dtype=torch.uint8)
        dist.recv(header, source, group)
        dtype, shape, strides, states = pickle.loads(header.numpy().data)  # from a worker of this run
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=self.root_device)
        dist.recv(_flat(tensor), source, group)
        for generator, state in zip(generators(self.root_device), states, strict=True):
            generator.set_state(torch.from_numpy(state))
        self.waited_seconds += time.perf_counter() - began
        return tensor

    # --- over all stages ---

    def gather_dicts(self, local_values: dict[T, Any]) -> dict[T, Any]:
        dicts: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), local_values), dicts)
        return {key: value for values in dicts or [local_values] for key, value in values.items()}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        return {**state, **self.gather_dicts(self._select_local(state))}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        local_state = self._select_local(checkpoint["state_dict"])  # before the cut this is the whole state
        super().load_model_state_dict({"state_dict": local_state}, strict and self._stage is None)

    def _select_local(self, state: Mapping[str, Any]) -> dict[str, Any]:
        rank = self.global_rank
        return {name: value for name, value in state.items() if self._rank_of_name.get(name, rank) == rank}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state = self._select_local_state(optimizer, super().optimizer_state(optimizer))
        return {**state, "state": dict(sorted(self.gather_dicts(state["state"]).items()))}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = map(self._select_local_state, self.optimizers, checkpoint["optimizer_states"])
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": list(states)})

    def _select_local_state(self, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        local_values = {number: value for number, value in state["state"].items() if self.holds(parameters[number])}
        return {**state, "state": local_values}

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        # One column for each parameter: its gradient's norm, and 1 if it has a gradient. The rank whose stage has the
        # parameter fills its column, which stays 0 on the other ranks.
        norms = torch.zeros(2, len(parameters), dtype=torch.float64, device=self.root_device)
        for column, parameter in zip(norms.T, parameters, strict=True):
            if parameter.grad is not None:
                column.copy_(torch.stack([torch.linalg.vector_norm(parameter.grad).double(), norms.new_ones(())]))
        dist.all_reduce(norms)
        return torch.linalg.vector_norm(norms[0, norms[1] > 0].to(parameters[0].dtype))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the value unchanged: logged values are the same on all ranks."""
        return tensor


class StagedPasses(StepPasses):
    """A method for `proxy`: the steps are those of stages."""

    def new_step(self, step_batch: StepBatch) -> Step:
        return StagedStep(step_batch, self.trainer, self.gradients, self.seed, *self._passes)


class StagedStep(Step):
    """A step of which this process computes one stage.

    Without the last stage, the first call of `training_step` ends with the stage's output. A second call, before the
    backward pass and without gradients, gets the network's output and returns the loss.
    """

    def forward(self, index: int) -> None:
        if self.trainer.is_global_zero:
            super().forward(index)
            return
        micro_batch = self.batch.micro_batches[index]
        batch = self.prepared(micro_batch)
        self._pending[index] = self.training_step(batch, micro_batch)[0], batch

    def backward(self, index: int) -> None:
        if self.trainer.is_global_zero:
            super().backward(index)
            return
        micro_batch = self.batch.micro_batches[index]
        sent, batch = self._pending.pop(index)
        with torch.no_grad():
            _, outputs, others = self.training_step(batch, micro_batch)
            self.record(index, outputs, others)
        self.backward_pass(sent, micro_batch)  # it receives a gradient that is weighted already

    def record(self, index: int, outputs: Outputs, others: dict[str, Any]) -> None:
        if "weight" in outputs:
            raise StepRefused("training_step returns a weight, which stages can't sum: use another strategy")
        super().record(index, outputs, others)


class _StagedForward:
    """A method for `proxy`: the proxy of a module has it in place of its own `forward`.

    It runs the strategy's `forward`, which passes all stages.
    """

    trainer: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.trainer.strategy.forward(args, kwargs)


class _Send(torch.autograd.Function):
    """The end of a stage: forward sends its output, backward receives the gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, pipeline: StagedStrategy) -> Tensor:
        ctx.pipeline = pipeline
        pipeline.send(y, pipeline.global_rank - 1)
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.pipeline.receive(ctx.pipeline.global_rank - 1), None, None


class _Receive(torch.autograd.Function):
    """The beginning of a stage: forward receives its input, backward sends the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pipeline: StagedStrategy) -> Tensor:
        ctx.pipeline = pipeline
        return pipeline.receive(pipeline.global_rank + 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.pipeline.send(gradient, ctx.pipeline.global_rank + 1)
        return None, None


class _StepLeft(BaseException):
    """Leaves a step method at its call of `forward`, with a tensor. An `except Exception` in it does not catch this."""


def _refuse(name: str, _: Tensor) -> None:
    raise UserError(
        f"strategy=pipeline: training_step uses {name}, which is on another device: use it in forward() only"
    )


def _flat(stored: Tensor) -> Tensor:
    """Return a view of a tensor's bytes, uint8 [bytes]."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(stored.shape, stored.stride(), strict=True))
    return stored.as_strided((elements,), (1,)).view(torch.uint8)


def stage_starts(module: nn.Module, parts: Sequence[nn.Module], split: Sequence[int | str], stages: int) -> list[int]:
    """Return the numbers of the parts with which the second and later stages begin, as `strategy.split` gives them.

    Args:
        module: the module that contains the parts.
        parts: the network's parts in order.
        split: numbers or names of parts.
        stages: number of stages.

    Raises:
        UserError: A part does not exist, or the number or the order of the parts is wrong.
    """
    dotted_names = {id(layer): name for name, layer in module.named_modules()}
    names = [dotted_names.get(id(part), str(at)).rpartition(".")[2] for at, part in enumerate(parts)]
    setting = f"strategy.split=[{','.join(map(str, split))}]"
    if unknown := [part for part in split if part not in names and part not in range(len(parts))]:
        raise UserError(
            f"{setting}: there is no part {unknown[0]}; known: 0 to {len(parts) - 1}, or {', '.join(names)}"
        )
    starts = [part if isinstance(part, int) else names.index(part) for part in split]
    if len(starts) != stages - 1 or sorted({0, *starts}) != [0, *starts]:
        raise UserError(f"{setting}: must name the first part of each later stage, {stages - 1} in all")
    return starts


def balanced(seconds: Sequence[float], stages: int) -> list[int]:
    """Return the parts with which the second and later stages begin, so that the slowest stage is as fast as possible.

    Args:
        seconds: measured seconds of each part.
        stages: number of stages.
    """

    @cache
    def best(start: int, count: int) -> tuple[float, tuple[int, ...]]:
        """Cut the parts from `start` on into `count` stages.

        Return the time of the slowest stage, and the first parts of the second and later stages.
        """
        if count == 1:
            return sum(seconds[start:]), ()
        cuts = ((cut, best(cut, count - 1)) for cut in range(start + 1, len(seconds) - count + 2))
        return min((max(sum(seconds[start:cut]), slowest), (cut, *later)) for cut, (slowest, later) in cuts)

    return list(best(0, stages)[1])
