"""Which pieces are computed twice, and what the results of one piece say about who computed wrong."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from lockstep.arithmetic.layout import Layout
from lockstep.arithmetic.order import hash64


class Choice(NamedTuple):
    """A piece of a step, and the devices (numbers over all nodes) that compute it: its owner, one that does so again (a
    single one itself), and where there is a third one, who is asked when those two differ."""

    piece: int
    devices: tuple[int, ...]


def choose_piece(share: float, seed: int, step: int, sizes: Sequence[int], layout: Layout) -> Choice | None:
    """The piece of a step, if any, that is computed again; `sizes` are the samples of its pieces. Which steps and
    pieces follows from the seed alone, who computes from the layout too."""
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
    """Who has computed a piece wrong, from `(device, result)` in the order in which they came. Right is what most
    devices came to; where each came to something else, what one of them came to most often.

    Returns:
        the devices that had another result, where nobody is right all of them; and whether one did so at last, too.
    """
    came = Counter(result for _, result in results)
    agreed = Counter(result for _, result in set(results))
    (most, times), *others = sorted(((agreed[result], came[result]) for result in came), reverse=True)
    unique = times > 1 and (most, times) not in others
    right = [result for result in came if unique and (agreed[result], came[result]) == (most, times)]
    wrong = {device for device, result in results if right != [result]}
    last = dict(results)
    return sorted(wrong), any(right != [last[device]] for device in wrong)
