"""A run that survives the loss of a worker (`survive=true`): the others form a new group, in the processes that run.

Who watches the workers (launch/survival.py) sees that one has died, and announces to each of the others the next group:
its number, and the worker's rank in it. That is our own parent, or a process of its own where an engine has started
the workers (launch/keeper.py). Nothing of a step that was under way is used: the work begins again, from the state in
memory that it has put into `Survivor.state`. So no piece can be counted twice.

A rank that waits for a dead one in a collective must notice it. The kernel closes the sockets of a dead process, but
gloo waits for other ranks that are still alive, and its `abort` does nothing. So a thread that reads the announcements
shuts down the sockets of this worker's group: each collective of the group then raises an error.
"""

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lockstep.errors import LostRank, UserError
from lockstep.launch.environment import export
from lockstep.launch.failures import failure_of_worker, is_lost_rank, stack_on_demand
from lockstep.launch.process_group import broadcast_from_rank_zero
from lockstep.launch.rendezvous import LOOPBACK, connect_new_store, join_new_group, leave_group, serve_new_store
from lockstep.launch.signals import end_children, record_signal

# An error may come before the announcement of the death that has caused it.
NOTICE_SECONDS = 1.0
MISSING = "a rank did not join the others' new group within {:g} s (hang_timeout)"
LEFT_OUT = "this rank did not join the others within hang_timeout, and they go on without it"
RETRY_SECONDS = 0.005  # between two attempts to reach the store of a group


@dataclass(frozen=True)
class Group:
    """The workers that take part, as they are announced to one of them.

    It is announced twice: when the group before has lost a worker, and when all have answered with an `Arrival`.

    Attributes:
        number: 0 for the workers with which the run has begun; each loss makes the next.
        rank: the rank of the worker that gets this.
        world_size: the number of workers.
        store: host and port of rank zero's store; empty: not all workers have come yet.
    """

    number: int
    rank: int
    world_size: int
    store: str = ""


@dataclass(frozen=True)
class Arrival:
    """A worker's message that it has left the group before, and waits for the others.

    Attributes:
        number: of the group.
        store: host and port of the store that this worker serves; empty: it is not rank zero.
    """

    number: int
    store: str


class GroupReplaced(Exception):
    """Another group was announced while this worker joins one."""


