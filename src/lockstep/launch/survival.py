"""The parent of a run that survives the loss of workers: it announces a new group to those that are left.

See launch/survivor.py for what they do then.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LostRank
from lockstep.launch.failures import end_hanging_worker
from lockstep.launch.signals import block_signals
from lockstep.launch.survivor import Group
from lockstep.launch.workers import ANSWER_SECONDS, Worker, wait_for_answers


@dataclass
class Survival:
    """How a run survives the loss of workers; see launch/survival.py.

    Attributes:
        arguments: returns the arguments of the work for a number of workers.
        replacements: how many more lost workers are replaced by new ones. After that the run goes on with fewer.
        group: the number of the newest group of workers.
    """

    arguments: Callable[[int], tuple[Any, ...]]
    replacements: int = 0
    group: int = 0


def survive(
    workers: Sequence[Worker],
    survival: Survival,
    start: Callable[[Group], Worker],
    received: Sequence[int],
    hang_timeout: float,
    scratch: str,
) -> list[Worker]:
    """Announce a new group to the other workers whenever some have died, until the run has ended.

    Args:
        workers: those that have been started.
        survival: see `launch`.
        start: starts a worker.
        received: the ending signals that the parent has received.
        hang_timeout: see `launch`.
        scratch: the run's folder for temporary files.

    Returns:
        The workers whose answers decide how the run ends.
    """
    members, devices = list(workers), len(workers)
    while True:
        wait_for_answers(members)
        for each in members:
            if isinstance(each.error, LostRank) and each.error.group < survival.group:  # it has got a new group since
                each.answered, each.error = False, None
        if done := [each for each in members if each.answered and each.error is None]:
            wait_for_answers(members, ANSWER_SECONDS)  # all of them have the result
            return done
        if any(isinstance(each.error, LostRank) for each in members):
            wait_for_answers(members, ANSWER_SECONDS)
            _end_hanging(members, hang_timeout, scratch)
        left = [each for each in members if not each.died]
        # of its own, or a signal's
        ended = any(each.answered and not isinstance(each.error, LostRank) for each in left)
        stopped = received or any(each.died and each.process.exitcode == -signal.SIGTERM for each in members)
        lost = any(isinstance(each.error, LostRank) for each in left)
        if ended or stopped or not left or (lost and len(left) == len(members)):  # or nobody knows who is lost
            return members
        if dead := [each for each in members if each.died]:
            members = _next_group(left, len(dead), survival, start)
            for each in dead:
                note = f"continuing with {len(members)} of {devices} workers"
                print(f"{each.error}; {note}, {survival.replacements} restarts left", file=sys.stderr)


def _end_hanging(members: Sequence[Worker], hang_timeout: float, scratch: str) -> None:
    """End the workers that others have waited for too long.

    One whose timeout came first closes its connections, so others may report a lost connection.
    """
    waited = [each.error for each in members if isinstance(each.error, LostRank) and each.error.timed_out]
    if any(each.died for each in members) or not waited:
        return
    for each in members:
        if not each.answered:
            each.error = end_hanging_worker(each.process, each.rank, scratch, hang_timeout, waited[0].steps)
            each.answered = each.died = True


def _next_group(
    left: Sequence[Worker], dead: int, survival: Survival, start: Callable[[Group], Worker]
) -> list[Worker]:
    """Announce a new group to the workers that are left, with new ones for lost ones. Return its workers.

    Args:
        left: those that are alive.
        dead: the number of lost ones.
        survival: see `launch`.
        start: starts a worker.
    """
    survival.group += 1
    replaced = min(dead, survival.replacements)
    world_size, members = len(left) + replaced, list(left)
    try:
        with block_signals():
            for rank in range(len(left), world_size):
                members.append(start(Group(survival.group, rank, world_size)))
                survival.replacements -= 1
    except OSError as error:
        print(f"no new worker could be started ({error.strerror})", file=sys.stderr)
        survival.replacements = 0
        return _next_group(members, 0, survival, start)
    for rank, worker in enumerate(left):
        worker.rank, worker.answered, worker.error = rank, False, None
        with suppress(OSError):  # it has died in the meantime
            worker.announcements.send(Group(survival.group, rank, world_size))
    return members
