"""Divide an optimizer's parameter groups by patterns of parameter names.

conf/train.yaml names the class in `optimizer.param_groups`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lockstep import UserError, match_patterns

RATES = ("max_lr", "base_lr", "min_lr")  # options of torch's schedulers that may be lists


class LrScale:
    """Multiplies the learning rate of some parameters by a factor, at every step of every schedule.

    Args:
        lr_scale: factors by patterns of parameter names, `{net.*: 0.1, net.fc.*: 1}`. The last pattern that matches a
            name counts.
    """

    def __init__(self, lr_scale: Mapping[str, float]) -> None:
        self.factors = dict(lr_scale)

    def divide(
        self, groups: Sequence[dict[str, Any]], named: Iterable[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        """Divide each parameter group of an optimizer into groups with one factor each.

        Args:
            groups: the optimizer's `param_groups`.
            named: the module's `named_parameters()`.

        Raises:
            UserError: A pattern matches no name.
        """
        names = {id(parameter): name for name, parameter in named}
        try:
            patterns = match_patterns(self.factors, list(names.values()))
        except ValueError as error:
            raise UserError(f"optimizer.lr_scale: {error}") from error
        parts = []
        for group in groups:
            of = [patterns.get(names.get(id(parameter), "")) for parameter in group["params"]]
            for pattern in dict.fromkeys(of):
                scale = 1.0 if pattern is None else self.factors[pattern]
                part = {**group, "lr": group["lr"] * scale, "lr_scale": scale}
                for name in {"params", "param_names"} & group.keys():
                    part[name] = [each for each, its in zip(group[name], of, strict=True) if its == pattern]
                parts.append(part)
        return parts

    def schedule(self, options: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the options of a schedule that are learning rates, with one value for each group.

        With a single value, of OneCycleLR's max_lr for example, all groups would have the same rate.
        """
        scales = [group.get("lr_scale") for group in groups]
        rates = [] if None in scales else [name for name in RATES if isinstance(options.get(name), int | float)]
        return {name: [options[name] * scale for scale in scales] for name in rates}
