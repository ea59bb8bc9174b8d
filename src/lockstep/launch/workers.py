"""The records that a parent, or a keeper, has of its workers, and how it waits for their answers."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.errors import LostRank, UserError, WorkerFailed
from lockstep.launch.failures import end_hanging_worker
from lockstep.launch.survivor import Arrival
from lockstep.text import signal_name

ANSWER_SECONDS = 3.0  # after a timeout, for the other workers' answers
NCCL_HINT = "its message is above; a rank without one is the lost one"


@dataclass
class Worker:
    """The record of a worker that our own parent has started."""

    rank: int
    process: Any  # None: an engine has started it, see launch/keeper.py
    receiver: Connection
    uses_nccl: bool = False
    announcements: Any = None  # a connection to the worker, for each new group of a run that survives
    group: int = 0  # the number of the newest one
    arrival: Arrival | None = None  # the worker's message that it waits for the others of this group
    answered: bool = False  # whether the worker has sent how it ended, or has died
    died: bool = False  # whether it has died without sending anything
    error: BaseException | None = None  # the error that ended the work; None if it succeeded
    result: Any = None  # the return value of the work

    def sources(self) -> list[Any]:
        """Return what becomes ready when the worker has sent something or has died."""
        return [self.receiver, self.process.sentinel]

    def is_alive(self) -> bool:
        """Check whether the worker is alive."""
        return bool(self.process.is_alive())

    def ended_by_sigterm(self) -> bool:
        """Check whether a SIGTERM has killed the worker."""
        return self.died and self.process.exitcode == -signal.SIGTERM

    def end_hanging(self, scratch: str, hang_timeout: float, steps: int) -> WorkerFailed:
        """Kill the worker, for which others have waited too long; see `end_hanging_worker`."""
        return end_hanging_worker(self.process, self.rank, scratch, hang_timeout, steps)

    def receive_answer(self) -> None:
        """Read what the worker has sent. Create its answer if it died without one."""
        alive = self.is_alive()  # before poll(): if the worker is dead by now, all that it sent is in the pipe
        try:
            while not self.answered and self.receiver.poll():
                self._take(self.receiver.recv())
        except (EOFError, OSError):
            alive = alive and self.process is not None
        if not (alive or self.answered):
            self.answered, self.died, self.error = True, True, self.death()

    def _take(self, message: Any) -> None:
        """Keep a message, unless it is of a group before the newest one."""
        if isinstance(message, Arrival):
            self.arrival = message if message.number == self.group else self.arrival
            return
        error, result = message
        if not (isinstance(error, LostRank) and error.group < self.group):
            self.answered, self.error, self.result = True, error, result

    def death(self) -> WorkerFailed:
        """Return the error of a worker that has died."""
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
        return failure(f"rank {self.rank} {text}", self.rank)


def wait_for_answers(workers: Sequence[Worker], seconds: float | None = None) -> None:
    """Wait until all workers have answered, or wait for one another, or one has failed.

    With `seconds`, wait until all have answered or time is up.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while working := [each for each in workers if not each.answered]:
        wait([source for each in working for source in each.sources()], timeout=0.5)
        for each in working:
            each.receive_answer()
        time_is_up = deadline is not None and time.monotonic() > deadline
        failed = any(isinstance(each.error, UserError | WorkerFailed) for each in workers)
        wait_for_one_another = all(each.arrival for each in workers)
        if time_is_up or ((failed or wait_for_one_another) and deadline is None):
            return
