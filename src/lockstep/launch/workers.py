"""The parent's records of its workers, and how it waits for their answers."""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.errors import LostRank, UserError, WorkerFailed
from lockstep.text import signal_name

ANSWER_SECONDS = 3.0  # after a timeout, for the other workers' answers
NCCL_HINT = "its message is above; a rank without one is the lost one"


@dataclass
class Worker:
    """The parent's record of a worker."""

    rank: int
    process: Any
    receiver: Connection
    uses_nccl: bool = False
    announcements: Any = None  # a connection to the worker, for each new group of a run that survives
    answered: bool = False  # whether the worker has sent how it ended, or has died
    died: bool = False  # whether it has died without sending anything
    error: BaseException | None = None  # the error that ended the work; None if it succeeded
    result: Any = None  # the return value of the work

    def receive_answer(self) -> None:
        """Read the worker's answer if it has sent one. Create the answer if the worker died without one."""
        alive = self.process.is_alive()  # before poll(): if the worker is dead by now, all that it sent is in the pipe
        with suppress(EOFError):
            if self.receiver.poll():
                self.error, self.result = self.receiver.recv()
                self.answered = True
        if alive or self.answered:
            return
        code = self.process.exitcode
        text = f"was killed by {signal_name(-code)}" if code < 0 else f"failed: exit code {code}"
        text += " (out of memory?)" * (code == -signal.SIGKILL)  # the kernel's out-of-memory killer leaves no message
        failure: type[WorkerFailed] = WorkerFailed
        if self.uses_nccl and code == -signal.SIGABRT:
            # Where gloo raises an error, NCCL's watchdog aborts the process: after a timeout, or if a rank is lost. It
            # does so in torch's old backend and, since torch 2.15, in nccl2, unless TORCH_NCCL_ASYNC_ERROR_HANDLING is
            # 0 or 2. The old one's message names the collective.
            failure = LostRank
            text += f" (NCCL does so if another rank is lost or does not join within hang_timeout): {NCCL_HINT}"
        self.answered, self.died, self.error = True, True, failure(f"rank {self.rank} {text}", self.rank)


def wait_for_answers(workers: Sequence[Worker], seconds: float | None = None) -> None:
    """Wait until all workers have answered or one has failed; with `seconds`, until all have answered or time is up."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while working := [each for each in workers if not each.answered]:
        wait([each.receiver for each in working] + [each.process.sentinel for each in working], timeout=0.5)
        for each in working:
            each.receive_answer()
        time_is_up = deadline is not None and time.monotonic() > deadline
        failed = any(isinstance(each.error, UserError | WorkerFailed) for each in workers)
        if time_is_up or (failed and deadline is None):
            return
