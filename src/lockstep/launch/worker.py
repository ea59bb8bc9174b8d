"""A worker process, from its first function to its last: what a parent starts, and what it hands back."""

import faulthandler
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.launch import logs, watchdog
from lockstep.launch.endings import Outcome, WorkerFailed, outcome_of, own_words, users_line
from lockstep.launch.environment import environment, export
from lockstep.launch.group import has_group, join_group, leave_group
from lockstep.launch.signals import Interrupted, end_children, let_in, record_signal, set_parent_death_signal
from lockstep.launch.wire import Place

VICTIM_SECONDS = 1  # that a worker which lost another one waits before it fails too: the other one speaks first


@dataclass
class Answer:
    """What a worker tells its parent at its end."""

    outcome: Outcome
    result: Any = None  # what the work returned
    trace: str = ""  # the traceback of a failure


def run(
    work: Callable[..., Any],
    args: tuple[Any, ...],
    layout: Layout,
    place: Place,
    local_rank: int,
    parent: int,
    answers: Connection,
) -> None:
    """The first function of a worker process."""
    faulthandler.enable(2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent passes it on
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # likewise, when the terminal is closed
    signal.signal(signal.SIGUSR1, record_signal)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until there is something to save: see callbacks.Preemption
    let_in()
    set_parent_death_signal(parent)
    export(  # as torchrun does
        RANK=str(place.machine * place.workers + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(place.machines * place.workers),
        LOCAL_WORLD_SIZE=str(place.workers),
        GROUP_RANK=str(place.machine),
        MASTER_ADDR=place.address,
        MASTER_PORT=str(place.port),
        TORCHELASTIC_RUN_ID="lockstep",
        TORCHELASTIC_RESTART_COUNT=str(place.restarts),
    )
    answer = Answer(Outcome("completed"))
    try:
        watchdog.join(local_rank)
        if has_group(layout):
            join_group(layout)
        try:
            with logs.failure_told():
                answer.result = work(*args)
        except Interrupted as interrupted:
            answer.outcome = outcome_of(interrupted)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is done but to say so
        # Not when it fails: the others' lost connections would be reported before the reason is.
        leave_group()
    except (Exception, SystemExit) as error:
        answer = _failure(error)
    watchdog.leave()
    end_children()
    answers.send(answer)


def _failure(error: BaseException) -> Answer:
    if isinstance(error, Refusal):
        return Answer(Outcome("refused", own_words(str(error)).removeprefix("Refusal: ")))
    if is_peer_failure(error):
        time.sleep(VICTIM_SECONDS)
        return Answer(Outcome("victim", "lost the connection to another worker"))
    if isinstance(error, WorkerFailed):  # which names the worker
        return Answer(outcome_of(error))
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        said = f"the worker left with exit code {error.code}"
    trace = traceback.format_exc()
    where = f"{users_line(trace)}traceback in {logs.file_of(environment().rank)}"
    return Answer(Outcome("failed", f"failed: {own_words(said)} ({where})"), trace=trace)


def is_peer_failure(error: BaseException) -> bool:
    """Whether a worker failed only because it lost the connection to another one."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "onnection" in str(error))
