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

    What is no number is put together from the pieces.

    Args:
        numbers: the means of the numbers.
        others: the other results of each piece.
        sizes: the samples of each piece.
        before: those of an earlier step, if this process has no sample in this one. It gets 0 for each number of them,
            and no rows of the others.

    Attributes:
        numbers: see Args.
    """

    def __init__(
        self,
        numbers: Outputs,
        others: Sequence[dict[str, Any]],
        sizes: Sequence[int],
        before: "StepOutputs | None" = None,
    ) -> None:
        if others:  # one row of a piece with one sample looks like a number
            numbers = {name: value for name, value in numbers.items() if name not in others[0]}
        super().__init__(numbers)
        self.numbers, self._samples = numbers, sum(sizes)
        self._refused: set[str] = set()
        for name in others[0] if others else ():
            if all(name in each for each in others):
                try:
                    value = joined([each[name] for each in others], sizes)
                    self[name] = apply_to_collection(value, Tensor, Tensor.detach)
                except CannotJoin:
                    self._refused.add(name)
        for name, value in before.items() if before is not None else ():
            if before is not None and name in before.numbers:
                self.setdefault(name, torch.zeros_like(value))
            elif before is not None:
                with suppress(CannotRepeat):
                    self[name] = repeated(value, before._samples, range(0))

    def __missing__(self, name: str) -> Any:
        """Raise an error that says why there is no such result."""
        if name in self._refused:
            raise UserError(
                f"a hook uses outputs[{name!r}], and what training_step returned for the pieces of the step can't be "
                "put together: return one row for each sample, or a number"
            )
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a result, or the default if there is none."""
        return self[name] if name in self or name in self._refused else default


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
