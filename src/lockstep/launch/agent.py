"""Runs a function in the worker processes that a layout needs.

Every run happens in workers, the one-device run too: the parent only composes, checks and launches, so its main thread
never runs a parallel operation (user code is called in another one: own_thread.py) or touches CUDA, and may fork. A
forked worker starts in a fraction of a second with everything imported. The parent ends the machine's workers when one
dies, and brings their results back. Each machine has a parent of its own; launch/meeting.py says which ranks are its.
Under `torchrun` (or several SLURM tasks) the workers exist already: the function then runs in place.
"""

import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.launch import logs, worker
from lockstep.launch.endings import Outcome, WorkerFailed
from lockstep.launch.environment import external_workers
from lockstep.launch.group import has_group, join_external
from lockstep.launch.interpreter import imported
from lockstep.launch.keeper import Keeper
from lockstep.launch.meeting import Meeting
from lockstep.launch.scratch import scratch_folder
from lockstep.launch.signals import Interrupted, end_children, forwarding, held, tell_children
from lockstep.launch.watchdog import Watch
from lockstep.launch.wire import Place
from lockstep.launch.worker import Answer

GRACE_SECONDS = 5  # between telling the workers to end and killing them
TELLING = ("refused", "failed", "victim", "interrupted", "completed")  # what of several workers' ends is the run's


def launch(
    work: Callable[..., Any],
    *args: Any,
    layout: Layout,
    hang_timeout: float = 300.0,
    part: tuple[Meeting, Place] | None = None,
) -> Any:
    """Calls `work(*args)` in every worker of this machine and returns what the first one's call returned.

    Args:
        work: a function that a worker can import; its result must be picklable.
        layout: how many workers, on how many machines.
        hang_timeout: seconds after which a silent worker is killed.
        part: this machine's, of a run that others may take part in, or that is started again.

    Raises:
        Refusal: a worker refused its input, or the workers that exist don't match the layout.
        WorkerFailed: a worker died.
        Interrupted: SIGTERM or SIGINT ended the run; its checkpoint is saved.
    """
    imported()
    if found := external_workers():
        if found != layout.world_size:
            raise Refusal(
                f"{found} workers exist, the layout needs {layout.world_size}: give ddp (or pipeline), devices x "
                f"num_nodes = {found}"
            )
        join_external()
        try:
            with logs.failure_told():
                return work(*args)
        finally:
            end_children()
    if part is None:
        keeper = Keeper()
        part = keeper, keeper.begin({}, layout)
    meeting, place = part
    here = f" on {platform.node()}" if layout.num_nodes > 1 else ""
    names = [f"rank {place.machine * place.workers + local_rank}{here}" for local_rank in range(place.workers)]
    context: Any = multiprocessing.get_context(start_method())
    workers: list[_Worker] = []
    with forwarding() as received, scratch_folder() as scratch:
        watch = Watch(scratch, names, hang_timeout, meeting)
        try:
            with held():
                for local_rank, name in enumerate(names):
                    hears, says = context.Pipe(duplex=False)
                    told = (work, args, layout, place, local_rank, os.getpid(), says)
                    process = context.Process(target=worker.run, args=told)
                    process.start()
                    workers.append(_Worker(name, process, hears))
                    says.close()
            if received:  # before all of them were known
                tell_children(signal.SIGTERM)
            if has_group(layout):
                meeting.serve()
            _wait(workers, watch)
            first = min((w for w in workers if w.answer), key=lambda w: TELLING.index(w.answer.outcome.kind))
            if first.answer.outcome.kind == "completed":
                return first.answer.result
            if received:
                raise Interrupted(received[0])
            error: Any = _failure(first, watch)
            error.local_rank = workers.index(first)
            raise error
        except (Interrupted, WorkerFailed) as ended:  # killed workers write no summary: who hears of it hears this, too
            ended.steps = watch.steps()
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # the cursor, which a bar has hidden
            raise
        finally:
            _end([each.process for each in workers])


@dataclass
class _Worker:
    """A worker as its parent knows it."""

    name: str
    process: Any
    hears: Connection
    answer: Any = None  # an Answer, as soon as it has ended or is about to

    def listen(self) -> None:
        """Takes its answer; where it has died without one, makes that."""
        alive = self.process.is_alive()  # asked first: what it said before its end is there then
        with suppress(EOFError):
            if self.hears.poll():
                self.answer = self.hears.recv()
        if alive or self.answer:
            return
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed: exit code {code}"
        how += " (out of memory?)" * (code == -signal.SIGKILL)  # of all that send it, the one that leaves no word
        self.answer = Answer(Outcome("failed", how, signum=-code))


def _wait(workers: Sequence[_Worker], watch: Watch) -> None:
    """Until all have answered, or one has failed."""
    while working := [each for each in workers if each.answer is None]:
        watch.look()
        wait([each.hears for each in working], timeout=0.05)
        for each in working:
            each.listen()
        if any(each.answer and each.answer.outcome.kind not in ("completed", "interrupted") for each in workers):
            return


def _failure(first: _Worker, watch: Watch) -> BaseException:
    """What to raise for a worker that did not complete."""
    outcome = first.answer.outcome
    if first.process.pid in watch.found:
        outcome = Outcome("victim" if watch.meeting.trouble() else "failed", watch.found[first.process.pid])
    elif outcome.signum == signal.SIGTERM:
        return Interrupted(signal.SIGTERM)
    elif outcome.kind != "refused" and not outcome.without:
        outcome = replace(outcome, text=f"{first.name} {outcome.text}")
    error = outcome.raised()
    if first.answer.trace:
        error.add_note(first.answer.trace)
    return error


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0, until - time.monotonic()))
        process.kill()
        process.join()


def start_method() -> str:
    """`fork` where it is safe and exists, else `spawn`."""
    import torch

    computed = torch.cuda.is_initialized() or "ipykernel" in sys.modules
    return "fork" if sys.platform == "linux" and not computed else "spawn"
