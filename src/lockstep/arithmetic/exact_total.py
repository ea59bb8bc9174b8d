"""Sums and means of numbers that do not depend on the order in which the numbers are added."""

import math
from collections.abc import Sequence

import numpy as np

UNIT = -1126  # a float64 is a whole multiple of 2**-1126
LOWER_BITS = 26  # bits of the lower half of a mantissa, so that the sums of halves fit in 64 bits


class ExactTotal:
    """A sum of float64 numbers without rounding.

    It is a Python integer, which has any size. Python divides integers with one rounding, so a mean is rounded once.

    Attributes:
        units: the sum of the finite numbers, in units of 2**-1126.
        broken: the sum of the numbers that are not finite; 0 if there are none.
    """

    def __init__(self, units: int = 0, broken: float = 0.0) -> None:
        self.units, self.broken = units, broken

    def add(self, numbers: Sequence[float]) -> None:
        """Add numbers."""
        if len(numbers) == 1 and math.isfinite(number := numbers[0]):  # the usual case of few numbers
            mantissa, exponent = math.frexp(number)
            self.units += int(mantissa * 2.0**53) << (exponent - 53 - UNIT)
            return
        values = np.asarray(numbers, np.float64)
        finite = np.isfinite(values)
        if not finite.all():
            self.broken += sum(values[~finite].tolist())
            values = values[finite]
        mantissas, exponents = np.frexp(values)
        integers = np.ldexp(mantissas, 53).astype(np.int64)
        for exponent in np.unique(exponents).tolist():
            chosen = integers[exponents == exponent]
            high, low = int((chosen >> LOWER_BITS).sum()), int((chosen & (2**LOWER_BITS - 1)).sum())
            self.units += ((high << LOWER_BITS) + low) << (exponent - 53 - UNIT)

    def merge(self, other: "ExactTotal") -> None:
        """Add another total."""
        self.units += other.units
        self.broken += other.broken

    def over(self, divisor: float) -> float:
        """Return the sum divided by a number, rounded once if the number is whole; nan for 0."""
        if not divisor:
            return math.nan
        if self.broken:  # it is infinite or nan
            return self.broken / divisor
        numerator, denominator = float(divisor).as_integer_ratio()
        try:
            return (self.units * denominator) / (numerator << -UNIT)
        except OverflowError:
            return math.copysign(math.inf, self.units * numerator)
