"""`strategy=pipeline`: a process per device, each with a stage of the network, through which a step's pieces flow.

Every process runs the module's own `training_step` on every piece, up to its call of `self(x)`. There the first stage
computes from `x` and hands its output on; each later one gets its input from the stage before it; the last one, on rank
zero, returns what the network gives, and its step goes on to the loss. The others leave theirs; when the last stage's
output has come to them, they run it again with that in place of the forward pass, so that losses, metrics and what is
logged are there on every rank. In the backward pass, gradients travel the other way.

The schedule is 1F1B (Narayanan et al., PipeDream, 2019): with r stages after it, a stage is r pieces ahead, and then
takes forward and backward passes in turn, so that it keeps the activations of r + 1 pieces, however many a step has.
Backward passes come in the order of the pieces, as on one device; so sums have the same order, and the same bits.

Handing on is autograd's: the end of a stage is a node whose backward pass waits for the gradient, its beginning one
whose backward pass sends it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.arithmetic.exact import dense
from lockstep.arithmetic.layout import Refusal
from lockstep.step.stages import balanced, contents, measured, parts_of, starts_of
from lockstep.step.strategies.single import PieceStrategy, T, twin

LOG = logging.getLogger("lockstep")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)  # that can be handed on
MOST_DIMENSIONS = 8
ON_THEIR_WAY = 2  # tensors to one rank that are kept until it has them


class Pipeline(PieceStrategy, DDPStrategy):
    """A process per device, a stage each; rank zero has the last one.

    Other stages' parameters keep their names and shapes, and hold nothing: they read as nan.

    Args:
        split: numbers or names of the parts with which the second and later stages begin; none: by measured time.

    Attributes:
        ahead: pieces that this stage's forward passes are ahead of its backward passes.
        waited: seconds that this process has waited for what another one computes.
    """

    def __init__(self, split: tuple[int | str, ...] = ()) -> None:
        super().__init__()
        self.waited = 0.0
        self._split = split
        self._stage: nn.Module | None = None
        self._rank_of: dict[int, int] = {}  # by id of a parameter or layer of a stage
        self._names: dict[str, int] = {}  # the same by name of a parameter or buffer
        self._sent: dict[int, deque[Any]] = defaultdict(deque)
        self._back: Any = None  # the process group for what goes towards the first stage
        self._forward: Any = None  # what takes the place of the module's forward
        self._calls = 0
        self._again = False
        self._inside = False  # of a step of the module's

    @property
    def ahead(self) -> int:  # type: ignore[override]
        return self.global_rank

    # --- the cut ---

    def setup(self, trainer: pl.Trainer) -> None:
        Strategy.setup(self, trainer)  # without DDP
        self.precision_plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]

    def _setup_model(self, model: nn.Module) -> Any:
        if self._stage is None:
            self._cut(model)
        return model

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            for parameter in [p for p in optimizer.state if not self.holds(p)]:  # Adagrad's, which has one at once
                del optimizer.state[parameter]

    def _cut(self, model: Any) -> None:
        """Keeps this rank's stage, and gives up the memory of the others'."""
        parts, stages = parts_of(model), self.world_size
        kind = type(model).__name__
        if not parts:
            raise Refusal(
                f"strategy=pipeline: {kind} is no network in a row that could be cut: it needs an nn.Sequential as its "
                "only network, or a method stages() that returns its modules in order (docs/pipeline.md)"
            )
        if len(parts) < stages:
            raise Refusal(f"strategy=pipeline: {kind} has {len(parts)} parts, too few for {stages} stages")
        modes = [(layer, layer.training) for layer in model.modules()]
        model.eval()
        x = self._example()
        _must_be_forward(model, parts, x, self.precision_plugin)
        if self._split:
            starts = starts_of(model, parts, self._split, stages)
        else:
            with self.precision_plugin.forward_context():
                seconds = measured(parts, x) if self.is_global_zero else []
            starts = balanced(self.broadcast(seconds), stages)
        for layer, training in modes:
            layer.training = training
        for rank, start, end in zip(reversed(range(stages)), [0, *starts], [*starts, len(parts)], strict=True):
            stage = nn.Sequential(*parts[start:end])
            for thing in contents(stage):
                if isinstance(thing, nn.Parameter) and self._rank_of.get(id(thing), rank) != rank:
                    raise Refusal(f"strategy=pipeline: two stages of {kind} share a parameter: strategy.split=...")
                self._rank_of[id(thing)] = rank
            if rank == self.global_rank:
                self._stage = stage
        for path, layer in model.named_modules(remove_duplicate=False):
            for name, parameter in layer.named_parameters(path, recurse=False):
                self._names[name] = self._rank_of.get(id(parameter), 0)
            for name, _ in layer.named_buffers(path, recurse=False):
                self._names[name] = self._rank_of.get(id(layer), 0)
            if isinstance(layer, Metric):  # every rank sees all samples
                layer.distributed_available_fn = _never
        for name, parameter in model.named_parameters():
            if not self.holds(parameter):
                if parameter.requires_grad:
                    parameter.register_hook(_elsewhere(name))
                parameter.data = parameter.new_full((), math.nan).expand(parameter.shape)
        if self.root_device.type == "cuda":  # NCCL's sends of one group would wait for each other
            self._back = dist.new_group()
        if self.is_global_zero:
            LOG.info("%d parts, stages begin with part %s", len(parts), ", ".join(map(str, [0, *starts])))

    def _example(self) -> Any:
        """What the step that is going to be run gives `forward` for a piece of the data."""
        module: Any = self.lightning_module
        trainer = module.trainer
        fits = trainer.state.fn == TrainerFn.FITTING
        name = "training_step" if fits else f"{trainer.state.stage.value}_step"
        args = trainer.datamodule.piece("train" if fits else "test"), 0
        taken = args[: len(signature(getattr(module, name)).parameters)]
        try:
            with self.precision_plugin.forward_context():
                self._call(name, _reach, *taken)
        except _Left as left:
            return left.value

    def holds(self, thing: Any) -> bool:
        return self._rank_of.get(id(thing), 0) == self.global_rank

    # --- passes ---

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss; of a stage before the last, what has its place until the last one's is known."""
        with self.precision_plugin.train_step_context():
            try:
                return self._call("training_step", self._result if self._again else self._train, *args, **kwargs)
            except _Left as left:
                return left.value

    @contextmanager
    def again(self) -> Iterator[None]:
        """Steps inside are those of a piece that the last stage has passed."""
        self._again = True
        try:
            yield
        finally:
            self._again = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call("validation_step", self._evaluate, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._call("test_step", self._evaluate, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._call("predict_step", self._evaluate, *args, **kwargs)

    def _call(self, name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        self._forward, self._calls, self._inside = forward, 0, True
        try:
            found = getattr(twin(self.lightning_module), name)(*args, **kwargs)
        finally:
            self._inside = False
        if not self._calls:
            raise Refusal(f"strategy=pipeline: {name} must call self(x), which passes all stages, not a single layer")
        return found

    def forward(self, args: Any, kwargs: Any) -> Any:
        self._calls += 1
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            raise Refusal("strategy=pipeline: forward() must get one tensor, which its first stage takes")
        if self._calls > 1 and self._forward != self._evaluate:
            raise Refusal("strategy=pipeline: training_step calls forward() more than once; strategy=ddp lets it")
        return self._forward(args[0])

    def _train(self, x: Tensor) -> Tensor:
        start, first = self._random(), self.global_rank + 1 == self.world_size
        assert self._stage is not None
        y: Tensor = self._stage(x if first else _Receive.apply(_anchor(), self))
        if self.global_rank:
            raise _Left(_Send.apply(y, _anchor(), self, start))
        self._tell(y, start)
        return y

    def _result(self, x: Tensor) -> Tensor:
        return self.receive(0)

    def _evaluate(self, x: Tensor) -> Tensor:
        start, first = self._random(), self.global_rank + 1 == self.world_size
        assert self._stage is not None
        y: Tensor = self._stage(x if first else self.receive(self.global_rank + 1))
        if self.global_rank:
            self.send(y, self.global_rank - 1, start)
            return self.receive(0)
        self._tell(y, start)
        return y

    def _tell(self, y: Tensor, start: Tensor) -> None:
        for rank in range(1, self.world_size):
            self.send(y, rank, start)

    # --- handing on ---

    def send(self, tensor: Tensor, to: int, start: Tensor | None = None) -> None:
        """Hands a tensor on, as it lies in memory: kernels may round by that. Where random numbers have been drawn
        since the generators' state `start`, the next stage draws on from here."""
        tensor = tensor.detach()
        once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]  # expanded
        stored = once if dense(once) else once.contiguous()
        strides = [own and new for own, new in zip(tensor.stride(), stored.stride(), strict=True)]
        if tensor.dtype not in DTYPES or tensor.dim() > MOST_DIMENSIONS:
            raise Refusal(f"strategy=pipeline: a stage can't hand on {tensor.dim()} dimensions of {tensor.dtype}")
        state = None if start is None else self._random()
        drawn = state is not None and not torch.equal(state, start)
        header = torch.zeros(4 + 2 * MOST_DIMENSIONS, dtype=torch.int64)
        facts = [tensor.dim(), DTYPES.index(tensor.dtype), drawn, stored.numel(), *tensor.shape, *strides]
        header[: len(facts)] = torch.tensor(facts)
        parts = [header, stored.as_strided((stored.numel(),), (1,)).view(torch.uint8), *([state] if drawn else [])]
        group = self._back if to > self.global_rank else None
        sent = self._sent[to]
        sent.append([(dist.isend(part, to, group), part) for part in parts])
        while len(sent) > ON_THEIR_WAY:
            for work, _ in sent.popleft():
                work.wait()

    def receive(self, source: int) -> Tensor:
        """What `source` has sent."""
        began = time.perf_counter()
        group = self._back if source < self.global_rank else None
        header = torch.empty(4 + 2 * MOST_DIMENSIONS, dtype=torch.int64)
        dist.recv(header, source, group)
        dimensions, kind, drawn, size, *rest = header.tolist()
        shape, strides = rest[:dimensions], rest[dimensions : 2 * dimensions]
        tensor = torch.empty_strided(shape, strides, dtype=DTYPES[kind], device=self.root_device)
        dist.recv(tensor.as_strided((size,), (1,)).view(torch.uint8), source, group)
        if drawn:
            state = self._random()
            dist.recv(state, source, group)
            self._random(state)
        self.waited += time.perf_counter() - began
        return tensor

    def _random(self, state: Tensor | None = None) -> Tensor:
        """The state of the generators that layers draw from, which is `state` from now on."""
        generators = [torch.default_generator]
        if self.root_device.type == "cuda":
            generators.append(torch.cuda.default_generators[self.root_device.index])
        states = [generator.get_state() for generator in generators]
        if state is not None:
            states = list(state.split([len(each) for each in states]))
            for generator, each in zip(generators, states, strict=True):
                generator.set_state(each.clone())
        return torch.cat(states)

    # --- over all stages ---

    def gathered(self, own: dict[T, Any]) -> dict[T, Any]:
        """On rank zero, what all ranks have; elsewhere what this one has."""
        parts: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(own, parts)
        return {key: value for part in parts or [own] for key, value in part.items()}

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {name: value for name, value in tensors.items() if self._names.get(name, 0) == self.global_rank}
        return {**tensors, **self.gathered(_on_cpu(own))}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.whole(super().lightning_module_state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._stage is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        own = {
            name: value
            for name, value in checkpoint["state_dict"].items()
            if self._names.get(name, 0) == self.global_rank
        }
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(own, strict=False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        found = self.gathered(_on_cpu(state["state"]))
        return {**state, "state": {number: found[number] for number in sorted(found)}}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = []
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            own = {number: each for number, each in state["state"].items() if self.holds(parameters[number])}
            states.append({**state, "state": own})
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        norms = torch.zeros(2, len(parameters), dtype=torch.float64, device=self.root_device)
        for at, parameter in enumerate(parameters):
            if parameter.grad is not None:
                norms[0, at] = torch.linalg.vector_norm(parameter.grad)
                norms[1, at] = 1
        dist.all_reduce(norms)  # each has one addend that is not 0
        return torch.linalg.vector_norm(norms[0, norms[1] > 0].to(parameters[0].dtype))

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, self.gradient_norm(parameters))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._inside:
            raise Refusal("strategy=pipeline: a step can't gather from other ranks: each of them has all samples")
        return super().all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Nothing to be done: what is logged is the same on all ranks."""
        return tensor


def _must_be_forward(model: Any, parts: list[nn.Module], x: Tensor, precision: Any) -> None:
    """Refusal: the parts in a row don't compute what `forward` does, or hand on something else than a tensor."""
    kind = f"strategy=pipeline: part {{}} of {type(model).__name__}"
    with torch.no_grad(), precision.forward_context():
        wanted, y = model.forward(x.clone()), x.clone()
        for at, part in enumerate(parts):
            try:
                y = part(y)
            except Exception as error:
                why = str(error).partition("\n")[0]
                raise Refusal(f"{kind.format(at)} can't take what comes before: {why}") from error
            if not isinstance(y, Tensor) or not y.is_floating_point():
                raise Refusal(f"{kind.format(at)} returns no floating-point tensor that could be handed on")
    if not (isinstance(wanted, Tensor) and torch.equal(wanted, y)):
        raise Refusal(
            f"strategy=pipeline: the parts of {type(model).__name__} one after the other don't give what its forward() "
            "does: stages() must return all of it, in order"
        )


class _Send(torch.autograd.Function):
    """The end of a stage: sends its output on; backward, waits for the gradient of that."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, pipeline: Pipeline, start: Tensor) -> Tensor:
        ctx.pipeline = pipeline
        pipeline.send(y, pipeline.global_rank - 1, start)
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.pipeline.receive(ctx.pipeline.global_rank - 1), None, None, None


class _Receive(torch.autograd.Function):
    """The beginning of a stage: waits for its input; backward, sends the gradient of that."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        return pipeline.receive(pipeline.global_rank + 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.pipeline.send(gradient, ctx.pipeline.global_rank + 1)
        return None, None


def _anchor() -> Tensor:
    """By it autograd comes to the ends of a stage of which nothing is trained, too."""
    return torch.zeros((), requires_grad=True)


class _Left(BaseException):
    """Leaves a step at its call of `forward`, past any `except Exception` of its own."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _reach(x: Tensor) -> Tensor:
    raise _Left(x)


def _never() -> bool:
    """Whether a metric is summed over ranks."""
    return False


def _elsewhere(name: str) -> Any:
    def refuse(_: Tensor) -> None:
        raise Refusal(f"strategy=pipeline: training_step uses {name} outside of forward(), and another device holds it")

    return refuse


def _on_cpu(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
