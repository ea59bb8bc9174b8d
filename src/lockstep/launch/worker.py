"""The worker process that a parent starts: its entry point, and the error that it sends back."""

import faulthandler
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError
from lockstep.launch import logs
from lockstep.launch.environment import LAUNCHER_VARIABLE, environment, export
from lockstep.launch.network import LOOPBACK
from lockstep.launch.outcomes import WorkerFailed, first_line, user_code_location
from lockstep.launch.process_group import is_lost_rank, is_timeout, join_group, leave_group, missing_ranks_message
from lockstep.launch.signals import Interrupted, end_children, record_signal, set_parent_death_signal, unblock_signals

VICTIM_SECONDS = 1  # a worker reports a lost connection after this delay, so that the failed worker reports first


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's place in a run, as its parent assigns it."""

    rank: int
    layout: Layout
    hang_timeout: float  # seconds that a collective waits for all ranks to join; then it fails
    restarts: int  # how many times the workers were restarted
    parent: int  # process id of the parent
    listener: socket.socket  # the listening socket of rank zero's store
    answers: Connection  # to the parent, for one message: the error that ended the work, or None, and its result


def run_worker(work: Callable[..., Any], args: tuple[Any, ...], place: WorkerPlace) -> None:
    """Run `work(*args)` in a worker process, and send the parent the error that ended it, or None, and its result."""
    faulthandler.enable(2)
    # A terminal sends these to all processes. The parent forwards them, so workers ignore them.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # the parent may have inherited a handler from an outer program
    signal.signal(signal.SIGUSR1, record_signal)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until there is something to save: see callbacks.Preemption
    unblock_signals()
    set_parent_death_signal(place.parent)
    export(  # the variables that torchrun sets
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.layout.world_size),
        LOCAL_WORLD_SIZE=str(place.layout.world_size),
        GROUP_RANK="0",
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(place.listener.getsockname()[1]),
        TORCHELASTIC_RUN_ID="lockstep",
        TORCHELASTIC_RESTART_COUNT=str(place.restarts),
        **{LAUNCHER_VARIABLE: "lockstep"},
    )
    error: BaseException | None = None
    result = None
    try:
        with logs.stack_on_demand(place.rank):
            if place.layout.has_process_group:
                join_group(place.layout, place.listener, place.hang_timeout)
            try:
                with logs.log_failure():
                    result = work(*args)
            except Interrupted as interrupted:
                error = Interrupted(interrupted.signum)  # without the traceback, which keeps the work's objects alive
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the work is done; only the result is still to be sent
            # A failed worker stays in the group: otherwise other workers report lost connections before its reason.
            leave_group()
    except (Exception, SystemExit) as failure:
        error = _failure(failure, place.hang_timeout)
    end_children()
    place.answers.send((error, result))


def _failure(error: BaseException, hang_timeout: float) -> UserError | WorkerFailed:
    """Return the error that a worker sends to its parent. It is picklable, whatever `error` is."""
    if isinstance(error, UserError):
        return UserError(first_line(str(error)).removeprefix("UserError: "))
    steps = getattr(error, "steps", 0)
    if is_lost_rank(error):
        if is_timeout(error):
            return WorkerFailed(missing_ranks_message([], hang_timeout), steps=steps, waited=True)
        time.sleep(VICTIM_SECONDS)
        return WorkerFailed("lost the connection to another worker", steps=steps, victim=True)
    if isinstance(error, WorkerFailed):  # its message already names the worker
        return WorkerFailed(str(error), steps=steps, suspects=error.suspects, last_good_step=error.last_good_step)
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"the worker called exit with code {error.code}"
    trace = traceback.format_exc()
    where = f"{user_code_location(trace)}traceback in {logs.log_file_name(environment().rank)}"
    failed = WorkerFailed(f"failed: {first_line(message)} ({where})", steps=steps)
    failed.add_note(trace)
    return failed
