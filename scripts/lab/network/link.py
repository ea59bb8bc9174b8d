"""A model of a link: n bytes take alpha + beta n seconds. It predicts the times of sums over workers."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np

from lockstep.config.value_checks import show
from lockstep.errors import UserError

PER_SECOND = {"k": 1e3, "m": 1e6, "g": 1e9}  # bits
PAYLOAD = 1448 / 1514  # share of data in a full Ethernet packet; the rest is headers
LATENCY = 50e-6  # s, if only the rate is given: about that of TCP within a rack


@dataclass(frozen=True)
class Cost:
    """The cost of a sum over workers, in seconds.

    `incast` is the time that messages wait for each other at a link that all of them use.
    """

    latency: float
    bytes: float
    incast: float
    adding: float

    @property
    def seconds(self) -> float:
        return self.latency + self.bytes + self.incast + self.adding


@dataclass(frozen=True)
class Link:
    """A link between two workers.

    Attributes:
        alpha: latency of a message, in seconds.
        beta: seconds per byte.
        gamma: seconds per byte of adding one vector to another, on a worker.
        spread: quartiles of measured over predicted times.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    spread: tuple[float, float] = (1.0, 1.0)

    @property
    def mbit(self) -> float:
        """Mbit per second."""
        return 8 / self.beta / 1e6

    @classmethod
    def fitted(cls, pings: list[tuple[int, float]], gamma: float) -> "Link":
        """Fit a link to measured (bytes, seconds).

        beta is the slope over large messages; alpha is the rest of the time of small ones. The burst that an idle link
        passes at once therefore does not affect beta.
        """
        sizes, times = (np.array(each) for each in zip(*pings, strict=True))
        large = sizes > 1 << 20
        kinds = sorted({*sizes[large].tolist()})
        beta = float(np.polyfit(kinds, [np.median(times[sizes == kind]) for kind in kinds], 1)[0])
        alpha = float(np.median(times[~large] - beta * sizes[~large]))
        low, _, high = quantiles((times / (alpha + beta * sizes)).tolist(), n=4)
        return cls(alpha, beta, gamma, (low, high))

    @classmethod
    def of_rate(cls, rate: str) -> "Link":
        """Return the link of a rate such as `1gbit`, or with a latency in microseconds `400gbit@5us`."""
        bits, _, latency = rate.partition("@")
        if latency and not re.fullmatch(r"\d+(\.\d+)?us", latency):
            raise UserError(f"link={show(rate)}: the latency must be in microseconds: 400gbit@5us")
        alpha = float(latency[:-2]) * 1e-6 if latency else LATENCY
        return cls(alpha, 8 / bits_per_second("link", bits) / PAYLOAD)

    @classmethod
    def measured(cls, path: Path) -> "Link":
        """Return the link that `communication.py` measured.

        Args:
            path: its folder, or its communication.json.

        Raises:
            UserError: there is none.
        """
        try:
            fields = json.loads((path / "communication.json" if path.is_dir() else path).read_text())["link"]
            return cls(fields["alpha"], fields["beta"], fields["gamma"], tuple(fields["spread"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"link={path}: no communication.json of scripts/lab/communication.py ({error})") from None

    def cost(self, way: str, workers: int, size: int) -> Cost:
        """Return the cost of summing vectors of `size` bytes in one of the ways of network/collectives.py."""
        n, (a, b, g) = workers, (self.alpha, self.beta * size, self.gamma * size)
        if way == "parameter server":  # N - 1 vectors share the server's link in each direction
            return Cost(2 * a, 2 * b, 2 * (n - 2) * b, (n - 1) * g)
        if way == "halving and doubling":
            log = n.bit_length() - 1
            paired = 1 << log
            share, folded = (paired - 1) / paired, int(n > paired)
            return Cost(2 * (log + folded) * a, 2 * (share + folded) * b, 0.0, (share + folded) * g)
        return Cost(2 * (n - 1) * a, 2 * (n - 1) / n * b, 0.0, (n - 1) / n * g)


def bits_per_second(key: str, rate: Any) -> float:
    """Return a rate in tc's notation, such as 200mbit or 1gbit, as bits per second.

    Raises:
        UserError: it is no such rate.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", str(rate)):
        return float(match[1]) * PER_SECOND[match[2]]
    raise UserError(f"{key}={show(rate)}: must be a rate in tc's notation: 200mbit, 1gbit")
