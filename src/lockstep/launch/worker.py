"""A worker process, from its first function to its last: what a parent starts, and what it hands back."""

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
from lockstep.launch.environment import LAUNCHER, environment, export
from lockstep.launch.network import LOOPBACK
from lockstep.launch.outcomes import Outcome, WorkerFailed, first_line, outcome_of, user_code_location
from lockstep.launch.process_group import is_lost_rank, is_timeout, join_group, leave_group, missing_ranks_message
from lockstep.launch.signals import Interrupted, end_children, record_signal, set_parent_death_signal, unblock_signals

VICTIM_SECONDS = 1  # that a worker which lost another one waits before it fails too: the other one speaks first


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's part in a run, from its parent."""

    rank: int
    layout: Layout
    hang_timeout: float  # seconds after which a collective that a rank does not join fails
    restarts: int  # times that the workers were started before
    parent: int  # its process id
    listener: socket.socket  # where rank zero serves the store
    answers: Connection


@dataclass
class WorkerResult:
    """What a worker sends to its parent at its end."""

    outcome: Outcome
    result: Any = None  # what the work returned
    trace: str = ""  # the traceback of a failure


def run_worker(work: Callable[..., Any], args: tuple[Any, ...], place: WorkerPlace) -> None:
    """The first function of a worker process."""
    faulthandler.enable(2)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):  # they may reach all processes at once; the parent
        signal.signal(signum, signal.SIG_IGN)  # passes them on
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # a program around the run may log it
    signal.signal(signal.SIGUSR1, record_signal)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until there is something to save: see callbacks.Preemption
    unblock_signals()
    set_parent_death_signal(place.parent)
    export(  # as torchrun does
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.layout.world_size),
        LOCAL_WORLD_SIZE=str(place.layout.world_size),
        GROUP_RANK="0",
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(place.listener.getsockname()[1]),
        TORCHELASTIC_RUN_ID="lockstep",
        TORCHELASTIC_RESTART_COUNT=str(place.restarts),
        **{LAUNCHER: "lockstep"},
    )
    answer = WorkerResult(Outcome("completed"))
    try:
        with logs.stack_on_demand(place.rank):
            if place.layout.has_group:
                join_group(place.layout, place.listener, place.hang_timeout)
            try:
                with logs.log_failure():
                    answer.result = work(*args)
            except Interrupted as interrupted:
                answer.outcome = outcome_of(interrupted)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is done but to say so
            # Not when it fails: the others' lost connections would be reported before the reason is.
            leave_group()
    except (Exception, SystemExit) as error:
        answer = _failure(error, place.hang_timeout)
    end_children()
    place.answers.send(answer)


def _failure(error: BaseException, hang_timeout: float) -> WorkerResult:
    if isinstance(error, UserError):
        return WorkerResult(Outcome("refused", first_line(str(error)).removeprefix("UserError: ")))
    steps = getattr(error, "steps", 0)
    if is_lost_rank(error):
        if is_timeout(error):
            return WorkerResult(Outcome("waited", missing_ranks_message([], hang_timeout), steps=steps))
        time.sleep(VICTIM_SECONDS)
        return WorkerResult(Outcome("victim", "lost the connection to another worker", steps=steps))
    if isinstance(error, WorkerFailed):  # which names the worker
        return WorkerResult(outcome_of(error))
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"the worker left with exit code {error.code}"
    trace = traceback.format_exc()
    where = f"{user_code_location(trace)}traceback in {logs.log_file_name(environment().rank)}"
    return WorkerResult(Outcome("failed", f"failed: {first_line(message)} ({where})", steps=steps), trace=trace)
