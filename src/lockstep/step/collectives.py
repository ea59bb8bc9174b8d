"""Gathering of tensors whose sizes differ between ranks, for a user's metrics and hooks."""

import copy
from collections.abc import Sequence
from itertools import islice
from math import prod
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lockstep.errors import UserError
from lockstep.launch.process_group import TensorHeader, gather_objects
from lockstep.text import join_names

LIBRARIES = ("torch", "torchmetrics", "torchvision", "lightning", "numpy", "builtins")
MOST_ITEMS, DEPTH = 1000, 4  # items of a container, and nested objects, in which metrics are searched


def gather_headers(tensor: Tensor, what: str, group: Any = None) -> list[TensorHeader]:
    """Return the shapes and dtypes of a tensor on all ranks. All ranks must call it.

    Raises:
        UserError: another rank calls something else.
    """
    return gather_objects(TensorHeader(what, tuple(tensor.shape), tensor.dtype), group)


def check_same_shapes(headers: Sequence[TensorHeader], remedy: str) -> None:
    """Check that all ranks have a tensor of the same shape and dtype.

    Raises:
        UserError: they have not.
    """
    kinds = list(dict.fromkeys((header.shape, header.dtype) for header in headers))
    if len(kinds) > 1:
        same_dtype = len({dtype for _, dtype in kinds}) == 1
        texts = [str(list(shape)) if same_dtype else f"{list(shape)} of {dtype}" for shape, dtype in kinds]
        tensors = f"the ranks have tensors of different sizes, {join_names(texts, 4)}"
        raise UserError(f"{headers[0].what}: {tensors}: {remedy}")


def gather_tensors(tensor: Tensor, what: str, group: Any = None) -> list[Tensor]:
    """Return the tensors of all ranks, which may differ in size. All ranks must call it.

    Tensors without an element get the dtype and the other dimensions of those that have elements. So a metric's state
    of a rank without a sample can be concatenated with the others. One without dimensions is expanded to the others, as
    in the sum over batches that a metric begins with a number.

    Args:
        tensor: this rank's tensor.
        what: what is gathered, in words; the same on all ranks.
        group: the process group; None: the default group.

    Raises:
        UserError: the dtypes or numbers of dimensions differ, or another rank calls something else.
    """
    headers = gather_headers(tensor, what, group)
    if len(headers) == 1:
        return [tensor]
    filled = [header for header in headers if prod(header.shape)] or headers[:1]
    filled = [header for header in filled if header.shape] or filled
    dtype, like = filled[0].dtype, filled[0].shape
    if len({(header.dtype, len(header.shape)) for header in filled}) > 1:
        check_same_shapes(filled, "they must have the same dtype and number of dimensions")
    if not tensor.ndim:
        tensor = tensor.to(dtype).expand(like)
    shapes = [
        header.shape if len(header.shape) == len(like) else (0, *like[1:]) if header.shape else like
        for header in headers
    ]
    size = max(map(prod, shapes))
    padded = tensor.new_zeros(size, dtype=dtype)
    padded[: tensor.numel()] = tensor.detach().flatten()
    sent = padded.view(torch.uint8)  # bytes, because not every backend sends every dtype
    received = [torch.empty_like(sent) for _ in headers]
    if size:
        dist.all_gather(received, sent, group)
    pairs = zip(received, shapes, strict=True)
    parts = [each.view(dtype)[: prod(shape)].reshape(shape) for each, shape in pairs]
    if tensor.numel():
        parts[dist.get_rank(group)] = tensor  # it may have a gradient
    return parts


class StateGather:
    """The `dist_sync_fn` of a user's metric: gathers its states from all ranks.

    It is not copied with its metric. A pickled one refuses nothing.

    Args:
        name: the metric, in words.
        strategy: the strategy, which may refuse a collective; see `PieceStrategy.refuse_collective`.
    """

    def __init__(self, name: str, strategy: Any = None) -> None:
        self.name = name
        self.strategy = strategy

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        if self.strategy is not None:
            remedy = "leave out dist_sync_on_step, and log the metric itself, self.log(name, metric)"
            self.strategy.refuse_collective(f"gather the {self.name}", remedy)
        return gather_tensors(state, f"the gathering of the {self.name}", group)

    def __deepcopy__(self, memo: Any) -> "StateGather":
        return self

    def __reduce__(self) -> Any:
        return StateGather, (self.name,)


