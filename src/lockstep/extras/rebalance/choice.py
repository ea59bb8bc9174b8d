"""How many pieces each device computes, from what a piece takes there. Pure."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

LEAST_GAIN = 0.05  # part of the slowest device's time that a change must save
MOST_GAIN = 0.2  # a change that saves as much is made however noisy the times are


def fastest(pieces: int, seconds: Sequence[float]) -> list[int]:
    """Return the pieces of each device with which the last device ends as early as can be, at least one each.

    Each piece goes to the device that would end it first. No other deal ends earlier: a piece more on any device would
    end no sooner than the last piece does here.

    Args:
        seconds: what a piece takes on each device.
    """
    counts = [1] * len(seconds)
    ends = [(2 * each, device) for device, each in enumerate(seconds)]  # with one piece more
    heapify(ends)
    for _ in range(pieces - len(seconds)):
        device = ends[0][1]
        counts[device] += 1
        heapreplace(ends, ((counts[device] + 1) * seconds[device], device))
    return counts


def slowest(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds after which the last device ends."""
    return max(count * each for count, each in zip(counts, seconds, strict=True))


def better(counts: Sequence[int], seconds: Sequence[float], noise: float) -> list[int] | None:
    """Return other pieces for each device, if they save enough; None: all stays.

    Enough is twice the noise of the times, but between LEAST_GAIN and MOST_GAIN: where speeds stay, so do pieces.

    Args:
        counts: pieces of each device now.
        seconds: what a piece takes on each device.
        noise: the largest standard error of these times, as a part of them.
    """
    others = fastest(sum(counts), seconds)
    gain = 1 - slowest(others, seconds) / slowest(counts, seconds)
    return others if gain >= min(MOST_GAIN, max(LEAST_GAIN, 2 * noise)) else None
