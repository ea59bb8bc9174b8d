"""The buffers of a module after a step, the same on every layout: running statistics, centres, codebooks, counters.

There is one rule. The forward pass of each piece starts from the buffers at the step's begin. An element that is the
same after all pieces gets this value. Otherwise a floating-point element gets the mean over the pieces, added in their
order, and an integer has none: this is reported. `batch_norm.py` has torch's normalisation layers, in which all is
known.

Most other buffers never change, so they are neither copied nor summed. A buffer takes part from its first change on. It
has changed if the tensor is another object or has another version; in the first steps of a run, and in the first and
last step of an epoch, its content is compared as well, because `.data` hides a change from the version.

`training_step` may change parameters without a gradient, too, as a teacher follows the weights that are trained. They
must be the same after all pieces. They are many and large, so copies of them exist only in the steps that compare, and
they must begin to change there.

What can't follow the rule is refused by its name: a buffer that appears or changes its shape or dtype in a pass, or
changes in a backward pass only. A step of one piece leaves all but BatchNorm to torch.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torchmetrics import Metric

from lockstep.errors import StepRefused, UserError
from lockstep.launch.process_group import gather_objects
from lockstep.step.batch import StepBatch, data_of
from lockstep.step.batch_norm import STATISTICS, BatchNormStats, layers_with_statistics
from lockstep.step.gradients import GradientSum, gather_exponents

LOG = logging.getLogger("lockstep")
COMPARED_STEPS = 3  # first steps of a run in which the content of all buffers is compared
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
ALIKE = "change it alike in every piece, or between the steps, alike on all ranks"
APPEARS = "appears in training_step: register it in __init__, with its shape and dtype"
CHANGES_FORM = "changes its shape or dtype in training_step: keep the shape and dtype that it has in __init__"
CHANGES_IN_BACKWARD = f"changes in the backward pass: {ALIKE}"
BEGINS_LATE = (
    "begins to change inside training_step in the middle of an epoch: change it from the first step of a run or an "
    "epoch on, or between the steps, in on_train_batch_end"
)
INTEGER_DIFFERS = "differs between a step's pieces and has no mean"
PARAMETER_DIFFERS = f"differs between a step's pieces or ranks: {ALIKE}, or make it a buffer, which gets the mean"


@dataclass(eq=False)
class Buffer:
    """A buffer of the module, or a parameter without a gradient, at the begin of the current step.

    Attributes:
        layer: the layer that has it.
        name: its name in the layer.
        path: its name in the module.
        is_parameter: whether it is a parameter.
        computed_here: whether this process computes its value; with stages, one process computes each layer.
        tensor: the tensor; None: the layer has the name without a tensor.
        start: a copy of it, if it may change in this step.
        version: its version counter.
        pointer: the address of a parameter's content, which `p.data = ...` changes.
    """

    layer: nn.Module
    name: str
    path: str
    is_parameter: bool
    computed_here: bool
    tensor: Tensor | None = None
    start: Tensor | None = None
    version: int = -1
    pointer: int = 0

    def __str__(self) -> str:
        kind = "parameter" if self.is_parameter else "buffer"
        return f"{kind} {self.path} of {type(self.layer).__name__}"

    @property
    def table(self) -> dict[str, Any]:
        """The layer's dict that has it."""
        return self.layer._parameters if self.is_parameter else self.layer._buffers

    def save(self, copy: bool = True) -> None:
        """Make the present tensor that of the step's begin, and copy its content."""
        self.tensor = tensor = self.table.get(self.name)
        self.start = None if tensor is None or not copy else tensor.detach().clone()
        self.version = _version(tensor)
        if self.is_parameter and tensor is not None:
            self.pointer = tensor.data_ptr()

    def was_touched(self) -> bool:
        """Check whether the tensor is another one than at the step's begin, or was written to. Read no values."""
        if self.table.get(self.name) is not self.tensor or _version(self.tensor) != self.version:
            return True
        return self.is_parameter and self.tensor is not None and self.tensor.data_ptr() != self.pointer

    def has_other_content(self) -> bool:
        """Check whether the content differs from that of the step's begin."""
        now = self.table.get(self.name)
        if now is None or self.start is None:
            return now is not self.start
        return _kind(now) != _kind(self.start) or not torch.equal(_bits(now), _bits(self.start))

    def restore(self) -> None:
        """Give the layer the tensor and the content of the step's begin."""
        _restore(self.table, self.name, self.tensor, self.start)

    def value(self) -> Tensor:
        """Return a copy of the present value, in the dtype of the step's begin.

        Raises:
            StepRefused: it has another form.
        """
        now = self.table.get(self.name)
        if now is None or self.start is None or _kind(now) != _kind(self.start):
            raise StepRefused(f"{self} {APPEARS if self.start is None else CHANGES_FORM}")
        return now.detach().to(self.start.dtype, copy=True)

    def set(self, value: Tensor, new_object: bool) -> None:
        """Set the buffer to a value. Keep the tensor of the step's begin where that is possible.

        Optimizers, averages of the weights and DDP may have references to it.
        """
        if self.tensor is None or new_object:
            self.table[self.name] = nn.Parameter(value.clone(), False) if self.is_parameter else value.clone()
        else:
            _restore(self.table, self.name, self.tensor, value)


