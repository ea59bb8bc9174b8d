"""Layouts: `batch_size` samples in `pieces` pieces, and which device computes which piece.

This module imports neither torch nor Lightning, so that bad numbers are refused before anything slow starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import accumulate as running_sum
from itertools import zip_longest

from lockstep.errors import UserError
from lockstep.text import plural

MAX_PIECES = 1 << 16  # of a step; each costs a forward pass
EXACT_PRECISIONS = ("64-true", "32-true", "bf16-mixed")  # those with which exact=true works
MAX_PIECES_EXACT = 1 << 13  # the same with exact=true: 2**13 elements of 50 bits add up to 63 bits (exact_sum.py)


class Action(Enum):
    """A pass of a piece."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Layout:
    """The assignment of a step's pieces to devices.

    Attributes:
        strategy: the strategy's name; `single` on one device.
        accelerator: `cpu` or `gpu`.
        devices: devices of one node.
        num_nodes: machines.
        batch_size: samples of one optimizer step, over all devices, nodes and accumulated micro-batches.
        pieces: parts that a step is cut into; a piece is one forward and backward pass on one device.
        exact: whether sums must not depend on their order; `portable`: nor on the kind of processor.
        shares: relative number of pieces of each device, in rank order; empty: equal shares.
        weights: what a process has of the weights: `whole`; `sharded`, a part of each tensor between its passes; or
            `staged`, the layers of its stage, and every piece passes all stages.
        one_process: whether one process uses all devices; otherwise each device has a process.
    """

    strategy: str
    accelerator: str
    devices: int
    num_nodes: int
    batch_size: int
    pieces: int
    exact: bool | str = False
    shares: tuple[float, ...] = ()
    weights: str = "whole"
    one_process: bool = False

    @property
    def num_devices(self) -> int:
        """Devices over all nodes."""
        return self.devices * self.num_nodes

    @property
    def world_size(self) -> int:
        """Worker processes over all nodes."""
        return self.num_devices if self.has_process_group else 1

    @property
    def has_process_group(self) -> bool:
        """True if several workers form a process group."""
        return self.num_devices > 1 and not self.one_process

    @property
    def replicas(self) -> int:
        """Processes that compute with a whole network each and share the pieces of a step.

        One process with several devices copies its weights to the others. With stages there is one network in all
        processes.
        """
        return 1 if self.weights == "staged" else self.world_size

    @property
    def accumulate(self) -> int:
        """Micro-batches that the busiest device computes one after another in a step.

        With stages every device computes a part of the network for all pieces. That is the work of pieces / devices
        whole micro-batches, rounded up.
        """
        if self.weights == "staged":
            return -(-self.pieces // self.num_devices)
        return max(self.counts)

    @property
    def counts(self) -> list[int]:
        """Pieces of each device, in rank order."""
        return [len(self.owned(device)) for device in range(self.num_devices)]

    @property
    def piece_size(self) -> int:
        """Samples of the largest piece of a full step."""
        return -(-self.batch_size // self.pieces)

    @property
    def max_pieces(self) -> int:
        """The largest number of pieces that a step may be cut into."""
        return MAX_PIECES_EXACT if self.exact else MAX_PIECES

    def owned(self, device: int) -> range:
        """Return the pieces that a device owns: of 8 pieces on 3 devices 0 to 2, 3 to 5, and 6 to 7.

        A device with a stage of the network owns all of them.
        """
        if self.weights == "staged":
            return range(self.pieces)
        borders = _borders(self.pieces, self.num_devices, self.shares)
        return range(borders[device], borders[device + 1])

    def micro_batches(self, rank: int) -> list[tuple[int, int]]:
        """Return the `(device, piece)` pairs that a process computes in one step, in order.

        A process with several devices takes the first piece of each device, then the second piece of each, and so on.
        """
        devices = range(self.num_devices) if self.one_process else (rank,)
        owned = [[(device, piece) for piece in self.owned(device)] for device in devices]
        return [pair for pairs in zip_longest(*owned) for pair in pairs if pair is not None]

    def with_more_pieces(self) -> Iterator["Layout"]:
        """Yield layouts of the same step with more and more pieces: at least twice as many each time, of equal size.

        If all devices have equally many pieces, they also have equally many in these layouts.
        """
        factor = self.num_devices if self.pieces % self.num_devices == 0 else 1  # of every number of pieces
        fewest = 2 * self.pieces
        for pieces in range(factor, min(self.batch_size, self.max_pieces) + 1, factor):
            if pieces >= fewest and self.batch_size % pieces == 0:
                yield replace(self, pieces=pieces)
                fewest = 2 * pieces

    def describe(self) -> str:
        """Return the layout as one line: `step 256 samples = 8 pieces x 32 on 4 devices, 2 each`."""
        equal = self.batch_size % self.pieces == 0
        size = f"{self.piece_size}" if equal else f"{self.batch_size // self.pieces} or {self.piece_size}"
        each = f"{self.counts[0]} each" if len(set(self.counts)) == 1 else " + ".join(map(str, self.counts))
        devices = plural(self.num_devices, "device") + f", {each}" * (self.num_devices > 1)
        if self.weights == "staged":
            idle = (self.num_devices - 1) / (self.pieces + self.num_devices - 1)
            devices = f"{self.num_devices} stages ({idle:.0%} idle)"
        nodes = f" of {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        step, pieces = plural(self.batch_size, "sample"), plural(self.pieces, "piece")
        return f"step {step} = {pieces} x {size} on {devices}{nodes}"


class Assignment:
    """Assigns the pieces of every step as the run's layout does.

    Another one may take its place in a data module, to assign the pieces of later steps otherwise. All processes must
    then get the same layout for a step, also loader processes, which are forked earlier and fetch several steps ahead.

    Args:
        layout: the run's layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def layout_at(self, step: int) -> Layout:
        """Return the layout of an optimizer step.

        Args:
            step: the number of the step since the run began, 0-based.

        Returns:
            The run's layout, maybe with other `shares`; the same object as long as they do not change.
        """
        return self.layout


@lru_cache(maxsize=16)
def _borders(total: int, parts: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Return the `parts + 1` borders of the parts of `split`. Cached, because it is called once per device."""
    return tuple(running_sum(split(total, parts, shares), initial=0))


def split(total: int, parts: int, shares: tuple[float, ...] = ()) -> list[int]:
    """Divide `total` pieces into `parts` whole numbers, at least one each.

    Without `shares` the parts are even, the larger ones first. With `shares` they follow the shares as closely as whole
    numbers can, by the largest remainder (Hamilton's method).
    """
    if not shares:
        return [total // parts + (part < total % parts) for part in range(parts)]
    spare = total - parts  # each part gets one; the rest follows the shares
    ideal = [max(0.0, share / sum(shares) * total - 1) for share in shares]
    scale = spare / sum(ideal) if sum(ideal) else 0.0
    floors = [int(count * scale + 1e-9) for count in ideal]
    largest_remainder_first = sorted(range(parts), key=lambda part: floors[part] - ideal[part] * scale)
    for part in largest_remainder_first[: spare - sum(floors)]:
        floors[part] += 1
    assert sum(floors) == spare, f"{total} pieces for the shares {shares}"  # else samples would be left out
    return [1 + count for count in floors]


def resolve(
    *,
    strategy: str,
    accelerator: str,
    devices: int,
    num_nodes: int,
    batch_size: int,
    pieces: int | None = None,
    accumulate_grad_batches: int | None = None,
    exact: bool | str = False,
    shares: tuple[float, ...] = (),
    weights: str = "whole",
    one_process: bool = False,
    equal_pieces: bool = True,
) -> Layout:
    """Return the layout of a config.

    Args:
        strategy: the name of what runs several devices.
        accelerator: see `Layout`.
        devices: see `Layout`.
        num_nodes: see `Layout`.
        batch_size: see `Layout`.
        pieces: None: `devices x num_nodes x accumulate_grad_batches`.
        accumulate_grad_batches: None: it follows from `pieces`, or is 1 if that is None too.
        exact: see `Layout`.
        shares: see `Layout`.
        weights: what a process has of them on several devices; see `Layout`.
        one_process: see `Layout`.
        equal_pieces: whether all pieces of a full step must have the same size. In an evaluation they may differ by a
            sample.

    Raises:
        UserError: the numbers do not fit together. The message names the nearest numbers that do.
    """
    num_devices = devices * num_nodes
    accumulate = accumulate_grad_batches or 1
    if pieces is None:
        num_pieces, reason = num_devices * accumulate, f"{plural(num_devices, 'device')} x {accumulate} accumulated"
    else:
        num_pieces, reason = pieces, f"pieces={pieces}"
        if pieces < num_devices:
            raise UserError(f"pieces={pieces} is fewer than {num_devices} devices: use pieces={num_devices} or more")
        micro_batches = -(-pieces // num_devices)
        if accumulate_grad_batches is not None and not shares and accumulate_grad_batches != micro_batches:
            raise UserError(
                f"pieces={pieces} on {plural(num_devices, 'device')} means accumulate_grad_batches={micro_batches}, "
                f"not {accumulate_grad_batches}: leave one of the two out, or use pieces={num_devices * accumulate}"
            )
    if num_devices == 1:
        strategy, weights = "single", "whole"
    layout = Layout(
        strategy, accelerator, devices, num_nodes, batch_size, num_pieces, exact, shares, weights, one_process
    )
    if num_pieces > layout.max_pieces:
        limit = f"{layout.max_pieces:,} pieces{' with exact=true' * bool(exact)}"
        raise UserError(f"{reason} is too many: a step has at most {limit}")
    if equal_pieces and batch_size % num_pieces:
        raise UserError(
            f"batch_size={batch_size} can't be cut into {num_pieces} equal pieces ({reason}): "
            + _nearest(batch_size, num_pieces, num_devices, layout.max_pieces)
        )
    return layout


def _nearest(batch_size: int, pieces: int, num_devices: int, max_pieces: int) -> str:
    """Return advice with the nearest batch sizes and the next number of pieces that fit."""
    below, above = batch_size // pieces * pieces, -(-batch_size // pieces) * pieces
    sizes = f"use batch_size={below} or {above}" if below else f"use batch_size={above}"
    if batch_size < num_devices:
        return sizes
    near = next((d for d in range(pieces, min(batch_size, max_pieces) + 1) if batch_size % d == 0), batch_size)
    return f"{sizes}, or pieces={near}" if near <= max_pieces else sizes
