"""Choose how many pieces each device computes, from the time that a piece takes there. Pure functions."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

LEAST_GAIN = 0.05  # a change must save this part of the slowest device's time
MOST_GAIN = 0.2  # a change that saves this part is made even if the times are noisy


def fastest_counts(pieces: int, seconds: Sequence[float]) -> list[int]:
    """Return the number of pieces of each device, at least one, with which a step takes the least time.

    Each device gets one piece, and each further piece goes to the device that would end it first. No other assignment
    is faster: some device then has more pieces than here, and ends its extra one no sooner than the last further piece
    ends here.

    Args:
        pieces: pieces of a step.
        seconds: time of a piece on each device.
    """
    counts = [1] * len(seconds)
    ends = [(2 * each, device) for device, each in enumerate(seconds)]  # with one more piece
    heapify(ends)
    for _ in range(pieces - len(seconds)):
        device = ends[0][1]
        counts[device] += 1
        heapreplace(ends, ((counts[device] + 1) * seconds[device], device))
    return counts


def slowest_time(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds that the slowest device needs for its pieces."""
    return max(count * each for count, each in zip(counts, seconds, strict=True))


def better_counts(counts: Sequence[int], seconds: Sequence[float], noise: float) -> list[int] | None:
    """Return a new number of pieces for each device, or None if no change saves enough.

    Enough is twice the noise, but at least LEAST_GAIN and at most MOST_GAIN, so that no piece moves while speeds stay
    the same.

    Args:
        counts: present number of pieces of each device.
        seconds: time of a piece on each device.
        noise: the largest relative standard error of these times.
    """
    new_counts = fastest_counts(sum(counts), seconds)
    gain = 1 - slowest_time(new_counts, seconds) / slowest_time(counts, seconds)
    return new_counts if gain >= min(MOST_GAIN, max(LEAST_GAIN, 2 * noise)) else None
