"""How far numbers are apart, and how far rounding takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from trials.record import Tensors

UNIT_ROUNDOFF = {"64": 2.0**-53, "32": 2.0**-24, "16": 2.0**-11, "bf16": 2.0**-8}  # of what weights are kept in


def difference(found: Tensors, reference: Tensors) -> float:
    """The largest relative difference of a tensor: norm of the difference over norm of the reference.

    A tensor with less than a thousandth of the whole norm is measured against that thousandth: the gradient of a bias
    before BatchNorm, say, is zero but for rounding, and as relative as one likes.
    """
    norms = {name: norm(tensor) for name, tensor in reference.items()}
    least = 1e-3 * float(np.sqrt(sum(value**2 for value in norms.values())))
    apart = [norm(found[name] - reference[name].astype(np.float64)) / max(norms[name], least, 1e-300) for name in norms]
    return max(apart, default=0.0)


def norm(values: NDArray[Any]) -> float:
    """Euclidean, by numpy's own loops: BLAS would start threads in a process that forks."""
    return float(np.sqrt(np.square(values, dtype=np.float64).sum()))


def roundoff(precision: str) -> float:
    """Unit roundoff of what the weights are kept in: float32 under mixed precision."""
    return UNIT_ROUNDOFF["32" if precision.endswith("mixed") else precision.partition("-")[0]]