class StepBuffers:
    """Give all buffers of the module one value after each step; see the top of this file.

    Args:
        gradients: the gradient sum. If it is exact, the sums of BatchNorm's statistics are, too.
        state: the result of `state_dict`, from a checkpoint of any layout; empty for a new run.

    Attributes:
        batch_norm: the statistics of torch's normalisation layers.
        buffers: all other buffers, and parameters without a gradient, by name.
        changing: the names of those that take part in every step, since they have changed before.
    """

    def __init__(self, gradients: GradientSum, state: Mapping[str, Any]) -> None:
        self.batch_norm = BatchNormStats(gradients, state.get("statistics", ()))
        self.strategy = gradients.strategy
        self.exact = gradients.exact
        self._num_pieces = data_of(self.strategy.lightning_module.trainer).layout.pieces
        # With stages, all processes get the values of all buffers, since each of them calls `validation_step`.
        staged = self.strategy.weights == "staged"
        self._communicates = self.batch_norm.replicas > 1 or staged
        self._follows, self._follows_parameters = self._num_pieces > 1 or staged, self._num_pieces > 1 and not staged
        self.buffers: dict[str, Buffer] = {}
        self._steps_to_compare, self._begins_epoch = COMPARED_STEPS, True
        self._compares = self._ends_epoch = False  # this step
        self._pieces: list[int] = []  # of this process, so far in this step
        # of what changes in this step: the values after each piece; of a parameter that after the first one
        self._values: dict[str, dict[int, Tensor]] = {}
        self._differs: dict[str, Tensor] = {}  # whether a parameter has another value after a later piece
        self._unread: list[tuple[list[str], Tensor]] = []  # integers, and whether they differ, still on a device
        self._noticed: set[str] = set()  # integers that differ
        self._find()
        self.changing = [path for path in self.buffers if path in state.get("buffers", ())]

    # --- one step ---

    def begin(self, step_batch: StepBatch, ends_epoch: bool = False) -> None:
        """Save the buffers before a step, as far as they may have changed since the last one.

        Args:
            step_batch: the step.
            ends_epoch: whether it is the last step of an epoch or of the run.
        """
        self.batch_norm.begin(step_batch)
        if not self._follows:
            return
        self._pieces, self._differs, self._ends_epoch = [], {}, ends_epoch
        self._compares = bool(self._steps_to_compare) or self._begins_epoch or ends_epoch
        if self._compares:
            self._find()
        for path, buffer in list(self.buffers.items()):
            if buffer.is_parameter and getattr(buffer.table.get(buffer.name), "requires_grad", False):
                del self.buffers[path]  # unfrozen since
        self.changing = [path for path in self.changing if path in self.buffers]
        for path, buffer in self.buffers.items():
            copies = self._compares or path in self.changing
            if copies or buffer.was_touched():
                buffer.save(copy=copies or not buffer.is_parameter)
        parameters = (path for path, buffer in self.buffers.items() if buffer.is_parameter)
        self.strategy.changing_parameters = {path for path in parameters if self._compares or path in self.changing}
        self._values = {path: {} for path in self.changing if self.buffers[path].start is not None}

    def before_forward(self) -> None:
        """Restore the buffers before the step, for the next micro-batch."""
        self.batch_norm.before_forward()
        if self._pieces:
            for path in self._values:
                self.buffers[path].restore()

    def after_forward(self, piece: int) -> None:
        """Record the buffers after a piece's forward pass.

        Raises:
            StepRefused: one of them can't follow the rule.
        """
        self.batch_norm.after_forward()
        for path, buffer in self.buffers.items():
            if not buffer.computed_here or path in self._values:
                continue
            if buffer.was_touched() or (self._compares and buffer.has_other_content()):
                if buffer.is_parameter and not self._steps_to_compare and not self._begins_epoch:
                    raise StepRefused(f"{buffer} {BEGINS_LATE}")
                before = self._pieces[:1] if buffer.is_parameter else self._pieces  # after which it was as at the begin
                self._values[path] = {each: buffer.start for each in before if buffer.start is not None}
        for path, values in self._values.items():
            buffer = self.buffers[path]
            value = buffer.value() if buffer.computed_here else None
            if value is not None and buffer.is_parameter and values:
                differs = (_bits(value) != _bits(values[self._pieces[0]])).any()
                self._differs[path] = self._differs.get(path, differs) | differs
            elif value is not None:
                values[piece] = value
        self._pieces.append(piece)

    def before_backward(self) -> None:
        """Give the layers copies of the buffers before the step, for what activation checkpointing computes again.

        It then reads what the forward pass has read, and only these copies change. The graph may need the tensors
        themselves, so they are left as they are. So are parameters: `training_step` changes them, and no layer does.
        """
        for buffer in (self.buffers[path] for path in self._values):
            if not buffer.is_parameter and buffer.start is not None:
                buffer.layer._buffers[buffer.name] = buffer.start.clone()

    def after_backward(self) -> None:
        """Refuse buffers that change in a backward pass only. They have no value after a forward pass."""
        for path, buffer in self.buffers.items():
            if path not in self._values and buffer.computed_here and buffer.was_touched():
                raise StepRefused(f"{buffer} {CHANGES_IN_BACKWARD}")

    def finish(self, step_batch: StepBatch) -> None:
        """Set the buffers to their values after the step. Every process calls this.

        Raises:
            UserError: a value differs that has no mean. All processes raise it.
        """
        self.batch_norm.finish(step_batch)
        if not self._follows:
            return
        if self._compares:
            self._find(in_step=True)
        self.changing = self._all_changing()
        active = [path for path in self.changing if self.buffers[path].start is not None]
        results = self._means([path for path in active if not self.buffers[path].is_parameter], step_batch.num_nonempty)
        results |= self._agreed([path for path in active if self.buffers[path].is_parameter])
        owners: dict[int, set[str]] = {}  # by tensor, since layers may share one
        for path, buffer in self.buffers.items() if results else ():
            owners.setdefault(id(buffer.tensor), set()).add(path)
        for path, value in results.items():
            buffer = self.buffers[path]
            # If only one of the layers that share a tensor has a new value, it has replaced its tensor.
            buffer.set(value, new_object=not owners[id(buffer.tensor)] <= results.keys())
        # of integers on a GPU, the host waits in a later step only, unless the run must end now
        if self.exact or self._compares or self.strategy.root_device.type == "cpu":
            self.flush()
        self._steps_to_compare = max(self._steps_to_compare - 1, 0)
        self._begins_epoch = self._ends_epoch
        for path, buffer in self.buffers.items() if self._compares else ():
            if buffer.is_parameter and path not in self.changing:
                buffer.start = None  # its memory is free for what follows

    def _all_changing(self) -> list[str]:
        """Return `changing` with what has begun to change in this step on any process. Every process calls this.

        Parameters begin in steps that compare, so processes need not ask each other about them in other steps.
        """
        begun = sorted(self._values.keys() - {*self.changing})
        if self._communicates and (self._compares or not all(each.is_parameter for each in self.buffers.values())):
            # A tensor on the host: the host waits for other hosts, but for no device.
            device = "cpu" if "cpu" in str(dist.get_backend_config()) else self.strategy.root_device
            dist.all_reduce(number := torch.tensor([len(begun)], device=device), dist.ReduceOp.MAX)
            if bool(number):
                begun = sorted({path for each in gather_objects(begun) for path in each})
        return [*self.changing, *begun]

    def _means(self, paths: list[str], count: int) -> dict[str, Tensor]:
        """Return the value of each of some buffers after the step's `count` pieces that have a sample."""
        if not paths:
            return {}
        starts = [start for path in paths if (start := self.buffers[path].start) is not None]
        absent = [torch.zeros_like(_bytes(start)) for start in starts]
        sizes, one = [len(each) for each in absent], absent[0].new_ones(1)
        # for each piece its values as bytes, behind a 1; other processes add 0 to them
        table = one.new_zeros(self._num_pieces, 1 + sum(sizes))
        for piece in self._pieces:
            columns = zip(paths, starts, absent, strict=True)
            table[piece] = torch.cat([one, *(self._bytes_after(piece, *column) for column in columns)])
        if self._communicates:
            dist.all_reduce(table)
        present = table[:, :1] > 0
        first = present.int().argmax().reshape(1)
        parts = table[:, 1:].split(sizes, 1)
        rows = [_rows(part, start) for part, start in zip(parts, starts, strict=True)]
        bits = [each.view(INTEGERS[each.element_size()]) for each in rows]
        agree = [((each == each.index_select(0, first)) | ~present).all(0) for each in bits]
        values = [bit.index_select(0, first)[0].view(each.dtype) for bit, each in zip(bits, rows, strict=True)]
        floats = [at for at, each in enumerate(rows) if each.is_floating_point()]
        if floats:
            wide = torch.cat([rows[at].double() for at in floats], 1)
            total = wide[0]
            for row in wide[1:]:  # in this order on every layout
                total = total + row
            means = (total / count).split([rows[at].shape[1] for at in floats])
            for at, mean in zip(floats, means, strict=True):
                values[at] = torch.where(agree[at], values[at], mean.to(values[at].dtype))
        if integers := [at for at in range(len(rows)) if at not in floats]:
            self._unread.append(([paths[at] for at in integers], torch.stack([~agree[at].all() for at in integers])))
        return {path: _shaped(value, start) for path, value, start in zip(paths, values, starts, strict=True)}

    def _bytes_after(self, piece: int, path: str, start: Tensor, absent: Tensor) -> Tensor:
        """Return the bytes of a buffer after a piece of this process; `absent` if another process computes it."""
        if not self.buffers[path].computed_here:
            return absent
        return _bytes(self._values.get(path, {}).get(piece, start))

    def _agreed(self, paths: list[str]) -> dict[str, Tensor]:
        """Return the value of each of some parameters, which must be the same after all pieces.

        Raises:
            UserError: it is not.
        """
        if not paths:
            return {}
        starts = {path: start for path in paths if (start := self.buffers[path].start) is not None}
        values = [next(iter(self._values.get(path, {}).values()), start).contiguous() for path, start in starts.items()]
        mine = [
            (int(_checksum(value)), bool(self._differs.get(path))) for path, value in zip(paths, values, strict=True)
        ]
        ranks = gather_objects(mine * bool(self._pieces)) if self._communicates else [mine]
        present = [rank for rank, each in enumerate(ranks) if each]
        for at, path in enumerate(paths):
            if {ranks[rank][at] for rank in present} != {(ranks[present[0]][at][0], False)}:
                raise UserError(f"{self.buffers[path]} {PARAMETER_DIFFERS}")
        if len(present) < len(ranks):  # a process without a sample gets them from another one
            for value in values:
                dist.broadcast(torch.view_as_real(value) if value.is_complex() else value, present[0])
        return dict(zip(paths, values, strict=True))

    def flush(self) -> None:
        """Read which integers differ.

        Raises:
            UserError: one does, with an exact sum; without, one line says so.
        """
        unread, self._unread = self._unread, []
        for path in (
            path for paths, differ in unread for path, each in zip(paths, differ.tolist(), strict=True) if each
        ):
            buffer = self.buffers[path]
            if self.exact:
                raise UserError(f"exact=true: {buffer} {INTEGER_DIFFERS}: {ALIKE}")
            if path not in self._noticed and self.strategy.is_global_zero:
                LOG.warning(f"{buffer} {INTEGER_DIFFERS}, so the run depends on the layout: {ALIKE}")
            self._noticed.add(path)

    def restore_parameters(self) -> None:
        """Set the parameters without a gradient that change in this step to their values before it."""
        for path in self._values:
            if self.buffers[path].is_parameter:
                self.buffers[path].restore()

    def _find(self, in_step: bool = False) -> None:
        """Find new buffers, and parameters that were frozen since.

        Args:
            in_step: whether the step's passes have run since the last call.

        Raises:
            StepRefused: they have registered a buffer.
        """
        module, holds = self.strategy.lightning_module, self.strategy.holds
        names = list(other_buffers(module)) if self._follows else []
        names += frozen_parameters(module) if self._follows_parameters else []
        for path, layer, name in names:
            if path not in self.buffers:
                buffer = Buffer(layer, name, path, name in layer._parameters, holds(layer))
                if in_step and not buffer.is_parameter:
                    raise StepRefused(f"{buffer} {APPEARS}")
                buffer.save()
                self.buffers[path] = buffer

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on, for a checkpoint. Every process calls this."""
        state: dict[str, Any] = {"buffers": self.changing} if self.changing else {}
        if (exact_sum := self.batch_norm.exact_sum) is not None:
            state["statistics"] = gather_exponents(self.strategy, exact_sum)
        return state


def module_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the buffers of a module as (name in the module, layer, name in the layer), also names without a tensor.

    Those of metrics are left out, since they are each rank's own until the metric is computed.
    """
    in_metrics = {id(part) for layer in module.modules() if isinstance(layer, Metric) for part in layer.modules()}
    for path, layer in module.named_modules():
        for name, buffer in layer._buffers.items() if id(layer) not in in_metrics else ():
            if buffer is None or (buffer.layout is torch.strided and not buffer.is_quantized and not buffer.is_meta):
                yield f"{path}.{name}" if path else name, layer, name


