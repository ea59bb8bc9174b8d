"""The errors that end a command: bad input, a failed worker, failed jobs of a sweep. Standard library only."""

from typing import Any


class UserError(Exception):
    """Bad input. The message is one line: `what is wrong: what would be right`."""


class WorkerFailed(Exception):
    """A worker failed or died. The message names the rank and the reason in one line.

    Args:
        message: the message.
        facts: the values of attributes, by name.

    Attributes:
        steps: completed optimizer steps, the largest count that a worker reported.
        local_rank: the worker's rank on its machine.
        signum: the number of the signal that killed it; 0 if none did.
        waited_for_rank: whether it failed only because another worker did not join a collective.
        victim: whether it failed only because another worker was lost, which reports the reason.
        suspects: ranks of which one computed wrong values; none of them may continue.
        last_good_step: the last step that is known to be free of such values.
    """

    steps = 0
    local_rank = 0
    signum = 0
    waited_for_rank = False
    victim = False
    suspects: tuple[int, ...] = ()
    last_good_step = 0

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        vars(self).update(facts)


class SweepFailed(Exception):
    """Some jobs of a sweep failed, and the others completed."""
