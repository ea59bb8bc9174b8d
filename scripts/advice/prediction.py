"""What a layout's step takes, predicted from what was measured of the machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.run.config import Config
from lockstep.step.memory import MIB

BUCKET = 25 * MIB  # what DDP sends at once, after a first one of 1 MiB


@dataclass
class Choice:
    """One layout. Seconds are of an optimizer step; MiB of one device."""

    strategy: str
    devices: int
    accumulate_grad_batches: int
    compute: float
    all_reduce: float
    mib: float
    measured: float | None = None

    @property
    def predicted(self) -> float:
        return self.compute + self.all_reduce

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to the measurement."""
        return None if self.measured is None else self.predicted / self.measured - 1

    @property
    def best(self) -> float:
        """What is known of its time."""
        return self.measured or self.predicted

    def __str__(self) -> str:
        name = "auto" if self.devices == 1 else self.strategy
        return f"strategy={name} devices={self.devices} accumulate_grad_batches={self.accumulate_grad_batches}"


@dataclass
class Machine:
    """What was measured.

    Attributes:
        compute: seconds of a step that sends nothing, by devices that are busy at once, then by turns of each.
        peak: MiB of a device by samples of a piece.
        all_reduce: `(bytes, seconds)` by devices.
        gradients: bytes of a step's gradient.
    """

    compute: dict[int, dict[int, float]]
    peak: dict[int, float]
    all_reduce: dict[int, list[tuple[int, float]]]
    gradients: int

    def step(self, devices: int, turns: int) -> float:
        """Seconds of a step without sending. Between two measured numbers of turns it is a straight line: each turn
        adds its own overhead to the same samples."""
        return interpolated(self.compute[devices], turns)

    def memory(self, samples: int) -> float | None:
        """MiB of a device for pieces of so many samples; None where they are known not to fit."""
        return None if samples > max(self.peak) else interpolated(self.peak, samples)

    def ring(self, devices: int) -> tuple[float, float]:
        """`(latency in s, bandwidth in bytes/s)` of the ring model, fitted to relative errors."""
        sent = np.array([2 * (devices - 1) / devices * size for size, _ in self.all_reduce[devices]])
        seconds = np.array([took for _, took in self.all_reduce[devices]])
        rows = np.stack([1 / seconds, sent / seconds], axis=1)
        latency, per_byte = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
        return max(float(latency), 0.0), 1 / max(float(per_byte), 1e-15)

    def send(self, devices: int) -> float:
        """Seconds of a gradient's all-reduce, in DDP's buckets."""
        latency, bandwidth = self.ring(devices)
        buckets = 1 + -(-max(0, self.gradients - MIB) // BUCKET)
        return latency * buckets + 2 * (devices - 1) / devices * self.gradients / bandwidth


def interpolated(points: dict[int, float], at: int) -> float:
    return float(np.interp(at, sorted(points), [points[key] for key in sorted(points)]))


def predict(batch_size: int, offered: list[tuple[int, int]], config: Config, machine: Machine) -> list[Choice]:
    """Every layout that fits the memory."""
    gpu = config.layout.accelerator == "gpu"
    found = []
    for devices, accumulate in offered:
        mib = machine.memory(batch_size // (devices * accumulate))
        if mib is None or mib > (config.memory_budget or float("inf")):
            continue
        busy = machine.step(devices, accumulate)
        if devices == 1:
            found.append(Choice("single", 1, accumulate, busy, 0.0, mib))
            continue
        found.append(Choice("ddp", devices, accumulate, busy, machine.send(devices), mib))
        if config.compile:  # which can't go with dp
            continue
        # dp is one process. A CPU computes its logical devices one after the other; GPUs compute at once, and the first
        # one sends its weights to each of the others in every turn, and gets their gradients.
        alone = busy if gpu else machine.step(1, devices * accumulate)
        copies = 2 * (devices - 1) * accumulate * machine.gradients / machine.ring(devices)[1] if gpu else 0.0
        found.append(Choice("dp", devices, accumulate, alone, copies, mib))
    return found
