"""What `training_step` returns for the pieces of a step, and what hooks get of it."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lockstep.errors import StepRefused, UserError
from lockstep.step.batch import CannotJoin, CannotRepeat, joined, repeated

Outputs = dict[str, Tensor]


class StepOutputs(dict[str, Any]):
    """What `on_train_batch_end` gets of the results of `training_step`.

    What is no number is put together when a hook first asks for it. A process without a sample gets 0 for a number,
    and no rows.

    Args:
        numbers: the means of the numbers.
        others: the other results of each piece.
        sizes: the samples of each piece.

    Attributes:
        numbers: see Args.
        before: those of an earlier step, if this process has no sample in this one.
    """

    def __init__(self, numbers: Outputs, others: Sequence[dict[str, Any]], sizes: Sequence[int]) -> None:
        if others:  # one row of a piece with one sample looks like a number
            numbers = {name: value for name, value in numbers.items() if name not in others[0]}
        super().__init__(numbers)
        self.numbers = numbers
        self.before: StepOutputs | None = None
        self._others, self._sizes, self._refused = others, sizes, set[str]()

    def _complete(self) -> None:
        """Add what is no number, once."""
        others, self._others = self._others, []
        if self.before is not None:
            self._add_empty(self.before)
        for name in others[0] if others else ():
            if all(name in each for each in others):
                try:
                    value = joined([each[name] for each in others], self._sizes)
                    super().__setitem__(name, apply_to_collection(value, Tensor, Tensor.detach))
                except CannotJoin:
                    self._refused.add(name)

    def _add_empty(self, before: "StepOutputs") -> None:
        """Add the names of an earlier step's results, with 0 for numbers and no rows."""
        for name, value in before.items():
            if name in before.numbers:
                super().setdefault(name, torch.zeros_like(value))
            else:
                with suppress(CannotRepeat):
                    super().__setitem__(name, repeated(value, sum(before._sizes), range(0)))
        self.before = None

    def __missing__(self, name: str) -> Any:
        """Return what is no number; or raise an error that says why there is no such result."""
        self._complete()
        if super().__contains__(name):
            return super().__getitem__(name)
        if name in self._refused:
            raise UserError(
                f"a hook uses outputs[{name!r}], and what training_step returned for the pieces of the step can't be "
                "put together: return one row for each sample, or a number"
            )
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a result, or the default if there is none."""
        self._complete()
        return self[name] if name in self._refused else super().get(name, default)

    def __contains__(self, name: object) -> bool:
        """Check whether there is a result with this name."""
        self._complete()
        return super().__contains__(name) or name in self._refused

    def __iter__(self) -> Any:
        """Iterate the names."""
        self._complete()
        return super().__iter__()

    def __len__(self) -> int:
        """Return the number of results."""
        self._complete()
        return super().__len__()

    def keys(self) -> Any:
        """Return the names."""
        self._complete()
        return super().keys()

    def values(self) -> Any:
        """Return the results."""
        self._complete()
        return super().values()

    def items(self) -> Any:
        """Return the names and results."""
        self._complete()
        return super().items()


def numbers_of(outputs: Any) -> Outputs:
    """Return the numbers among what `on_train_batch_end` gets."""
    numbers: Outputs = outputs.numbers if isinstance(outputs, StepOutputs) else outputs
    return numbers


def others_of(returned: Any, size: int) -> dict[str, Any]:
    """Return what `training_step` returned in a dict beside the numbers.

    Args:
        returned: the result.
        size: samples of the piece. A tensor with as many rows is no number, also if there is one row.
    """
    if not isinstance(returned, Mapping):
        return {}
    others = {}
    for name, value in returned.items():
        rows = isinstance(value, Tensor) and value.ndim > 0 and (value.numel() != 1 or len(value) == size)
        if name != "loss" and (rows or not isinstance(value, Tensor | int | float)):
            others[name] = value
    return others


def outputs_of(output: Any) -> tuple[Tensor, Outputs]:
    """Split the result of `training_step` into its loss, which keeps its graph, and its numbers, which do not.

    Args:
        output: a loss, or a dict with `loss` and other numbers.

    Returns:
        The loss, and the numbers by name, the loss among them.

    Raises:
        StepRefused: there is no loss, or it is not one number; or there is a weight that is none.
    """
    values = output if isinstance(output, Mapping) else {"loss": output}
    loss = values.get("loss")
    if not isinstance(loss, Tensor):
        returned = "a dict without a tensor 'loss'" if values is output else type(output).__name__
        remedy = "it must return the loss of every batch, or a dict with it under 'loss'"
        raise StepRefused(f"training_step returned {returned}: {remedy}")
    if loss.numel() != 1:
        raise StepRefused(f"training_step returned a loss of shape {list(loss.shape)}: it must be one number, the mean")
    numbers = {"loss": loss.detach()}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            numbers[name] = value.detach()
        elif isinstance(value, int | float):
            numbers[name] = torch.full((), float(value), device=loss.device)
    if values.get("weight") is not None:
        _check_weight(values["weight"], numbers.get("weight"))
    return loss, {name: number.reshape(()) if number.ndim else number for name, number in numbers.items()}


def _check_weight(returned: Any, number: Tensor | None) -> None:
    """Check the weight beside a loss.

    Args:
        returned: what `training_step` returned.
        number: the same as one number, or None.

    Raises:
        StepRefused: it is not one finite number of 0 or more that follows from the batch alone.
    """
    if number is None or not 0 <= float(number) < math.inf:
        what = "what is no number" if number is None else f"{float(number):g}"
        raise StepRefused(
            f"training_step returned {what} as weight: it must be the denominator of its loss, one finite number of 0 "
            "or more"
        )
    if isinstance(returned, Tensor) and returned.requires_grad:
        raise StepRefused(
            "training_step returned a weight that depends on the parameters: it must follow from the batch alone, as "
            "a count of pixels does"
        )