def set_state_gathers(trainer: pl.Trainer) -> None:
    """Let the metrics of the module and of callbacks gather their states by `StateGather`, where nothing else is set.

    torchmetrics itself sends an empty float32 tensor for the states of a rank without a sample, whatever the dtype of
    the others is; the process group then aborts.
    """
    for name, part in find_metrics(trainer):
        if isinstance(part, Metric) and (part.dist_sync_fn is None or isinstance(part.dist_sync_fn, StateGather)):
            part.dist_sync_fn = StateGather(f"metric {name}", trainer.strategy)


# --- the metrics of a user ---


def find_metrics(trainer: pl.Trainer) -> list[tuple[str, Metric | MetricCollection]]:
    """Return the metrics and collections of the module and of callbacks, also those in plain objects, with names."""
    metrics: dict[int, tuple[str, Any]] = {}
    seen: set[int] = set()
    for name, part in trainer.lightning_module.named_modules():
        if isinstance(part, Metric | MetricCollection):
            metrics.setdefault(id(part), (name, part))
        elif type(part).__module__.partition(".")[0] not in LIBRARIES:
            _search(name, vars(part), metrics, seen, DEPTH)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not type(callback).__module__.startswith(("lightning.", "lockstep.")):
            _search(type(callback).__name__, vars(callback), metrics, seen, DEPTH)
    return list(metrics.values())


def _search(name: str, thing: Any, metrics: dict[int, tuple[str, Any]], seen: set[int], depth: int) -> None:
    """Add the metrics in an object to `metrics`, by their id."""
    if depth < 0 or id(thing) in seen or len(seen) > 10 * MOST_ITEMS:
        return
    seen.add(id(thing))
    if isinstance(thing, nn.Module):
        for path, part in thing.named_modules():
            if isinstance(part, Metric | MetricCollection):
                metrics.setdefault(id(part), (f"{name}.{path}".strip("."), part))
        return
    items: Any = ()
    if isinstance(thing, dict):
        items = ((str(key), value) for key, value in islice(thing.items(), MOST_ITEMS))
    elif isinstance(thing, list | tuple | set):
        items = ((str(index), value) for index, value in enumerate(islice(thing, MOST_ITEMS)))
    elif not type(thing).__module__.startswith("lockstep") and (
        type(thing).__module__.partition(".")[0] not in LIBRARIES and hasattr(thing, "__dict__")
    ):
        items = vars(thing).items()
    for key, value in items:
        if key != "_modules":
            _search(f"{name}.{key}".strip("."), value, metrics, seen, depth - 1)


class MetricStates:
    """The states of all metrics before a batch that must not count.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._saved = {id(part): _copy(vars(part)) for _, part in find_metrics(trainer)}

    def restore(self, trainer: pl.Trainer) -> None:
        """Restore them. A metric that was made since then is reset.

        A list that was empty becomes a list of tensors without a sample, whose dtype and dimensions are those of the
        batch's values: other ranks' values can be concatenated with them, whichever function gathers them. A tensor
        takes the dtype that the batch has given it.
        """
        for _, part in find_metrics(trainer):
            states = dict(part.metric_state) if isinstance(part, Metric) else {}
            if id(part) in self._saved:
                vars(part).update(self._saved[id(part)])
            else:
                part.reset()
            if isinstance(part, Metric):
                part._computed = None  # other ranks have updated it, so they compute it anew, with a collective
            for name, batch_state in states.items():
                now = getattr(part, name)
                if isinstance(batch_state, list) and isinstance(now, list) and not now:
                    setattr(part, name, [each[:0] if each.ndim else each.new_empty(0) for each in batch_state[:1]])
                elif isinstance(batch_state, Tensor) and isinstance(now, Tensor):
                    setattr(part, name, now.to(batch_state.dtype))


def _copy(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes with copied tensors, lists and dicts, without layers and parameters."""
    return {name: _copied(value) for name, value in attributes.items() if name not in ("_modules", "_parameters")}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, _copied(each)) for key, each in value.items())
        return copied
    return value
