"""Who watches the workers of a run that survives their loss: it announces a new group to those that are left.

Our own parent does so, or a keeper (launch/keeper.py). See launch/survivor.py for what the workers do then.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LostRank
from lockstep.launch.signals import block_signals
from lockstep.launch.survivor import Group
from lockstep.launch.workers import ANSWER_SECONDS, Worker, wait_for_answers


@dataclass
class Survival:
    """How a run survives the loss of workers; see launch/survival.py.

    Attributes:
        arguments: returns the arguments of the work for a number of workers, in a worker; None: not in this process.
        replacements: how many more lost workers are replaced by new ones. After that the run goes on with fewer.
        group: the number of the newest group of workers.
    """

    arguments: Callable[[int], tuple[Any, ...]] | None = None
    replacements: int = 0
    group: int = 0


def survive(
    workers: Sequence[Worker],
    survival: Survival,
    start: Callable[[Group], Worker] | None,
    received: Sequence[int],
    hang_timeout: float,
    scratch: str,
) -> list[Worker]:
    """Announce a new group to the other workers whenever some have died, until the run has ended.

    Args:
        workers: those that have been started.
        survival: see `launch`.
        start: starts a worker; None: nobody can.
        received: the ending signals that the parent has received.
        hang_timeout: see `launch`.
        scratch: the run's folder for temporary files.

    Returns:
        The workers whose answers decide how the run ends.
    """
    members, devices = list(workers), len(workers)
    while True:
        wait_for_answers(members)
        if all(each.arrival for each in members):
            _let_join(members)
            continue
        if done := [each for each in members if each.answered and each.error is None]:
            wait_for_answers(members, ANSWER_SECONDS)  # all of them have the result
            return done
        if any(isinstance(each.error, LostRank) for each in members):
            wait_for_answers(members, ANSWER_SECONDS)
            _end_hanging(members, hang_timeout, scratch)
        left = [each for each in members if not each.died]
        # of its own, or a signal's
        ended = any(each.answered and not isinstance(each.error, LostRank) for each in left)
        stopped = received or any(each.ended_by_sigterm() for each in members)
        lost = any(isinstance(each.error, LostRank) for each in left)
        if ended or stopped or not left or (lost and len(left) == len(members)):  # or nobody knows who is lost
            return members
        if dead := [each for each in members if each.died]:
            members = _next_group(left, len(dead), survival, start)
            for each in dead:
                note = f"continuing with {len(members)} of {devices} workers"
                note += f", {survival.replacements} restarts left" * (start is not None)
                with suppress(OSError):  # nobody reads it any more
                    print(f"{each.error}; {note}", file=sys.stderr, flush=True)


def _end_hanging(members: Sequence[Worker], hang_timeout: float, scratch: str) -> None:
    """End the workers that others have waited for too long.

    One whose timeout came first closes its connections, so others may report a lost connection.
    """
    waited = [each.error for each in members if isinstance(each.error, LostRank) and each.error.timed_out]
    if any(each.died for each in members) or not waited:
        return
    for each in members:
        if not each.answered:
            each.error = each.end_hanging(scratch, hang_timeout, waited[0].steps)
            each.answered = each.died = True


def _let_join(members: Sequence[Worker]) -> None:
    """Announce where rank zero's store is to the workers of a group, which all have come."""
    store = next(each.arrival.store for each in members if each.arrival and each.arrival.store)
    for each in members:
        _announce(each, Group(each.group, each.rank, len(members), store))


def _announce(worker: Worker, group: Group) -> None:
    worker.rank, worker.group, worker.arrival = group.rank, group.number, None
    with suppress(OSError):  # it has died in the meantime
        worker.announcements.send(group)


def _next_group(
    left: Sequence[Worker], dead: int, survival: Survival, start: Callable[[Group], Worker] | None
) -> list[Worker]:
    """Announce a new group to the workers that are left, with new ones for lost ones. Return its workers.

    Args:
        left: those that are alive.
        dead: the number of lost ones.
        survival: see `launch`.
        start: starts a worker; None: nobody can.
    """
    survival.group += 1
    replaced = min(dead, survival.replacements) if start else 0
    world_size, members = len(left) + replaced, list(left)
    try:
        with block_signals():
            for rank in range(len(left), world_size):
                assert start
                members.append(start(Group(survival.group, rank, world_size)))
                survival.replacements -= 1
    except OSError as error:
        print(f"no new worker could be started ({error.strerror})", file=sys.stderr)
        survival.replacements = 0
        return _next_group(members, 0, survival, start)
    for rank, worker in enumerate(left):
        worker.answered, worker.error = False, None
        _announce(worker, Group(survival.group, rank, world_size))
    return members
