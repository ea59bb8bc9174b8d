"""The buffers of a module after a step, the same on every layout: running statistics, centres, codebooks, counters.

There is one rule. The forward pass of each piece starts from the buffers at the step's begin. An element that is the
same after all pieces gets this value. Otherwise a floating-point element gets the mean over the pieces, and an integer
has none: this is reported. `batch_norm.py` applies the rule to torch's normalisation layers, in which all is known.

Most other buffers never change, so they are neither copied nor summed. A buffer takes part from its first change on. It
has changed if the tensor is another object or has another version; in the first steps its content is compared as well,
because `.data` hides a change from the version.

A buffer that appears in a forward pass, or changes its shape or dtype there, is reported by its name.

The rule holds for parameters without a gradient, too: `training_step` may change them, as a teacher follows the weights
that are trained. They are many and large, and seldom change. So copies of them exist only in the first steps of a run
and in the first and last step of an epoch, unless they change. One that begins to change later is reported.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torchmetrics import Metric

from lockstep.arithmetic.exact_sum import ExactSum, reduce_alone
from lockstep.errors import UserError
from lockstep.launch.process_group import gather_objects
from lockstep.step.batch import StepBatch, data_of
from lockstep.step.batch_norm import STATISTICS, BatchNormStats, layers_with_statistics
from lockstep.step.gradients import GradientSum, all_reduce, gather_exponents

LOG = logging.getLogger("lockstep")
COMPARED_STEPS = 3  # steps in which the content of all buffers is compared
LEAST = torch.iinfo(torch.int64).min
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
DIFFERS = "differs between a step's pieces and has no mean"
CHANGES_FORM = "changes its shape or dtype in training_step"
APPEARS = "appears in training_step"
CHANGES_IN_BACKWARD = "changes in the backward pass"
DIFFERS_BEFORE = "differs between the ranks before a step"
REMEDY = "change it alike in every piece, or between the steps, alike on all ranks"
BEGINS_LATE = "begins to change inside training_step in the middle of an epoch"
REMEDIES = {
    APPEARS: "register it in __init__, with its shape and dtype",
    CHANGES_FORM: "keep the shape and dtype that it has in __init__",
    BEGINS_LATE: "change it from the first step of a run or an epoch on, or between the steps, in on_train_batch_end",
}


@dataclass(eq=False)
class Buffer:
    """A buffer of the module, or a parameter without a gradient, at the begin of the current step.

    Attributes:
        layer: the layer that has it.
        name: its name in the layer.
        path: its name in the module.
        computed_here: whether this process computes its value; with stages, one process computes each layer.
        tensor: the tensor; None: the layer has the name without a tensor.
        start: a copy of it.
        version: its version counter.
        scratch: another copy, for `StepBuffers.before_backward`.
        is_parameter: whether it is a parameter.
        pointer: the address of a parameter's content, which `p.data = ...` changes.
    """

    layer: nn.Module
    name: str
    path: str
    computed_here: bool
    tensor: Tensor | None = None
    start: Tensor | None = None
    version: int = -1
    scratch: Tensor | None = None
    is_parameter: bool = False
    pointer: int = 0

    def __str__(self) -> str:
        kind = "parameter" if self.is_parameter else "buffer"
        return f"{kind} {self.path} of {type(self.layer).__name__}"

    @property
    def table(self) -> dict[str, Any]:
        """The layer's dict that has it."""
        return self.layer._parameters if self.is_parameter else self.layer._buffers

    @property
    def now(self) -> Tensor | None:
        """The tensor that the layer has now."""
        return self.table.get(self.name)

    def save(self, copy: bool = True) -> None:
        """Make the present tensor that of the step's begin, and copy its content."""
        self.tensor = self.now
        self.start = None if self.tensor is None or not copy else self.tensor.detach().clone()
        self.version = _version(self.tensor)
        if self.is_parameter and self.tensor is not None:
            self.pointer = self.tensor.data_ptr()

    def was_touched(self) -> bool:
        """Check whether the tensor is another one than at the step's begin, or was written to. Read no values."""
        if self.now is not self.tensor or _version(self.tensor) != self.version:
            return True
        return self.is_parameter and self.tensor is not None and self.tensor.data_ptr() != self.pointer

    def is_trained(self) -> bool:
        """Check whether it is a parameter that has gradients now."""
        return self.is_parameter and self.now is not None and self.now.requires_grad

    def has_other_content(self) -> bool:
        """Check whether the content differs from that of the step's begin."""
        now = self.now
        if now is None or self.start is None:
            return now is not self.start
        return _kind(now) != _kind(self.start) or not torch.equal(_keys(_flat(now)), _keys(_flat(self.start)))

    def restore(self) -> None:
        """Give the layer the tensor and the content of the step's begin."""
        _restore(self.table, self.name, self.tensor, self.start)

    def wrong_form(self) -> str:
        """Return what is wrong with the shape or dtype that the buffer has now; empty: nothing."""
        if self.start is None:
            return APPEARS * (self.now is not None)
        return CHANGES_FORM * (self.now is None or _kind(self.now) != _kind(self.start))

    def value(self) -> Tensor | None:
        """Return a copy of the present value, in the dtype of the step's begin; None if it has another form."""
        if self.now is None or self.start is None or self.wrong_form():
            return None
        return self.now.detach().to(self.start.dtype, copy=True)

    def set(self, value: Tensor, new_object: bool) -> None:
        """Set the buffer to a value. Keep the tensor of the step's begin where that is possible.

        Optimizers, averages of the weights and DDP may have references to it.
        """
        if self.tensor is None or new_object:
            self.table[self.name] = nn.Parameter(value.clone(), False) if self.is_parameter else value.clone()
        else:
            _restore(self.table, self.name, self.tensor, value)