class Survivor:
    """This worker of a run that survives the loss of other workers.

    Args:
        group: the first group of this worker.
        announcements: for each `Group` that is announced; None: the others go on without this worker.
        answers: for each `Arrival`, and for `(error, result)`; see `WorkerPlace`.
        hang_timeout: seconds that a collective waits for all ranks to join; then it fails.
        restarts: how many times the workers were restarted before the group 0.
        address: of this machine, for the others.

    Attributes:
        group: the newest group.
        state: what the work needs to begin again; None: nothing yet.
    """

    def __init__(
        self,
        group: Group,
        announcements: Connection,
        answers: Connection,
        hang_timeout: float,
        restarts: int,
        address: str = LOOPBACK,
    ) -> None:
        self.group = group
        self.state: dict[str, Any] | None = None
        self._answers, self._hang_timeout, self._restarts, self._address = answers, hang_timeout, restarts, address
        self._changed = threading.Condition()
        self._unwatched = False  # nobody announces a group any more
        self._others = _sockets().keys()  # sockets that are not those of a group
        self._joined: set[str] | None = None  # the sockets of the group; None: it is being joined
        threading.Thread(target=self._watch, args=(announcements,), name="announcements", daemon=True).start()

    def call(self, work: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]]) -> Any:
        """Call a function until it has returned on all ranks of a group. Return rank zero's result.

        Args:
            work: the function.
            arguments: returns its arguments for a number of workers.
        """
        while True:
            group = self.group
            try:
                with stack_on_demand(group.rank):
                    self._join(group)
                    return broadcast_from_rank_zero(work(*arguments(group.world_size)))
            except Exception as error:
                if not self._is_replaced(group, error):
                    raise
            self._leave()  # here, since the error's traceback refers to what the work has made

    def _is_replaced(self, group: Group, error: Exception) -> bool:
        """Return whether another group is announced, because of which an error was raised, or soon after it.

        If this worker has lost a rank and no death was seen, answer so and wait: a rank that hangs is ended.
        """
        if self._wait_for_next(group, 0.0 if isinstance(error, UserError) else NOTICE_SECONDS):
            return True
        if not (is_lost_rank(error) or isinstance(error, LostRank)):
            return False
        failure = error if isinstance(error, LostRank) else failure_of_worker(error, self._hang_timeout)
        if isinstance(failure, LostRank):
            failure.group = group.number
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may end this worker now
        with suppress(OSError):  # nobody reads the answer any more
            self._answers.send((failure, None))
        return self._wait_for_next(group, None)

    def _wait_for_next(self, group: Group, seconds: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._unwatched or self.group.number > group.number, seconds)
            return self.group.number > group.number

    def _watch(self, announcements: Connection) -> None:
        """Read the announcements. With each new group, end what waits in a collective of the group before."""
        with suppress(EOFError, OSError):  # who announces them has ended
            while group := announcements.recv():
                with self._changed:
                    is_new, self.group = group.number > self.group.number, group
                    self._changed.notify_all()
                    present = _sockets() if is_new else {}
                    joined = present.keys() - self._others if self._joined is None else self._joined
                    for name in joined & present.keys():
                        _shut_down(name, present[name])
            print(f"error: {LEFT_OUT}", file=sys.stderr, flush=True)
            os._exit(1)  # at once: the others may write what this worker writes
        with self._changed:
            self._unwatched = True
            self._changed.notify_all()

    def _join(self, group: Group) -> None:
        """Join a group, when all of its workers have come.

        Raises:
            GroupReplaced: another one was announced.
            LostRank: a worker has not come.
        """
        export(
            RANK=str(group.rank),
            WORLD_SIZE=str(group.world_size),
            TORCHELASTIC_RESTART_COUNT=str(self._restarts + group.number),
        )
        missing = LostRank(MISSING.format(self._hang_timeout), group.rank, timed_out=True)
        store = None if group.rank else serve_new_store(self._address)
        with suppress(OSError):  # as in `_is_replaced`
            self._answers.send(Arrival(group.number, f"{self._address}:{store.port}" if store else ""))
        until = time.monotonic() + self._hang_timeout
        with self._changed:
            self._changed.wait_for(lambda: self._unwatched or self.group != group, self._hang_timeout)
            place = self.group
        if place.number > group.number:
            raise GroupReplaced
        if place == group:
            raise missing
        address, _, port = place.store.rpartition(":")
        while store is None:
            try:
                store = connect_new_store(address, int(port))
            except (OSError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
                if self._wait_for_next(group, RETRY_SECONDS):
                    raise GroupReplaced from error
                if time.monotonic() > until:
                    raise missing from error
        try:
            join_new_group(store, address, self._hang_timeout)
        except RuntimeError as error:
            raise LostRank(f"{MISSING.format(self._hang_timeout)} ({error})", group.rank, timed_out=True) from error
        with self._changed:
            self._joined = _sockets().keys() - self._others
            if self.group.number > group.number:
                raise GroupReplaced

    def _leave(self) -> None:
        """Leave the group, and free what the work has made."""
        from lockstep.launch.torch_versions import forget_failed_group

        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as at a worker's start
        signal.signal(signal.SIGUSR1, record_signal)
        leave_group()
        forget_failed_group()
        end_children()
        gc.collect()
        with self._changed:
            self._others, self._joined = _sockets().keys(), None


_survivor: Survivor | None = None


def survivor() -> Survivor | None:
    """Return this worker's `Survivor`; None: its run ends with the loss of a worker, or is restarted."""
    return _survivor


def become_survivor(worker: Survivor) -> Survivor:
    """Let `survivor` return a worker's `Survivor` from now on, which is returned."""
    global _survivor
    _survivor = worker
    return worker


def _sockets() -> dict[str, int]:
    """Return the file descriptors of this process's sockets, by the sockets' names in /proc; see proc(5)."""
    sockets = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is closed by now
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                sockets[name] = int(descriptor)
    return sockets


def _shut_down(name: str, descriptor: int) -> None:
    """End a connection at both ends, also while a thread reads from it. Do nothing with a socket that listens.

    Its owner may close the descriptor at any time, and the number may become another socket's. So use a duplicate, of
    the socket of this name only.
    """
    with suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.getpeername()  # raises an error for one that listens
        if os.readlink(f"/proc/self/fd/{connection.fileno()}") == name:
            connection.shutdown(socket.SHUT_RDWR)
