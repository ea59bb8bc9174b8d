"""A worker process, from its first function to its last: what the elastic agent runs, and what it hands back."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.launch import logs, watchdog
from lockstep.launch.endings import PeerLost
from lockstep.launch.environment import environment, export
from lockstep.launch.group import GROUP_TIMEOUT, join_group, leave_group
from lockstep.launch.processes import end_children, set_parent_death_signal
from lockstep.launch.signals import Interrupted, pending_signals, record_signal
from lockstep.launch.wire import Place

VICTIM_SECONDS = 1  # that a worker which lost another one waits before it fails too: the other one speaks first


class Ended:
    """What a worker returns when a signal ended its run."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def run(work: Callable[..., Any], layout: Layout, args: tuple[Any, ...], parent: int, place: Place | None) -> Any:
    """The first function of a worker process."""
    if place is not None:
        _take(place)
    tempfile.tempdir = None  # its parent's folder goes with the run; kernels that are compiled here are to be kept
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent passes it on
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, record_signal)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until there is something to save: see callbacks.Preemption
    if signal.SIGTERM in pending_signals:  # before this line
        signal.raise_signal(signal.SIGTERM)
    set_parent_death_signal(parent)
    watchdog.join(environment().local_rank)
    try:
        if environment().world_size > 1:
            _all_forked(several=place is not None)
            join_group(layout)
        try:
            with logs.failure_told():
                result = work(*args)
        except Interrupted as interrupted:
            result = Ended(interrupted.code - 128)
        signal.signal(signal.SIGTERM, _leave_soon)
        # Not when it fails: the others' lost connections would be reported before the reason is.
        leave_group()
        return result
    except SystemExit as left:  # with code 0 and no result, the agent would wait for ever
        raise RuntimeError(f"the worker left with exit code {left.code}") from left
    except Refusal as refusal:
        raise Refusal(str(refusal)) from None  # one class name for all kinds: it travels as text
    except Exception as error:
        if not _can_write():  # the message would travel in a file
            print(f"rank {environment().rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        if is_peer_failure(error):
            time.sleep(VICTIM_SECONDS)  # the agent names the first that it sees: let that be the one that was lost
            raise PeerLost("lost the connection to another worker") from error
        raise
    finally:
        watchdog.leave()
        end_children()


def _take(place: Place) -> None:
    """A worker's rank among those of all machines, for whoever asks the environment; its agent knows this one's."""
    export(
        RANK=str(place.machine * place.devices + environment().local_rank),
        WORLD_SIZE=str(place.machines * place.devices),
        GROUP_RANK=str(place.machine),
        GROUP_WORLD_SIZE=str(place.machines),
        MASTER_ADDR=place.address,
        MASTER_PORT=str(place.port),
    )


def _leave_soon(signum: int, frame: FrameType | None) -> None:
    """The handler of a worker that is done: it ends as soon as the agent has taken its result; or in a moment, if the
    agent asks because another worker was lost meanwhile."""
    timer = threading.Timer(VICTIM_SECONDS, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _can_write() -> bool:
    """Whether a message of some length could be left in a file."""
    try:
        with tempfile.TemporaryFile(dir=environment().scratch) as file:
            file.write(bytes(1 << 16))
    except OSError:
        return False
    return True


def is_peer_failure(error: BaseException) -> bool:
    """Whether a worker failed only because it lost the connection to another one."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "onnection" in str(error))


def _all_forked(several: bool) -> None:
    """Waits until all workers of this machine run, and of several machines those of the one that keeps the run. Until
    then a parent forks, and none may connect to its store: the store's thread looks up the name of who connects, and a
    worker forked in that moment inherits glibc's resolver locked, for ever (loops of 80 to 150 starts of 8 workers
    hung, 3 of 3; with this, none in 200 starts)."""
    gate = watchdog.gate()
    (gate / str(os.getpid())).touch()
    deadline = time.monotonic() + GROUP_TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        if (gate / watchdog.OPEN).exists() if several else watchdog.forked() >= environment().local_world_size:
            return
        time.sleep(0.005)
