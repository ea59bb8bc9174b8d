"""A run that survives the loss of a worker (`survive=true`): the others form a new group, in the processes that run.

The parent (launch/survival.py) sees that a worker has died, and announces to each of the others the next group: its
number, and the worker's rank in it. Nothing of a step that was under way is used: the work begins again, from the state
in memory that it has put into `Survivor.state`. So no piece can be counted twice.

A rank that waits for a dead one in a collective must notice it. The kernel closes the sockets of a dead process, but
gloo waits for other ranks that are still alive, and its `abort` does nothing. So a thread that reads the announcements
shuts down the sockets of this worker's group: each collective of the group then raises an error.
"""

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lockstep.errors import LostRank, UserError
from lockstep.files import write
from lockstep.launch.environment import environment, export
from lockstep.launch.failures import failure_of_worker, is_lost_rank, stack_on_demand
from lockstep.launch.process_group import broadcast_from_rank_zero
from lockstep.launch.rendezvous import connect_new_store, join_new_group, leave_group, serve_new_store
from lockstep.launch.signals import end_children, record_signal

# An error may come before the announcement of the death that has caused it.
NOTICE_SECONDS = 1.0
MISSING = "a rank did not join the others' new group within {:g} s (hang_timeout)"
POLL_SECONDS = 0.005  # between two looks at which ranks have come to the rendezvous


@dataclass(frozen=True)
class Group:
    """The workers that take part, as the parent announces them to one of these workers.

    Attributes:
        number: 0 for the workers with which the run has begun; each loss makes the next.
        rank: the rank of the worker that gets this.
        world_size: the number of workers.
    """

    number: int
    rank: int
    world_size: int


class GroupReplaced(Exception):
    """The parent has announced another group while this worker joins one."""


class Survivor:
    """This worker of a run that survives the loss of other workers.

    Args:
        group: the first group of this worker.
        announcements: from the parent, for each later `Group`.
        answers: to the parent; see `WorkerPlace`.
        hang_timeout: seconds that a collective waits for all ranks to join; then it fails.
        restarts: how many times the workers were restarted before the group 0.

    Attributes:
        group: the newest group.
        state: what the work needs to begin again; None: nothing yet.
    """

    def __init__(
        self, group: Group, announcements: Connection, answers: Connection, hang_timeout: float, restarts: int
    ) -> None:
        self.group = group
        self.state: dict[str, Any] | None = None
        self._answers, self._hang_timeout, self._restarts = answers, hang_timeout, restarts
        self._changed = threading.Condition()
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
        """Return whether the parent announces another group, because of which an error was raised, or soon after it.

        If this worker has lost a rank and the parent has not, tell the parent and wait: it ends a rank that hangs.
        """
        if self._wait_for_next(group, 0.0 if isinstance(error, UserError) else NOTICE_SECONDS):
            return True
        if not (is_lost_rank(error) or isinstance(error, LostRank)):
            return False
        failure = error if isinstance(error, LostRank) else failure_of_worker(error, self._hang_timeout)
        if isinstance(failure, LostRank):
            failure.group = group.number
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may end this worker now
        self._answers.send((failure, None))
        return self._wait_for_next(group, None)

    def _wait_for_next(self, group: Group, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.group.number > group.number, seconds)

    def _watch(self, announcements: Connection) -> None:
        """Read the announcements. With each, end what waits in a collective of the group before."""
        with suppress(EOFError, OSError):  # the parent has ended
            while True:
                group = announcements.recv()
                with self._changed:
                    self.group = group
                    self._changed.notify_all()
                    present = _sockets()
                    joined = present.keys() - self._others if self._joined is None else self._joined
                    for name in joined & present.keys():
                        _shut_down(name, present[name])

    def _join(self, group: Group) -> None:
        """Join a group, when all of its workers have come.

        Raises:
            GroupReplaced: the parent has announced another one.
            LostRank: a worker has not come.
        """
        export(
            RANK=str(group.rank),
            LOCAL_RANK=str(group.rank),
            WORLD_SIZE=str(group.world_size),
            LOCAL_WORLD_SIZE=str(group.world_size),
            TORCHELASTIC_RESTART_COUNT=str(self._restarts + group.number),
        )
        files = [Path(environment().scratch, f"group_{group.number}_{rank}") for rank in range(group.world_size)]
        store = None if group.rank else serve_new_store()
        write(files[group.rank], str(store.port if store else "").encode())
        until = time.monotonic() + self._hang_timeout
        while not all(file.exists() for file in files):
            if time.monotonic() > until:
                raise LostRank(MISSING.format(self._hang_timeout), group.rank, timed_out=True)
            if self._wait_for_next(group, POLL_SECONDS):
                raise GroupReplaced
        while store is None:
            try:
                store = connect_new_store(int(files[0].read_text()))
            except (OSError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
                if self._wait_for_next(group, POLL_SECONDS):
                    raise GroupReplaced from error
                if time.monotonic() > until:
                    raise LostRank(MISSING.format(self._hang_timeout), group.rank, timed_out=True) from error
        try:
            join_new_group(store, self._hang_timeout)
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
