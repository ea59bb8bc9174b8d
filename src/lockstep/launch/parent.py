"""The parent process: it starts the worker processes that a layout needs, and they run a function.

The first part of this file runs in the parent, the second part in a worker, before and after the function.

Every run happens in workers, also on one device. The parent only composes, checks and launches. Its main thread never
runs a parallel operation or touches CUDA, so it may fork. User code that opens data may start parallel operations, so
it runs in a second thread, which ends before the fork (launch/process_lifetime.py). A forked worker starts in a
fraction of a second with everything imported.

Serving the store of the process group takes a thread, and the parent may have only its main thread while it forks, so
rank zero serves the store. When one worker dies, the parent ends all of them, or lets the others go on (survival.py).
If an engine (torchrun, SLURM, MPI) has started the workers already (launch/environment.py), the function runs in this
process.
"""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from lockstep import standard_streams
from lockstep.arithmetic.layout import Layout
from lockstep.errors import LostRank, UserError, WorkerFailed
from lockstep.launch import breakpoints
from lockstep.launch.environment import LAUNCHER_VARIABLE, SCRATCH, environment, export, external_workers
from lockstep.launch.failures import (
    failure_of_worker,
    is_lost_rank,
    lost_rank_failure,
    stack_on_demand,
)
from lockstep.launch.keeper import call_with_keeper
from lockstep.launch.logs import log_failure
from lockstep.launch.process_lifetime import freeze_imports, refuse_daemon, scratch_folder
from lockstep.launch.rendezvous import LOOPBACK, join_external, join_group, leave_group, open_store_socket
from lockstep.launch.signals import (
    Interrupted,
    block_signals,
    end_children,
    forward_signals,
    record_signal,
    set_parent_death_signal,
    signal_children,
    unblock_signals,
)
from lockstep.launch.survival import Survival, survive
from lockstep.launch.survivor import Group, Survivor, become_survivor
from lockstep.launch.workers import ANSWER_SECONDS, Worker, wait_for_answers

GRACE_SECONDS = 5  # between SIGTERM and SIGKILL


def launch(
    work: Callable[..., Any],
    *args: Any,
    layout: Layout,
    hang_timeout: float = 300.0,
    restarts: int = 0,
    survival: Survival | None = None,
) -> Any:
    """Call `work(*args)` in every worker of this machine and return rank zero's result.

    Args:
        work: a function that a worker can import; its result must be picklable.
        args: positional arguments of `work`.
        layout: it has the number of workers.
        hang_timeout: seconds that a collective waits for all workers to join; then the run ends.
        restarts: how many times the workers were restarted.
        survival: how the run survives the loss of workers; None: it ends.

    Raises:
        UserError: a worker refused its input, or an engine has started another number of workers than the layout has.
        WorkerFailed: a worker failed or died.
        Interrupted: a signal ended the run; its checkpoint is saved.
    """
    freeze_imports()
    if external_workers():
        return _run_in_external_worker(work, args, layout, hang_timeout, survival)
    refuse_daemon("Lockstep", "start it in another one")
    context: Any = multiprocessing.get_context(start_method())
    workers: list[Worker] = []
    with forward_signals() as received, scratch_folder() as scratch, open_store_socket() as listener:

        def start(group: Group) -> Worker:
            receiver, sender = context.Pipe(duplex=False)
            orders, announcements = context.Pipe(duplex=False) if survival else (None, None)
            here = group, layout, hang_timeout, restarts, os.getpid(), scratch, listener, sender
            place = WorkerPlace(*here, orders, survival.arguments if survival else None)
            process = context.Process(target=run_worker, args=(work, args, place))
            process.start()
            sender.close()
            if orders is not None:
                orders.close()
            uses_nccl = layout.has_process_group and layout.accelerator == "gpu"
            workers.append(Worker(group.rank, process, receiver, uses_nccl, announcements, group.number))
            return workers[-1]

        try:
            with block_signals():
                for rank in range(layout.world_size):
                    start(Group(survival.group if survival else 0, rank, layout.world_size))
            if received:  # the signal arrived before all workers were started
                signal_children(signal.SIGTERM)
            members = workers
            if survival:
                members = survive(workers, survival, start, received, hang_timeout, scratch)
            else:
                listener.close()
                wait_for_answers(workers)
            return _result(members, received, hang_timeout, scratch)
        except (Interrupted, WorkerFailed):
            if sys.stderr and sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # show the cursor, which a progress bar has hidden
            raise
        finally:
            _end_processes([each.process for each in workers])


def _run_in_external_worker(
    work: Callable[..., Any], args: tuple[Any, ...], layout: Layout, hang_timeout: float, survival: Survival | None
) -> Any:
    """Call `work(*args)` in this process, which is a worker that an engine has started. See `launch`."""
    import torch.distributed as dist

    from lockstep.launch.torch_versions import set_group_timeout

    world = external_workers()
    if world != layout.world_size:
        raise UserError(
            f"{environment().started_by} has started {world} workers, but the layout needs {layout.world_size}: "
            "give strategy=ddp, and leave out devices and num_nodes"
        )
    join_external()
    if dist.is_initialized():
        set_group_timeout(timedelta(seconds=hang_timeout))
    try:
        with log_failure():
            if survival and survival.arguments:
                return call_with_keeper(work, survival.arguments, hang_timeout)
            return work(*args)
    except Exception as error:
        if is_lost_rank(error):
            raise lost_rank_failure(error, hang_timeout) from error
        if isinstance(error, OSError):  # the input has been accepted, so it is no refusal: a full disk, say
            raise failure_of_worker(error, hang_timeout) from error
        raise
    finally:
        end_children()