class Reduction:
    """Reduces the values of some buffers after each piece to one value each, whatever the order of the pieces.

    The value of an element is the one that all pieces agree on, else their mean. To find out whether they agree, each
    value becomes an integer key in the order of the values. One maximum over the keys and the inverted keys `~key`
    then gives the largest key and the least one, since `~` reverses their order.

    Args:
        like: tensors with the shapes and dtypes of the values, by buffer.
        exact_sum: the class of the sums of which means are made; None: they are rounded.
        exponents: `ExactSum.exponents` of earlier steps, by buffer.
    """

    def __init__(
        self, like: Mapping[str, Tensor], exact_sum: type[ExactSum] | None, exponents: Mapping[str, int | None]
    ) -> None:
        self.like = dict(like)
        self.flat = [_flat(value) for value in self.like.values()]
        self.sizes = [value.numel() for value in self.flat]
        self.device = self.flat[0].device
        self.ends: Tensor | None = None  # the largest key of each element, then the largest inverted key
        self.total: Tensor | None = None
        self.floats = [at for at, value in enumerate(self.flat) if value.is_floating_point() and len(value)]
        self.names = [list(self.like)[at] for at in self.floats]
        self.differed: Tensor | None = None  # for each value, whether it was an integer that differed, in some step
        self.exact_sum: ExactSum | None = None
        if exact_sum is not None and self.floats:
            flat = [torch.empty_like(self.flat[at]) for at in self.floats]
            # Each buffer has a grid of its own, so that its sum does not depend on which others have changed.
            self.exact_sum = exact_sum(flat, segment_ids=range(len(flat)), names=self.names)
            self.exact_sum.exponents = [exponents.get(name) for name in self.names]

    def begin(self, step: int) -> None:
        """Start the reduction of a step."""
        self.ends = self.total = None
        if self.exact_sum is not None:
            self.exact_sum.begin(step)

    def add(self, values: Sequence[Tensor | None]) -> None:
        """Add the values after a piece, in the order of `like`. None: another process adds this one."""
        flats = [None if value is None else _flat(value) for value in values]
        pairs = list(zip(flats, self.sizes, strict=True))
        keys = [self._no_keys(size) if flat is None else _keys(flat) for flat, size in pairs]
        inverted = [key if flat is None else ~key for flat, key in zip(flats, keys, strict=True)]
        ends = torch.cat([*keys, *inverted])
        self.ends = ends if self.ends is None else torch.maximum(self.ends, ends)
        floats = [flats[at] for at in self.floats]
        if self.exact_sum is not None:  # `result` sets the elements that are not finite
            self.exact_sum.add([None if flat is None else flat.nan_to_num(0, 0, 0) for flat in floats], unchanged=True)
        elif floats:
            addends = zip(self.floats, floats, strict=True)
            wide = [self._zeros(at) if flat is None else flat.double() for at, flat in addends]
            self.total = torch.cat(wide) if self.total is None else self.total + torch.cat(wide)

    def _no_keys(self, size: int) -> Tensor:
        """Return keys below all others."""
        return torch.full((size,), LEAST, dtype=torch.int64, device=self.device)

    def _zeros(self, at: int) -> Tensor:
        return torch.zeros(self.sizes[at], dtype=torch.float64, device=self.device)

    def result(self, pieces: int, communicates: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Return the value of each buffer, and for each whether it is no floating-point buffer and differs.

        Args:
            pieces: number of values of each buffer over all processes.
            communicates: whether other processes have added values; then every process calls this.
        """
        ends = self._no_keys(2 * sum(self.sizes)) if self.ends is None else self.ends  # None: without a piece
        if communicates and len(ends):
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        means = dict(zip(self.floats, self._means(pieces, communicates), strict=True))
        highs, lows = (part.split(self.sizes) for part in ends.chunk(2))
        values: dict[str, Tensor] = {}
        differs = []
        for at, (name, like, high, low) in enumerate(zip(self.like, self.like.values(), highs, lows, strict=True)):
            agree, value = high == ~low, high
            if at in means:
                largest, least = (_from_keys(keys, self.flat[at].dtype) for keys in (high, ~low))
                finite = largest.isfinite() & least.isfinite()
                value = torch.where(agree, largest, torch.where(finite, means[at], largest + least))
                agree = agree[:0]
            values[name] = _shaped(value, like)
            differs.append(~agree.all())
        return values, torch.stack(differs)

    def _means(self, pieces: int, communicates: bool) -> Sequence[Tensor]:
        """Return the mean of each floating-point buffer over the pieces."""
        if self.exact_sum is not None:
            return self.exact_sum.total(all_reduce if communicates else reduce_alone, pieces)
        if not self.floats:
            return []
        total = torch.cat(list(map(self._zeros, self.floats))) if self.total is None else self.total
        if communicates and len(total):
            dist.all_reduce(total)
        means = (total / pieces).split([self.sizes[at] for at in self.floats])
        return [mean.to(self.flat[at].dtype) for mean, at in zip(means, self.floats, strict=True)]

    def exponents(self) -> dict[str, int | None]:
        """Return `ExactSum.exponents` by buffer; None for a buffer that is not summed exactly."""
        exponents: dict[str, int | None] = dict.fromkeys(self.like)
        if self.exact_sum is not None:
            exponents.update(zip(self.names, self.exact_sum.exponents, strict=True))
        return exponents


class Agreement(Reduction):
    """Reduces values that are the same after all pieces but in rare steps, such as those of a teacher.

    It keeps the first value and compares it with the others, between processes by checksums. Only in a step where they
    differ does it reduce them as its base class does.

    Attributes:
        agrees: after `result`, whether all values of this step were the same.
    """

    def begin(self, step: int) -> None:
        """Start the reduction of a step."""
        super().begin(step)
        self._first: list[Tensor | None] = []
        self._count, self.agrees = 0, True

    def add(self, values: Sequence[Tensor | None]) -> None:
        """Add the values after a piece."""
        if self.agrees and not self._count:
            self._first = list(values)
        pairs = zip(self._first, values, strict=True)
        others = [(a, b) for a, b in pairs if a is not b and a is not None and b is not None]
        if self.agrees and others and bool(torch.stack([(_bits(a) != _bits(b)).any() for a, b in others]).any()):
            self._reduce_first()
        if self.agrees:
            self._count += 1
        else:
            super().add(values)

    def _reduce_first(self) -> None:
        """Give the base class the equal values so far."""
        self.agrees = False
        for _ in range(self._count):
            super().add(self._first)

    def result(self, pieces: int, communicates: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Return the value of each tensor; see the base class."""
        values = [value.contiguous() for value in self._first if value is not None]
        agrees, lacks, source = self.agrees, False, 0
        if communicates:
            checksums = torch.stack(list(map(_checksum, values or self.like.values())))
            flags = torch.tensor([int(not agrees), int(not values), -dist.get_rank()]).to(checksums)
            numbers = torch.cat([flags, checksums, ~checksums])
            if not values:
                numbers[2:] = LEAST
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
            differs, lacks, source, *ends = numbers.tolist()
            high, low = ends[: len(self.like)], ends[len(self.like) :]
            agrees = not differs and all(one == ~other for one, other in zip(high, low, strict=True))
        if not agrees:
            if self.agrees:
                self._reduce_first()
            return super().result(pieces, communicates)
        values = values or [torch.empty_like(a, memory_format=torch.contiguous_format) for a in self.like.values()]
        if lacks:
            for value in values:
                dist.broadcast(torch.view_as_real(value) if value.is_complex() else value, -source)
        return dict(zip(self.like, values, strict=True)), torch.zeros(len(values), dtype=torch.bool, device=self.device)


class StepBuffers:
    """Give all buffers of the module one value after each step; see the top of this file.

    Args:
        gradients: the gradient sum. If it is exact, means are exact sums, too.
        state: the result of `state_dict`, from a checkpoint of any layout; empty for a new run.

    Attributes:
        batch_norm: the statistics of torch's normalisation layers.
        buffers: all other buffers that can follow the rule, by name.
        averaged: those of them that take part in every step, since they have changed before.
    """

    # Parameters without a gradient are among `buffers`, if a step has several pieces.

    def __init__(self, gradients: GradientSum, state: Mapping[str, Any]) -> None:
        self.batch_norm = BatchNormStats(gradients, state.get("statistics", ()))
        self.strategy = gradients.strategy
        self.exact = gradients.exact
        self._exact_sum = gradients.exact_sum if gradients.exact else None
        # With stages, all processes get the values of all buffers, since each of them calls `validation_step`.
        self._communicates = self.batch_norm.world_size > 1 or self.strategy.weights == "staged"
        self.buffers: dict[str, Buffer] = {}
        self._left_out: set[str] = set()  # names of buffers that can't follow the rule
        self._exponents: dict[str, int | None] = dict(state.get("buffers", {}))
        self._reductions: dict[type[Reduction], Reduction] = {}  # of `averaged`: of buffers, and of parameters
        # Stages have other parameters, and a step of one piece may change what it wants.
        several = data_of(self.strategy.lightning_module.trainer).layout.pieces > 1
        self._follows_parameters = several and self.strategy.weights != "staged"
        self._begins_epoch, self._compares_parameters = True, False  # in this step
        self._steps_to_compare = COMPARED_STEPS  # steps left in which contents are compared
        self._pieces = 0  # of this process in this step
        self._changes: dict[str, list[Tensor | None]] = {}  # values after each piece of buffers not in `averaged`
        # of buffers that can't follow the rule: what they are, in words, and what they do
        self._problems: dict[str, tuple[str, str]] = {}
        self._noticed: set[str] = set()
        self._find()
        self.averaged = {path: each for path, each in self.buffers.items() if path in self._exponents}

    # --- one step ---

    def begin(self, step_batch: StepBatch, ends_epoch: bool = False) -> None:
        """Save the buffers before a step, as far as they may have changed since the last one.

        Args:
            step_batch: the step.
            ends_epoch: whether it is the last step of an epoch or of the run.
        """
        self.batch_norm.begin(step_batch)
        self._pieces, self._changes, self._problems = 0, {}, {}
        if self._steps_to_compare:
            self._find()
        for path in [path for path, each in self.buffers.items() if each.is_trained()]:  # unfrozen since
            self.buffers.pop(path)
            self.averaged.pop(path, None)
        self._compares_parameters = bool(self._steps_to_compare) or self._begins_epoch or ends_epoch
        for path, buffer in self.buffers.items():
            compares = self._compares_parameters if buffer.is_parameter else self._steps_to_compare
            if path in self.averaged or compares or buffer.was_touched():
                buffer.save(copy=not buffer.is_parameter or path in self.averaged or bool(compares))
        self.strategy.changing_parameters = {
            path
            for path, buffer in self.buffers.items()
            if buffer.is_parameter and (path in self.averaged or self._compares_parameters)
        }
        for kind, parameters in ((Reduction, False), (Agreement, True)):
            like = {
                path: each.start
                for path, each in self.averaged.items()
                if each.start is not None and each.is_parameter == parameters
            }
            if like:
                self._make_reduction(kind, like).begin(step_batch.step)
            else:
                self._reductions.pop(kind, None)

    def _make_reduction(self, kind: type[Reduction], like: Mapping[str, Tensor]) -> Reduction:
        """Return the reduction of these buffers: that of the last step, or a new one if the buffers are others."""
        old = self._reductions.get(kind)
        if (
            old is None
            or list(map(_form, old.like.values())) != list(map(_form, like.values()))
            or {*old.like} != {*like}
        ):
            self._read_integers()
            self._exponents = self.state_dict().get("buffers", {})
            self._reductions[kind] = kind(like, self._exact_sum, self._exponents)
        return self._reductions[kind]

    def before_forward(self) -> None:
        """Restore the buffers before the step, for the next micro-batch."""
        self.batch_norm.before_forward()
        if self._pieces:
            for buffer in self._changing():
                buffer.restore()

    def after_forward(self) -> None:
        """Record the buffers after a micro-batch."""
        self.batch_norm.after_forward()
        if not self.buffers and not self._steps_to_compare:
            return
        for path, buffer in self.buffers.items():
            if path in self.averaged or path in self._changes or path in self._problems or not buffer.computed_here:
                continue
            compares = self._compares_parameters if buffer.is_parameter else self._steps_to_compare
            if not buffer.was_touched() and not (compares and buffer.has_other_content()):
                continue
            if buffer.is_parameter and not self._steps_to_compare and not self._begins_epoch:
                self._refuse(buffer, BEGINS_LATE)
            elif wrong := buffer.wrong_form():
                self._refuse(buffer, wrong)
            else:
                self._changes[path] = [buffer.start] * self._pieces
        for buffer in self._find(parameters=False) if self._steps_to_compare else ():  # registered by this micro-batch
            self._refuse(buffer, APPEARS)
        for path, values in self._changes.items():
            value = self._value(self.buffers[path])
            if values and value is not None and values[-1] is not None and _same_bits(value, values[-1]):
                value = values[-1]  # one copy is enough
            values.append(value)
        for reduction in self._reductions.values():
            reduction.add([self._value(self.averaged[path]) for path in reduction.like])
        self._pieces += 1

    def _value(self, buffer: Buffer) -> Tensor | None:
        """Return the value after a micro-batch of a buffer that changes."""
        if not buffer.computed_here:
            return None
        if wrong := buffer.wrong_form():
            self._refuse(buffer, wrong)
            return buffer.start
        return buffer.value()

    def _refuse(self, buffer: Buffer, what: str) -> None:
        """Note that a buffer can't follow the rule, and what it does."""
        self._problems[buffer.path] = str(buffer), what

    def before_backward(self) -> None:
        """Give the layers copies of the buffers before the step, for what activation checkpointing computes again.

        It then reads what the forward pass has read, and only these copies change. The graph may need the tensors
        themselves, so they are left as they are. So are parameters: `training_step` changes them, and no layer does.
        """
        for buffer in self._changing():
            if buffer.is_parameter or (start := buffer.start) is None:
                continue
            if buffer.scratch is None or _form(buffer.scratch) != _form(start):
                buffer.scratch = torch.empty_like(start)
            buffer.scratch.data.copy_(start)
            buffer.layer._buffers[buffer.name] = buffer.scratch

    def after_backward(self) -> None:
        """Note the buffers that change in a backward pass only. They have no value after a forward pass."""
        changing = {*self.averaged, *self._changes, *self._problems}
        for path, buffer in self.buffers.items():
            if path not in changing and buffer.computed_here and buffer.was_touched():
                self._refuse(buffer, CHANGES_IN_BACKWARD)

    def finish(self, step_batch: StepBatch) -> None:
        """Set the buffers to their values after the step. Every process calls this.

        Raises:
            UserError: with an exact sum, a buffer can't follow the rule. All processes raise it.
        """
        self.batch_norm.finish(step_batch)
        if not self.buffers and not self._left_out and not self._steps_to_compare:
            return
        results: dict[str, Tensor] = {}
        changed, problems = self._gather() if self._gathers() else ([], self._problems)
        for reduction in self._reductions.values():
            values, differs = reduction.result(step_batch.num_nonempty, self._communicates)
            results |= values
            if isinstance(reduction, Agreement) and not reduction.agrees and self._communicates:
                self._compare_starts(reduction.like)
            reduction.differed = differs if reduction.differed is None else reduction.differed | differs
            if self.exact or self._steps_to_compare or differs.device.type == "cpu":  # else the host would wait
                self._read_integers()
        joining = {path: self.buffers[path] for path in changed}
        results |= self._reduce_changes(joining, step_batch)
        self._set(results)
        self.averaged |= joining
        for path, (name, what) in problems.items():
            self._report(name, what)
            self._left_out.add(path)  # and to each process
            self.buffers.pop(path, None)
            self.averaged.pop(path, None)
        self._steps_to_compare = max(self._steps_to_compare - 1, 0)
        self._begins_epoch = False
        if self._compares_parameters:
            for path, buffer in self.buffers.items():
                if buffer.is_parameter and path not in self.averaged:
                    buffer.start = None  # its memory is free for what follows

    def _compare_starts(self, paths: Collection[str]) -> None:
        """Report the parameters that the ranks had with other values before the step, which a mean would hide."""
        starts = [self.averaged[path].start for path in paths]
        mine = torch.stack([_checksum(start) for start in starts if start is not None]).tolist()
        others = gather_objects(mine)
        for at, path in enumerate(paths):
            if any(sums[at] != mine[at] for sums in others):
                self._report(str(self.averaged[path]), DIFFERS_BEFORE)

    def restore_parameters(self) -> None:
        """Set the parameters without a gradient that change in this step to their values before it."""
        for buffer in self._changing():
            if buffer.is_parameter:
                buffer.restore()

    def _gathers(self) -> bool:
        """Return whether processes tell each other of changes, which costs time: not of parameters that never change.

        All of them begin to change in the same step, since each process has the same `training_step`.
        """
        if self.averaged or self._compares_parameters:
            return True
        return any(not buffer.is_parameter for buffer in self.buffers.values())

    def _gather(self) -> tuple[list[str], dict[str, tuple[str, str]]]:
        """Return the buffers that have begun to change, and those that can't follow the rule, on any process."""
        mine = self._changes.keys() - self._problems.keys(), self._problems
        if not self._any_process(any(map(bool, mine))):
            return [], {}
        reports = gather_objects((set(mine[0]), mine[1])) if self._communicates else [mine]
        problems = {path: problem for _, refused in reports for path, problem in refused.items()}
        return sorted({path for changes, _ in reports for path in changes} - problems.keys()), problems

    def _reduce_changes(self, buffers: Mapping[str, Buffer], step_batch: StepBatch) -> dict[str, Tensor]:
        """Return the values of buffers that did not take part in the step's reduction."""
        results: dict[str, Tensor] = {}
        for path, buffer in buffers.items():  # one by one: a mean does not depend on which others have changed
            assert buffer.start is not None
            reduction = (Agreement if buffer.is_parameter else Reduction)({path: buffer.start}, self._exact_sum, {})
            reduction.begin(step_batch.step)
            for value in self._changes.get(path, [buffer.start] * self._pieces if buffer.computed_here else []):
                reduction.add([value])
            values, differs = reduction.result(step_batch.num_nonempty, self._communicates)
            if bool(differs):
                self._report(str(buffer), DIFFERS)
            self._exponents |= reduction.exponents()
            results |= values
        return results

    def _set(self, results: Mapping[str, Tensor]) -> None:
        """Set buffers to their values after the step."""
        owners: dict[int, set[str]] = {}  # by tensor, since layers may share one
        for path, buffer in self.buffers.items() if results else ():
            owners.setdefault(id(buffer.tensor), set()).add(path)
        for path, value in results.items():
            buffer = self.buffers[path]
            # If only one of the layers that share a tensor has a new value, it has replaced its tensor.
            buffer.set(value, new_object=not owners[id(buffer.tensor)] <= results.keys())

    def flush(self) -> None:
        """Read delayed results and raise their errors."""
        self._read_integers()

    def end_of_epoch(self) -> None:
        """Search for buffers that were registered since or changed without a trace, through `.data` for example.

        Every process calls this.
        """
        known = {*self.buffers, *self._left_out}
        others = (each for path, each in self.buffers.items() if path not in self.averaged and not each.is_parameter)
        new = any(path not in known for path, _, _ in self._names())
        self._begins_epoch = True
        new = new or any(not each.was_touched() and each.has_other_content() for each in others)
        if self._any_process(new):
            self._steps_to_compare = max(self._steps_to_compare, 1)

    def _any_process(self, new: bool) -> bool:
        """Return whether `new` is true on any process. Every process calls this."""
        if not self._communicates:
            return new
        # A tensor on the host: the host waits for other hosts, but for no device.
        device = "cpu" if "cpu" in str(dist.get_backend_config()) else self.strategy.root_device
        dist.all_reduce(number := torch.tensor([int(new)], device=device), dist.ReduceOp.MAX)
        return bool(number)

    # --- which buffers there are ---

    def _names(self, parameters: bool = True) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield what `other_buffers` does and, with `parameters`, the parameters that follow the rule."""
        yield from other_buffers(self.strategy.lightning_module)
        if parameters and self._follows_parameters:
            yield from frozen_parameters(self.strategy.lightning_module)

    def _find(self, parameters: bool = True) -> list[Buffer]:
        """Find buffers that were registered since the last call, and return them."""
        holds = self.strategy.holds
        new = [
            Buffer(layer, name, path, holds(layer), is_parameter=name in layer._parameters)
            for path, layer, name in self._names(parameters)
            if path not in self.buffers and path not in self._left_out
        ]
        for buffer in new:
            buffer.save()
            self.buffers[buffer.path] = buffer
        return new

    def _changing(self) -> Iterator[Buffer]:
        """Yield the buffers that change in this step."""
        yield from self.averaged.values()
        yield from (self.buffers[path] for path in self._changes)

    # --- what can't follow the rule ---

    def _read_integers(self) -> None:
        """Report the integers that have differed between pieces."""
        for reduction in self._reductions.values():
            if reduction.differed is not None:
                differs, reduction.differed = reduction.differed.tolist(), None
                for path in [path for path, differed in zip(reduction.like, differs, strict=True) if differed]:
                    self._report(str(self.buffers[path]), DIFFERS)

    def _report(self, name: str, what: str) -> None:
        """Raise an error about a buffer that can't follow the rule, or log it once if the sum is not exact.

        Args:
            name: the buffer in words, `str(buffer)`.
            what: what it does.
        """
        remedy = REMEDIES.get(what, REMEDY)
        if self.exact:
            raise UserError(f"exact=true: {name} {what}: {remedy}")
        if name not in self._noticed and self.strategy.is_global_zero:
            LOG.warning(f"{name} {what}, so the run depends on the layout: {remedy}")
        self._noticed.add(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the exponents from which later sums follow, for a checkpoint. Every process calls this."""
        state: dict[str, Any] = {}
        if (exact_sum := self.batch_norm.exact_sum) is not None:
            state["statistics"] = gather_exponents(self.strategy, exact_sum)
        known = {path: self._exponents.get(path) for path in self.averaged}
        for reduction in self._reductions.values():
            known |= {path: exponent for path, exponent in reduction.exponents().items() if path in known}
        return {**state, "buffers": known} if known else state


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


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of a tensor."""
    return tensor.shape, tensor.dtype


def _kind(tensor: Tensor) -> tuple[torch.Size, bool, bool]:
    """Return the shape of a tensor, and what kind of numbers it has."""
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements as one vector: float32 or float64, where complex numbers are two each, or int64."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype == torch.uint64:
        tensor = tensor.contiguous().view(torch.int64)
    is_float = tensor.is_floating_point()
    return tensor.reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32) if is_float else torch.int64)


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with the shape and dtype of `like` of which `flat` has the elements (see `_flat`)."""
    if like.is_complex():
        real = flat.to(torch.empty(0, dtype=like.dtype).real.dtype)
        return torch.view_as_complex(real.view(*like.shape, 2))
    if like.dtype == torch.uint64:
        return flat.contiguous().view(torch.uint64).view(like.shape)
    return flat.to(like.dtype).view(like.shape)


def _keys(flat: Tensor) -> Tensor:
    """Return int64 numbers, one for each element, in the order of the elements. Equal keys are equal bits."""
    if not flat.is_floating_point():
        return flat
    bits = flat.contiguous().view(INTEGERS[flat.dtype])
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).long()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Check whether two tensors have the same form and the same bits."""
    return _form(one) == _form(other) and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    """Return integers, one for each element. Equal integers are equal bits."""
    flat = _flat(tensor)
    return flat.contiguous().view(INTEGERS[flat.dtype]) if flat.is_floating_point() else flat


def _checksum(tensor: Tensor) -> Tensor:
    """Return a sum over the bits of a tensor, in which each element has another weight."""
    bits = _bits(tensor)
    return (bits.long() * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()


def _from_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the floating-point elements of which `_keys` returned the keys."""
    bits = keys.to(INTEGERS[dtype])
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).view(dtype)


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
