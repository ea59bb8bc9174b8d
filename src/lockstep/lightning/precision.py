"""Precision plugins, which call the hooks around the backward passes and clip the gradient."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from lockstep.lightning.hooks import call_hook, overrides_method
from lockstep.lightning.strategy import StepStrategy


class StepPrecision(Precision):
    """Calls the hooks around the backward passes and before the optimizer step by `call_hook`."""

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call `on_before_backward`."""
        call_hook(module.trainer, "on_before_backward", tensor)
        return tensor

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Return the loss without its graph. `on_after_backward` follows once, with the gradient of the step."""
        return tensor.detach()

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Call `on_after_backward` and `on_before_optimizer_step`.

        Clip the gradient if there is a limit, or if the module clips by itself.
        """
        trainer = model.trainer
        call_hook(trainer, "on_after_backward")
        call_hook(trainer, "on_before_optimizer_step", optimizer)
        trainer.strategy.take_assigned_gradients()
        methods = ("configure_gradient_clipping", "clip_gradients")
        if trainer.gradient_clip_val or any(overrides_method(model, name, pl.LightningModule) for name in methods):
            limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            self._clip_gradients(model, optimizer, limit, gradient_clip_algorithm=algorithm)
            trainer.strategy.take_assigned_gradients()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy the plugin: `with_quick_hooks` made its class, which pickle can't name."""
        kind = type(self).__mro__[1]
        return _quick_copy, (Precision if kind is StepPrecision else kind, self.__dict__)


def _quick_copy(kind: type[Precision], attributes: dict[str, Any]) -> Precision:
    precision = object.__new__(kind)
    precision.__dict__.update(attributes)
    return with_quick_hooks(precision)


def with_quick_hooks(precision: Precision) -> Precision:
    """Return a precision plugin that shares the attributes of `precision` and calls hooks as `StepPrecision` does.

    `StepPrecision` stands between the plugin's class and Lightning's base class, since the methods of other precisions
    call those of the base class.
    """
    kind = type(precision)
    bases = (StepPrecision,) if kind is Precision else (kind, StepPrecision)
    quick: Precision = object.__new__(type(kind.__name__, bases, {"__qualname__": kind.__qualname__}))
    quick.__dict__ = precision.__dict__
    return quick


class ClipsByStrategy:
    """A method for `proxy`: the proxy of the precision plugin has it in place of its own `clip_grad_by_norm`.

    It clips by the norm over the parts of all processes.
    """

    main_params: Any
    strategy: StepStrategy

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients of an optimizer's parameters by their norm."""
        parameters = list(self.main_params(optimizer))
        nn.utils.clip_grads_with_norm_(parameters, clip_val, self.strategy.gradient_norm(parameters))
