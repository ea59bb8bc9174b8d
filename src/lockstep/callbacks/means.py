"""Means of what training steps return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

FOLDED = 64  # steps that wait until they are added up: small operations cost a small network half a per cent of a step


class WeightedMeans:
    """Weighted sums of numbers by name, on their device; nobody waits for it until they are taken."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Mapping[str, Tensor], int]] = []
        self._sums: dict[str, Tensor] = {}  # float64 [2]: of the weighted values, and of the weights

    def add(self, values: Mapping[str, Tensor], weight: int) -> None:
        """Adds 0-dim tensors, which nobody may overwrite later."""
        if weight:
            self._waiting.append((values, weight))
        if len(self._waiting) >= FOLDED:
            self._fold()

    def names(self) -> list[str]:
        """Of what was added since the last `take`."""
        self._fold()
        return list(self._sums)

    def take(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Sums and weights of `names`, float64 [names, 2], zeros for what was not added; they begin anew."""
        self._fold()
        sums, self._sums = self._sums, {}
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        return torch.stack([sums.get(name, nothing).to(device) for name in names])

    def _fold(self) -> None:
        waiting, self._waiting = self._waiting, []
        for name in dict.fromkeys(name for values, _ in waiting for name in values):
            found = [(values[name], weight) for values, weight in waiting if name in values]
            values = torch.stack([value for value, _ in found]).double()
            weights = values.new_tensor([weight for _, weight in found])
            new = torch.stack([values @ weights, weights.sum()])
            self._sums[name] = self._sums[name] + new if name in self._sums else new
