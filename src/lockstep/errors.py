"""The errors that end a command: bad input, a bad gradient, a failed worker, failed jobs. Standard library only."""


class UserError(Exception):
    """Bad input. The message is one line: `what is wrong: what would be right`.

    Attributes:
        steps: optimizer steps that the run had taken since it was started.
    """

    steps = 0


class StepRefused(UserError):
    """Bad input that a rank met in a step. Other ranks may not meet it, and then they wait for this one."""


class NonFinite(Exception):
    """The gradient of a step is not finite. The message names the step and the samples."""


class WorkerFailed(Exception):
    """A worker failed or died. The message names the rank and the reason in one line.

    Args:
        message: the message.
        local_rank: the rank on its machine of the worker, or the number of the device, that the message is about; None
            in a worker: it is about this one.
        steps: optimizer steps that the worker has completed; 0 if it could not report them.

    Attributes:
        may_restart: whether the workers may be restarted: not after a signal that asked the run to end, for example.
    """

    may_restart = True

    def __init__(self, message: str, local_rank: int | None = None, steps: int = 0) -> None:
        super().__init__(message)
        self.local_rank = local_rank
        self.steps = steps


class LostRank(WorkerFailed):
    """A worker failed only because another rank was lost or hangs. That rank, or the parent, reports the reason.

    Args:
        message, local_rank, steps: as in `WorkerFailed`.
        timed_out: whether the other rank did not join a collective in time. Otherwise the connection to it was lost.
        in_user_code: whether the collective was called by the user's own code, which the message names.

    Attributes:
        group: the number of the group of workers that has lost a rank, see `lockstep.launch.survivor`.
    """

    group = 0

    def __init__(
        self,
        message: str,
        local_rank: int | None = None,
        steps: int = 0,
        timed_out: bool = False,
        in_user_code: bool = False,
    ) -> None:
        super().__init__(message, local_rank, steps)
        self.timed_out = timed_out
        self.in_user_code = in_user_code


class SweepFailed(Exception):
    """Some jobs of a sweep failed, and the others completed."""
