"""Runs a function in the worker processes that a layout needs.

Every run happens in workers, the one-device run too: the parent only composes, checks and launches, so it never runs
a parallel operation or touches CUDA, and may fork. A forked worker starts in a fraction of a second with everything
imported. The parent ends the machine's workers when one dies, and brings their results back. Each machine has a parent
of its own; launch/meeting.py says which ranks are its. Under `torchrun` (or several SLURM tasks) the workers exist
already: the function then runs in place.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.launch import logs, watchdog, worker
from lockstep.launch.endings import Outcome, WorkerFailed
from lockstep.launch.environment import environment_kept, external_workers
from lockstep.launch.group import has_group, join_external
from lockstep.launch.interpreter import imported
from lockstep.launch.keeper import Keeper
from lockstep.launch.meeting import Meeting
from lockstep.launch.processes import end_children
from lockstep.launch.scratch import scratch_folder
from lockstep.launch.signals import Interrupted, forwarding
from lockstep.launch.watchdog import watching
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
    workers: list[tuple[Any, Connection]] = []
    with (
        environment_kept(),
        forwarding() as received,
        scratch_folder() as scratch,
        watching(scratch, names, hang_timeout, meeting) as silent,
        _told_of_killed(),
    ):
        try:
            for local_rank in range(place.workers):
                hears, answers = context.Pipe(duplex=False)
                told = (work, args, layout, place, local_rank, os.getpid(), answers)
                process = context.Process(target=worker.run, args=told)
                process.start()
                workers.append((process, hears))
                answers.close()
            if has_group(layout):
                meeting.serve()
            ended = _answers(workers)
        finally:
            _end([process for process, _ in workers])
        first = min(ended, key=lambda number: (TELLING.index(ended[number].outcome.kind), number))
        answer, pid = ended[first], workers[first][0].pid
        outcome = answer.outcome
        if outcome.kind == "completed":
            return answer.result
        if received:
            raise Interrupted(received[0])
        if pid in silent:
            outcome = Outcome("victim" if meeting.trouble() else "failed", silent[pid])
        elif outcome.signum == signal.SIGTERM:
            raise Interrupted(signal.SIGTERM)
        elif outcome.kind != "refused":
            outcome = replace(outcome, text=f"{names[first]} {outcome.text}")
        error = outcome.raised()
        if answer.trace:
            error.add_note(answer.trace)
        raise error


def _answers(workers: Sequence[tuple[Any, Connection]]) -> dict[int, Answer]:
    """What the workers said, by number: all of them, or those that did until one had failed."""
    ended: dict[int, Answer] = {}
    while len(ended) < len(workers):
        wait([hears for number, (_, hears) in enumerate(workers) if number not in ended], timeout=0.05)
        for number, (process, hears) in enumerate(workers):
            if number not in ended and (answer := _answer(process, hears)):
                ended[number] = answer
        if any(answer.outcome.kind not in ("completed", "interrupted") for answer in ended.values()):
            break
    return ended


def _answer(process: Any, hears: Connection) -> Answer | None:
    """What a worker said, or how it ended without a word; None: it works."""
    alive = process.is_alive()  # asked first: what it said before its end is there then
    with suppress(EOFError):
        if hears.poll():
            said: Answer = hears.recv()
            return said
    if alive:
        return None
    code = process.exitcode
    if code < 0:
        return Answer(Outcome("failed", f"was killed by {signal.Signals(-code).name}", signum=-code))
    return Answer(Outcome("failed", f"failed: exit code {code}"))


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0, until - time.monotonic()))
        process.kill()
        process.join()


@contextmanager
def _told_of_killed() -> Iterator[None]:
    """What killed workers left undone: they write no summary, so who hears of it hears too how far they were; and one
    that drew a bar has hidden the terminal's cursor."""
    try:
        yield
    except (Interrupted, WorkerFailed) as ended:
        ended.steps = watchdog.steps()
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")
        raise


def start_method() -> str:
    """`fork` where it is safe and exists, else `spawn`."""
    import torch

    computed = torch.cuda.is_initialized() or "ipykernel" in sys.modules
    return "fork" if sys.platform == "linux" and not computed else "spawn"
