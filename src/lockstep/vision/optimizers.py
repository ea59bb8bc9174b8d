"""Divide an optimizer's parameter groups by patterns of parameter names; and Muon, for nets with convolutions.

conf/train.yaml names LrScale in `optimizer.param_groups`, conf/optimizer/muon.yaml names Muon.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import UserError
from lockstep.vision.parameters import match_patterns

RATES = ("max_lr", "base_lr", "min_lr")  # options of torch's schedulers that may be lists


class LrScale:
    """Multiplies the learning rate of some parameters by a factor, at every step of every schedule.

    Args:
        lr_scale: factors by patterns of parameter names, `{net.*: 0.1, net.fc.*: 1}`. The factor of the last
            pattern that matches a name is used.
    """

    def __init__(self, lr_scale: Mapping[str, float]) -> None:
        self.factors = dict(lr_scale)

    def divide(
        self, groups: Sequence[dict[str, Any]], named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        """Divide each parameter group of an optimizer into groups with one factor each.

        Args:
            groups: the optimizer's `param_groups`.
            named_parameters: names and parameters of the module.

        Raises:
            UserError: A pattern of `lr_scale` matches no name.
        """
        names = {id(parameter): name for name, parameter in named_parameters}
        try:
            patterns = match_patterns(self.factors, list(names.values()))
        except ValueError as error:
            raise UserError(f"optimizer.lr_scale: {error}") from error
        parts = []
        for group in groups:
            # for each parameter of the group, the pattern whose factor is used; None: no pattern matches
            matched = [patterns.get(names.get(id(parameter), "")) for parameter in group["params"]]
            for pattern in dict.fromkeys(matched):
                scale = 1.0 if pattern is None else self.factors[pattern]
                part = {**group, "lr": group["lr"] * scale, "lr_scale": scale}
                for name in {"params", "param_names"} & group.keys():
                    part[name] = [each for each, match in zip(group[name], matched, strict=True) if match == pattern]
                parts.append(part)
        return parts

    def scaled_options(self, options: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the learning rates among a schedule's `options`, each as a list with a scaled value for each group.

        With a single value, of OneCycleLR's max_lr for example, all groups would have the same rate.
        """
        scales = [group.get("lr_scale") for group in groups]
        if None not in scales and options.get("eta_min"):
            raise UserError(
                f"optimizer.lr_scale and scheduler.eta_min={options['eta_min']} don't go together, since torch takes "
                "one eta_min for all groups: give scheduler.eta_min=0"
            )
        rates = [] if None in scales else [name for name in RATES if isinstance(options.get(name), int | float)]
        return {name: [options[name] * scale for scale in scales] for name in rates}


class Muon(Optimizer):
    """Updates weights of two and more dimensions by Muon, and all other parameters by AdamW.

    torch.optim.Muon takes matrices only. Here a convolution is a matrix with a row for each output channel. Updates of
    Muon are scaled to the root mean square of AdamW's, so one learning rate and one schedule fit both. torch's class
    computes updates in bfloat16. This one computes them in the precision of the weights.

    Sources: Jordan et al., Muon, 2024. The scale: Liu et al., Muon is Scalable for LLM Training, 2025.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: fraction of Muon's running mean of gradients that stays at each step.
        betas: the same for the two running means of AdamW.
        weight_decay: this fraction of a parameter, times lr, is subtracted from it at each step.

    Raises:
        ValueError: An option is out of range.
    """

    works_on = "tensors"  # whole ones; see strategies/fsdp/optimizer.py

    def __init__(
        self,
        params: Any,
        lr: float = 0.002,
        momentum: float = 0.95,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.01,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: must be at least 0 and below 1")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: must be two numbers, at least 0 and below 1")
        if weight_decay < 0:
            raise ValueError(f"weight_decay={weight_decay}: must be at least 0")
        super().__init__(params, {"lr": lr, "momentum": momentum, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                if parameter.ndim > 1:
                    update = _muon_update(state, gradient, group["momentum"])
                else:
                    update = _adam_update(state, gradient, *group["betas"])
                parameter.sub_(update, alpha=group["lr"])
        return loss


def _muon_update(state: dict[str, Any], gradient: Tensor, momentum: float) -> Tensor:
    """Return an update of Muon with Nesterov momentum, scaled to the root mean square of AdamW's updates."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
    update = orthogonal(gradient.lerp(mean, momentum).flatten(1))
    return 0.2 * math.sqrt(max(update.shape)) * update.reshape(gradient.shape)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors, and singular values between about 0.7 and 1.2.

    Five Newton-Schulz iterations, with the coefficients of Jordan et al.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    matrix = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (2.0315 * gram @ gram - 4.7750 * gram) @ matrix
    return matrix


def _adam_update(state: dict[str, Any], gradient: Tensor, beta1: float, beta2: float) -> Tensor:
    """Return an update of Adam (Kingma and Ba, 2015)."""
    if not state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}
    state["step"] += 1
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1 ** state["step"])
    square = state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2 ** state["step"])
    return mean / (square.sqrt() + 1e-8)