def _result(workers: Sequence[Worker], received: Sequence[int], hang_timeout: float, scratch: str) -> Any:
    """Return rank zero's result, or raise the error that ended the run. One worker has failed, or all have answered."""
    decisive = _decisive(workers)
    if decisive.died and isinstance(decisive.error, LostRank):  # the worker that it has lost may answer, too
        wait_for_answers(workers, ANSWER_SECONDS)
        decisive = _decisive(workers)
    error = decisive.error
    if error is None:
        return decisive.result
    # SIGTERM kills a worker that has nothing to save.
    if decisive.ended_by_sigterm() or (received and isinstance(error, Interrupted | LostRank)):
        raise Interrupted(received[0] if received else signal.SIGTERM)
    if received and isinstance(error, WorkerFailed):  # the checkpoint may not be saved: the disk was full, say
        error.may_restart = False
    if isinstance(error, LostRank) and error.timed_out:
        wait_for_answers(workers, ANSWER_SECONDS)
        if hanging := [each for each in workers if not each.answered]:
            raise hanging[0].end_hanging(scratch, hang_timeout, error.steps)
        lost = [each.error for each in workers if isinstance(each.error, LostRank)]
        error = next((each for each in lost if each.in_user_code), error)
    raise error


def _decisive(workers: Sequence[Worker]) -> Worker:
    """Return the worker whose answer decides how the run ends. One has answered at least."""
    return min((each for each in workers if each.answered), key=lambda each: _priority(each.error))


def _priority(error: BaseException | None) -> int:
    """Return the priority of a worker's error. The run ends with the error that has the lowest number.

    Errors that another worker has caused have a higher number than their cause. The error of a worker that succeeded is
    None.
    """
    if error is None:
        return 5
    if isinstance(error, UserError):
        return 0
    if isinstance(error, LostRank):
        return 2 if error.timed_out else 3
    return 1 if isinstance(error, WorkerFailed) else 4  # 4: interrupted


def _end_processes(processes: Sequence[Any]) -> None:
    """Send SIGTERM to processes, and SIGKILL to those that do not end in time."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
        process.kill()
        process.join()


def start_method() -> str:
    """Return `fork` on Linux, else `spawn`. Return `spawn` also if CUDA is initialised, and in a notebook."""
    import torch

    unsafe = torch.cuda.is_initialized() or "ipykernel" in sys.modules
    return "fork" if sys.platform == "linux" and not unsafe else "spawn"


# --- in a worker ---


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's place in a run, as its parent assigns it."""

    group: Group  # the first one
    layout: Layout
    hang_timeout: float  # seconds that a collective waits for all ranks to join; then it fails
    restarts: int  # how many times the workers were restarted
    parent: int  # process id of the parent
    scratch: str  # the run's folder for temporary files
    listener: socket.socket  # the listening socket of rank zero's store
    answers: Connection  # to the parent, for `(error, result)`; error: None if the work succeeded
    announcements: Connection | None = None  # from the parent, of each later group; None: there is none
    arguments: Callable[[int], tuple[Any, ...]] | None = None  # see `Survival`

    @property
    def rank(self) -> int:
        """The rank with which the worker begins."""
        return self.group.rank


def run_worker(work: Callable[..., Any], args: tuple[Any, ...], place: WorkerPlace) -> None:
    """Run `work(*args)` in a worker process. Send the parent `(error, result)`; error: None if the work succeeded."""
    standard_streams.protect()  # of a program that has not done it: one that calls `lockstep.train`
    breakpoints.allow(place.layout.world_size)
    faulthandler.enable(2)
    # A terminal sends these to all processes. The parent forwards them, so workers ignore them.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # the parent may have inherited a handler from an outer program
    signal.signal(signal.SIGUSR1, record_signal)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # callbacks.Preemption handles it while there is something to save
    unblock_signals()
    set_parent_death_signal(place.parent)
    export(  # the variables that torchrun sets, and ours
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.layout.world_size),
        LOCAL_WORLD_SIZE=str(place.layout.world_size),
        GROUP_RANK="0",
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(place.listener.getsockname()[1]),
        TORCHELASTIC_RUN_ID="lockstep",
        TORCHELASTIC_RESTART_COUNT=str(place.restarts),
        **{LAUNCHER_VARIABLE: "lockstep", SCRATCH: place.scratch},
    )
    error: BaseException | None = None
    result = None
    try:
        with stack_on_demand(place.rank):
            if place.layout.has_process_group and place.announcements is None:
                join_group(place.layout.accelerator == "gpu", place.listener, place.hang_timeout)
            try:
                with log_failure():
                    result = _call(work, args, place)
            except Interrupted as interrupted:
                error = Interrupted(interrupted.signum)  # without the traceback, which keeps the work's objects alive
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the work is done; only the result is still to be sent
            # A failed worker stays in the group: otherwise other workers report lost connections before its reason.
            leave_group()
    except (Exception, SystemExit) as failure:
        if breakpoints.is_quit(failure):
            error = breakpoints.error_of_quit(place.layout.world_size)
        else:
            error = failure_of_worker(failure, place.hang_timeout)
    end_children()
    place.answers.send((error, result))


def _call(work: Callable[..., Any], args: tuple[Any, ...], place: WorkerPlace) -> Any:
    """Return the result of `work`, also after the loss of other workers if the run survives it."""
    if place.announcements is None or place.arguments is None:
        return work(*args)
    worker = Survivor(place.group, place.announcements, place.answers, place.hang_timeout, place.restarts)
    return become_survivor(worker).call(work, place.arguments)
