"""`strategy=dp` (Lightning dropped it in 2.0)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lockstep.arithmetic.layout import Action
from lockstep.strategies.strategy import RunSettings, Strategy

if TYPE_CHECKING:
    from lockstep.step.batch import MicroBatch


class DP(Strategy):
    """One process that assigns the pieces to several devices.

    Args:
        shares: relative number of pieces of each device; None: equal shares.
    """

    name = "dp"
    one_process = True

    def conflicts(self, config: RunSettings) -> Iterable[tuple[str, str, str]]:
        """Yield `compile=true`."""
        if config.compile:
            yield "compile=true", "strategy=dp", "dp runs the network with copies of its weights; use strategy=ddp"

    def schedule(self, micro_batches: "Sequence[MicroBatch]") -> Iterator[tuple[Action, int]]:
        """Yield the passes of a step's micro-batches in rounds.

        A round has one piece for each device, in rank order: first the forward passes, then the backward passes.
        """
        rounds: list[list[int]] = []
        for number, micro_batch in enumerate(micro_batches):
            if not rounds or micro_batches[rounds[-1][-1]].device >= micro_batch.device:
                rounds.append([])
            rounds[-1].append(number)
        for numbers in rounds:
            yield from ((Action.FORWARD, number) for number in numbers)
            yield from ((Action.BACKWARD, number) for number in numbers)
