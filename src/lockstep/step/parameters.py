"""What a step in pieces can't do with a module's parameters: checked before each epoch, and in a run's first step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.text import join_names

WITH_WHOLE_GRADIENT = "change gradients in on_before_optimizer_step, where they are those of the whole step"
OTHER_BACKWARD = (
    "a backward pass in training_step, or in a hook, has given a gradient to {}, which would be added to the step's: "
    "use torch.autograd.grad(loss, x), or loss.backward(inputs=[x])"
)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Check whether a user's functions are registered that get a parameter's gradient in each backward pass."""
    kinds: Any = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    functions = [getattr(each, "func", each) for hooks in kinds if hooks for each in hooks.values()]
    # extras of ours have some, for what only counts or refuses
    return any(not str(getattr(each, "__module__", "")).startswith("lockstep") for each in functions)


def refuse_gradient_hooks(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse functions on parameters that get the gradient of each backward pass.

    Raises:
        UserError: a parameter has one.
    """
    if names := [name for name, parameter in named if has_gradient_hooks(parameter)]:
        raise UserError(
            f"register_hook or register_post_accumulate_grad_hook on {join_names(names, 2)}: it would get the weighted "
            f"gradient of a piece, which depends on the layout: {WITH_WHOLE_GRADIENT}"
        )


def check_parameters(module: nn.Module, optimized: Iterable[Tensor], exact: bool, pieces: int) -> None:
    """Check that the gradients of a module's parameters can be summed over pieces.

    Args:
        optimized: those of the optimizer.
        exact: whether the sum must be exact.
        pieces: pieces of a step.

    Raises:
        UserError: a parameter has a hook on its gradient, or numbers that an exact sum does not know; or one of the
            optimizer is none of the module.
    """
    if pieces == 1:  # its gradient is that of the step
        return
    ours = {id(parameter) for parameter in module.parameters()}
    if foreign := [parameter for parameter in optimized if parameter.requires_grad and id(parameter) not in ours]:
        raise UserError(
            f"the optimizer has a parameter of shape {list(foreign[0].shape)} that the module does not have, so the "
            "gradients of its pieces would not be summed: keep it in an attribute of a layer, or in a nn.ParameterList"
        )
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    refuse_gradient_hooks(named)
    if exact and (names := [name for name, parameter in named if parameter.is_complex()]):
        raise UserError(
            f"exact=true: {join_names(names, 2)} has complex numbers, which have no exact sum: keep real and imaginary "
            "parts as two parameters and use torch.complex(), or exact=false"
        )


def gradient_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return what changes with each gradient of a module's parameters, by name."""
    named = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return {name: (id(gradient), gradient._version) for name, gradient in named if gradient is not None}


def refuse_other_gradients(before: dict[str, tuple[int, int]], module: nn.Module) -> None:
    """Refuse gradients that a forward pass has changed.

    Args:
        before: `gradient_versions` before it.
        module: the module.

    Raises:
        UserError: a parameter has such a gradient.
    """
    after = gradient_versions(module)
    if names := [name for name, version in after.items() if before.get(name) != version]:
        raise UserError(OTHER_BACKWARD.format(join_names(names, 2)))


def refuse_sparse_gradients(setting: str, module: nn.Module) -> None:
    """Refuse sparse gradients where they are summed over pieces or processes.

    Args:
        setting: why they are summed, for the message.

    Raises:
        UserError: there is one.
    """
    named = ((name, parameter.grad) for name, parameter in module.named_parameters())
    if names := [name for name, gradient in named if gradient is not None and gradient.layout is not torch.strided]:
        raise UserError(f"{setting}: the gradient of {join_names(names, 2)} is sparse: leave out sparse=True")
