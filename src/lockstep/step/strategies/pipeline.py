"""`strategy=pipeline`: a process per device, each with a stage of the network, through which a step's pieces flow.

Every process runs the module's own `training_step` on every piece, up to its call of `self(x)`. There the first stage
computes from `x` and hands its output on, later ones compute from what they get, and the last one, on rank zero, goes
on to the loss. The others leave theirs; when the last stage's output has come to them, they run it again with that in
place of the forward pass, so that losses, metrics and what is logged are there on every rank. In the backward pass
gradients travel the other way: the end of a stage is a node of autograd's that waits for its gradient there, its
beginning one that sends it.

The schedule is 1F1B (Narayanan et al., PipeDream, 2019): with r stages after it, a stage is r pieces ahead, and then
takes forward and backward passes in turn, so that it keeps the activations of r + 1 pieces, however many a step has.
Backward passes come in the order of the pieces, as on one device: sums have the same order, and the same bits.
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
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lockstep.arithmetic.exact import dense
from lockstep.arithmetic.layout import Refusal
from lockstep.step.stages import balanced, chosen, contents, parts_of
from lockstep.step.strategies.single import PieceStrategy, T, twin

LOG = logging.getLogger("lockstep")
MEASURED = 3  # passes of which the fastest counts
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
DIMENSIONS = 8  # of a tensor that is handed on, at most
KEPT = 2  # tensors on their way to one rank; then it is waited for


class Pipeline(PieceStrategy, DDPStrategy):
    """A process per device, a stage each; rank zero has the last one. Parameters of other stages keep their names and
    shapes, and read as nan.

    Args:
        split: numbers or names of the parts with which the second and later stages begin; none: by measured time.

    Attributes:
        waited: seconds that this process has waited for what others compute.
    """

    def __init__(self, split: tuple[int | str, ...] = ()) -> None:
        super().__init__()
        self.waited = 0.0
        self._split = split
        self._stage: nn.Module | None = None
        self._rank_of: dict[int, int] = {}  # by id of a stage's parameters, buffers and layers
        self._names: dict[str, int] = {}  # by name of a parameter or buffer
        self._sent: dict[int, deque[Any]] = defaultdict(deque)
        self._back: Any = None  # the process group of what goes towards the first stage
        self._instead: Any = None  # what takes the place of the module's forward
        self._calls = 0
        self._again = False

    @property
    def ahead(self) -> int:  # type: ignore[override]
        return self.global_rank

    @property
    def _first(self) -> bool:
        return self.global_rank == self.world_size - 1

    # --- the cut ---

    def setup(self, trainer: pl.Trainer) -> None:
        Strategy.setup(self, trainer)  # without DDP
        self.precision_plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]

    def _setup_model(self, model: nn.Module) -> Any:
        if self._stage is None:
            self._cut(model)
        return model

    def _cut(self, model: Any) -> None:
        """Keeps this rank's stage, and gives up the memory of the others'."""
        parts, stages, kind = parts_of(model), self.world_size, type(model).__name__
        if not parts:
            raise Refusal(
                f"strategy=pipeline: {kind} is no network in a row that could be cut: it needs an nn.Sequential as its "
                "only network, or a method stages() that returns its modules in order (docs/pipeline.md)"
            )
        if len(parts) < stages:
            raise Refusal(f"strategy=pipeline: {kind} has {len(parts)} parts, too few for {stages} stages")
        seconds = self.broadcast(self._measured(model, parts))
        starts = chosen(model, parts, self._split, stages) if self._split else balanced(seconds, stages)
        for rank, start, end in zip(reversed(range(stages)), [0, *starts], [*starts, len(parts)], strict=True):
            stage = nn.Sequential(*parts[start:end])
            if any(self._rank_of.get(id(parameter), rank) != rank for parameter in stage.parameters()):
                raise Refusal(f"strategy=pipeline: stages of {kind} share a parameter; strategy.split=[...] elsewhere")
            self._rank_of |= dict.fromkeys(map(id, contents(stage)), rank)
            if rank == self.global_rank:
                self._stage = stage
        self._names = {name: self._owner(value) for name, value in model.state_dict(keep_vars=True).items()}
        for layer in model.modules():
            if isinstance(layer, Metric):  # every rank sees all samples
                layer.distributed_available_fn = _never
        for name, parameter in model.named_parameters():
            if not self.holds(parameter):
                if parameter.requires_grad:
                    parameter.register_hook(_refuses(name))
                parameter.data = parameter.new_full((), math.nan).expand(parameter.shape)
        if self.root_device.type == "cuda":  # NCCL's sends of one group wait for each other
            self._back = dist.new_group()
        if self.is_global_zero:
            LOG.info("%d parts, stages begin with part %s", len(parts), ", ".join(map(str, [0, *starts])))

    def _measured(self, model: Any, parts: list[nn.Module]) -> list[float]:
        """Seconds that each part takes for a piece.

        Raises:
            Refusal: in a row they don't give what `forward` does.
        """
        modes = [(layer, layer.training) for layer in model.modules()]
        model.eval()
        seconds, why = [math.inf] * len(parts), ""
        with torch.no_grad(), self.precision_plugin.forward_context():
            x = y = self._example(model)
            wanted = model.forward(x.clone())
            try:
                for _ in range(MEASURED):
                    y = x.clone()
                    for at, part in enumerate(parts):
                        start = time.perf_counter()
                        y = part(y)
                        if x.is_cuda:
                            torch.cuda.synchronize()
                        seconds[at] = min(seconds[at], time.perf_counter() - start)
            except Exception as error:
                why = f" (part {at}: {str(error).splitlines()[0]})"
        if why or not (isinstance(wanted, Tensor) and torch.equal(wanted, y)):
            raise Refusal(
                f"strategy=pipeline: the parts of {type(model).__name__} one after the other don't give what its "
                f"forward() does{why}: stages() must return all of it, in order"
            )
        for layer, training in modes:
            layer.training = training
        return seconds

    def _example(self, model: Any) -> Any:
        """What the step that is going to be run gives `forward` for a piece of the data."""
        fits = model.trainer.state.fn == "fit"
        name = "training_step" if fits else f"{model.trainer.state.stage.value}_step"
        args = model.trainer.datamodule.piece("train" if fits else "test"), 0
        try:
            return self._call(name, _leave, *args[: len(signature(getattr(model, name)).parameters)])
        except _Left as left:
            return left.value

    def _owner(self, thing: Any) -> int:
        return self._rank_of.get(id(thing), 0)

    def holds(self, thing: Any) -> bool:
        return self._owner(thing) == self.global_rank

    # --- passes ---

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss; of a stage before the last, what has its place until the last one's is known."""
        with self.precision_plugin.train_step_context():
            try:
                return self._call("training_step", self._told if self._again else self._train, *args, **kwargs)
            except _Left as left:
                return left.value

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call("validation_step", self._evaluate, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._call("test_step", self._evaluate, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._call("predict_step", self._evaluate, *args, **kwargs)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Training steps inside are those of pieces that the last stage has passed."""
        self._again = True
        try:
            yield
        finally:
            self._again = False

    def _call(self, name: str, instead: Any, *args: Any, **kwargs: Any) -> Any:
        self._instead, self._calls = instead, 0
        found = getattr(twin(self.lightning_module), name)(*args, **kwargs)
        if not self._calls:
            raise Refusal(f"strategy=pipeline: {name} must call self(x), which passes all stages, not a single layer")
        return found

    def forward(self, args: Any, kwargs: Any) -> Any:
        self._calls += 1
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            raise Refusal("strategy=pipeline: forward() must get one tensor, which the first stage takes")
        if self._calls > 1 and self._instead != self._evaluate:
            raise Refusal("strategy=pipeline: training_step calls forward() more than once; strategy=ddp lets it")
        return self._instead(args[0])

    def _train(self, x: Tensor) -> Tensor:
        assert self._stage is not None
        y: Tensor = self._stage(x if self._first else _Receive.apply(_anchor(), self))
        if self.global_rank:
            raise _Left(_Send.apply(y, _anchor(), self))
        return self._tell(y)

    def _evaluate(self, x: Tensor) -> Tensor:
        assert self._stage is not None
        y: Tensor = self._stage(x if self._first else self.receive(self.global_rank + 1))
        if not self.global_rank:
            return self._tell(y)
        self.send(y, self.global_rank - 1)
        return self.receive(0)

    def _tell(self, y: Tensor) -> Tensor:
        for rank in range(1, self.world_size):
            self.send(y, rank)
        return y

    def _told(self, x: Tensor) -> Tensor:
        return self.receive(0)

    # --- handing on ---

    def send(self, tensor: Tensor, to: int) -> None:
        """Hands on a tensor, as it lies in memory, since kernels may round by that, and the state of the generators, so
        that the next stage's layers draw on from there."""
        once = tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
        stored = once if dense(once) else once.contiguous()
        strides = [own and new for own, new in zip(tensor.stride(), stored.stride(), strict=True)]
        if tensor.dtype not in DTYPES or tensor.dim() > DIMENSIONS:
            raise Refusal(f"strategy=pipeline: a stage can't hand on {tensor.dim()} dimensions of {tensor.dtype}")
        facts = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *strides]
        about = torch.tensor([*facts, *[0] * (2 + 2 * DIMENSIONS - len(facts))])
        group = self._back if to > self.global_rank else None
        parts = torch.cat([about.view(torch.uint8), self._random()]), _flat(stored)
        self._sent[to].append([(dist.isend(part, to, group), part) for part in parts])
        while len(self._sent[to]) > KEPT:
            for work, _ in self._sent[to].popleft():
                work.wait()

    def receive(self, source: int) -> Tensor:
        """What `source` has sent."""
        began, own = time.perf_counter(), self._random()
        group = self._back if source < self.global_rank else None
        header = torch.empty(8 * (2 + 2 * DIMENSIONS) + len(own), dtype=torch.uint8)
        dist.recv(header, source, group)
        about, state = header.split([len(header) - len(own), len(own)])
        kind, dimensions, *rest = about.view(torch.int64).tolist()
        shape, strides = rest[:dimensions], rest[dimensions : 2 * dimensions]
        tensor = torch.empty_strided(shape, strides, dtype=DTYPES[kind], device=self.root_device)
        dist.recv(_flat(tensor), source, group)
        self._random(state)
        self.waited += time.perf_counter() - began
        return tensor

    def _random(self, state: Tensor | None = None) -> Tensor:
        """The state of the generators that layers draw from; they take another one."""
        host, device = torch.get_rng_state(), self.root_device
        states = [host, *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
        if state is not None:
            torch.set_rng_state(state[: len(host)].clone())
            if device.type == "cuda":
                torch.cuda.set_rng_state(state[len(host) :].clone(), device)
        return torch.cat(states)

    # --- over all stages ---

    def gathered(self, own: dict[T, Any]) -> dict[T, Any]:
        parts: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), own), parts)
        return {key: value for part in parts or [own] for key, value in part.items()}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        return {**state, **self.gathered(self._own(state))}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        own = self._own(checkpoint["state_dict"])  # all, before the cut
        super().load_model_state_dict({"state_dict": own}, strict and self._stage is None)

    def _own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        rank = self.global_rank
        return {name: value for name, value in state.items() if self._names.get(name, rank) == rank}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state = self._own_state(optimizer, super().optimizer_state(optimizer))
        return {**state, "state": dict(sorted(self.gathered(state["state"]).items()))}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = map(self._own_state, self.optimizers, checkpoint["optimizer_states"])
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": list(states)})

    def _own_state(self, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = {number: value for number, value in state["state"].items() if self.holds(parameters[number])}
        return {**state, "state": own}

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        norms = torch.zeros(2, len(parameters), dtype=torch.float64, device=self.root_device)
        for at, parameter in enumerate(parameters):
            if parameter.grad is not None:
                norms[:, at] = torch.stack([torch.linalg.vector_norm(parameter.grad).double(), norms.new_ones(())])
        dist.all_reduce(norms)  # of each column one rank's is not 0
        return torch.linalg.vector_norm(norms[0, norms[1] > 0].to(parameters[0].dtype))

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        nn.utils.clip_grads_with_norm_(parameters, clip_val, self.gradient_norm(parameters))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Nothing to be done: what is logged is the same on all ranks."""
        return tensor


class _Send(torch.autograd.Function):
    """The end of a stage: its output goes on, and the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        pipeline.send(y, pipeline.global_rank - 1)
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.pipeline.receive(ctx.pipeline.global_rank - 1), None, None


class _Receive(torch.autograd.Function):
    """The beginning of a stage: its input comes, and the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        return pipeline.receive(pipeline.global_rank + 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.pipeline.send(gradient, ctx.pipeline.global_rank + 1)
        return None, None


def _anchor() -> Tensor:
    """By it autograd comes to both ends of a stage, also where nothing of it is trained."""
    return torch.zeros((), requires_grad=True)


class _Left(BaseException):
    """Leaves a step at its call of `forward`, past any `except Exception` of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _leave(x: Tensor) -> Tensor:
    raise _Left(x)


def _never() -> bool:
    """Whether a metric is summed over ranks."""
    return False


def _refuses(name: str) -> Any:
    def refuse(_: Tensor) -> None:
        raise Refusal(f"strategy=pipeline: training_step uses {name} outside of forward(), and another device holds it")

    return refuse


def _flat(stored: Tensor) -> Tensor:
    """The bytes of a tensor, each once."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(stored.shape, stored.stride(), strict=True))
    return stored.as_strided((elements,), (1,)).view(torch.uint8)
