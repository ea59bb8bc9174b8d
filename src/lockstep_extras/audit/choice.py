"""Choose the pieces that are computed twice, and find the devices whose results are wrong."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.order import hash64


class Choice(NamedTuple):
    """A piece that is computed twice.

    Attributes:
        piece: its number in the step.
        devices: numbers over all nodes: the owner; the device that computes the piece again (the owner itself if there
            is only one device); and, if there are three, the device that computes it if the two results differ.
    """

    piece: int
    devices: tuple[int, ...]


def choose_piece(share: float, seed: int, step: int, sizes: Sequence[int], layout: Layout) -> Choice | None:
    """Return the piece of a step that is computed twice; None in most steps.

    The step and the piece depend on the seed only, the devices on the layout too.

    Args:
        share: share of the steps with such a piece.
        sizes: samples of each piece of the step.
    """
    if hash64(seed, 0xA0D17, step) >= share * 2**64:
        return None
    nonempty = [piece for piece, size in enumerate(sizes) if size]
    piece = nonempty[hash64(seed, 0xA0D17, step, 1) % len(nonempty)]
    devices = range(layout.num_devices)
    owner = next(device for device in devices if piece in layout.owned(device))
    others = [device for device in devices if device != owner] or [owner]
    first = hash64(seed, 0xA0D17, step, 2) % len(others)
    return Choice(piece, (owner, *(others[first:] + others[:first])[:2]))


def verdict(results: Sequence[tuple[int, Hashable]]) -> tuple[list[int], bool]:
    """Find the devices that computed a piece wrong.

    The right result is the one of most devices. If all devices differ, it is the one that a device had most often.

    Args:
        results: `(device, result)` in the order of computation. A device may appear more than once.

    Returns:
        The devices with a wrong result (all devices if no result is right), and whether any device's last result is
        wrong.
    """
    times = Counter(result for _, result in results)  # how often each result was computed
    devices = Counter(result for _, result in set(results))  # on how many devices
    (most, often), *others = sorted(((devices[result], times[result]) for result in times), reverse=True)
    unique = often > 1 and (most, often) not in others
    right = [result for result in times if unique and (devices[result], times[result]) == (most, often)]
    wrong = {device for device, result in results if right != [result]}
    last = dict(results)
    return sorted(wrong), any(right != [last[device]] for device in wrong)