def other_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield those of `module_buffers` that are no statistics of torch's normalisation layers."""
    statistics = {id(layer) for layer in layers_with_statistics(module).values()}
    for path, layer, name in module_buffers(module):
        if id(layer) not in statistics or name not in STATISTICS:
            yield path, layer, name


def frozen_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the parameters of a module without a gradient, as `module_buffers` yields buffers."""
    for path, layer in module.named_modules():
        for name, each in layer._parameters.items():
            if each is None or each.requires_grad or isinstance(each, DTensor | UninitializedParameter):
                continue
            if each.layout is torch.strided and not each.is_quantized and not each.is_meta:
                yield f"{path}.{name}" if path else name, layer, name


# --- values ---


def _version(tensor: Tensor | None) -> int:
    """Return a tensor's version counter, which every change in place raises; -1 if it has none."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _kind(tensor: Tensor) -> tuple[torch.Size, bool, bool]:
    """Return the shape of a tensor, and what kind of numbers it has."""
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements as one vector, in which complex numbers are two each."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)


def _bytes(tensor: Tensor) -> Tensor:
    return _flat(tensor).contiguous().view(torch.uint8)


def _bits(tensor: Tensor) -> Tensor:
    """Return integers, one for each element of `_flat`. Equal integers are equal bits."""
    return _flat(tensor).contiguous().view(INTEGERS[_flat(tensor).element_size()])


def _rows(table: Tensor, like: Tensor) -> Tensor:
    """Return the elements of which each row of a table has the bytes, of tensors like `like`; see `_flat`."""
    copied, flat = table.clone(memory_format=torch.contiguous_format), _flat(like)
    return copied.view(-1).view(flat.dtype).view(len(table), len(flat))


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with the shape and dtype of `like` of which `flat` has the elements (see `_flat`)."""
    return torch.view_as_complex(flat.view(*like.shape, 2)) if like.is_complex() else flat.view(like.shape)


def _checksum(tensor: Tensor) -> Tensor:
    """Return a sum over the bits of a tensor, in which each element has another weight."""
    bits = _bits(tensor).long()
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()


def _restore(table: dict[str, Any], name: str, tensor: Tensor | None, value: Tensor | None) -> None:
    """Make `tensor` the buffer, or parameter, in the dict of a layer, with the content `value`."""
    table[name] = tensor
    if tensor is not None and value is not None:
        if tensor.shape != value.shape:
            tensor.resize_(value.shape)
        tensor.data.copy_(value)  # `.data` hides this from autograd and from the version counter


SavedBuffers = list[tuple[nn.Module, str, Tensor | None, Tensor | None]]


def copy_buffers(module: nn.Module) -> SavedBuffers:
    """Return the buffers of a module and copies of their content, for `restore_buffers`."""
    return [
        (layer, name, tensor, None if tensor is None else tensor.detach().clone())
        for layer in module.modules()
        for name, tensor in layer._buffers.items()
    ]


def restore_buffers(saved: SavedBuffers) -> None:
    """Give the layers of a module the tensors and the content that `copy_buffers` returned."""
    for layer, name, tensor, value in saved:
        _restore(layer._buffers, name, tensor, value)
