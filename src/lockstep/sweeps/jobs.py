"""A sweep's jobs as processes: each is a run with its own workers, environment and devices, so that whatever happens to
one, the others go on.

A job is forked from the sweep, which has imported everything and computed nothing, and is a parent of workers as any
run's is (launch/agent.py). Where fork is not to be had, or the workers exist already, jobs run in place, one at a time.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, cast

from lockstep.arithmetic.layout import Refusal, counted
from lockstep.launch.agent import start_method
from lockstep.launch.environment import STARTED, export, external_workers
from lockstep.launch.interpreter import imported
from lockstep.launch.signals import (
    PASSED_ON,
    Interrupted,
    handling,
    held,
    ignores_hangup,
    let_in,
    say_ending,
    set_parent_death_signal,
    tell_children,
)
from lockstep.run.lock import FolderBusy
from lockstep.run.summary import conclude, summary_of


@dataclass
class Job:
    """One run of a sweep."""

    number: int
    folder: Path
    overrides: list[str]
    label: str = ""  # its own overrides, which other jobs don't have
    started: float = 0.0  # time.monotonic()


@dataclass(frozen=True)
class Slot:
    """The devices of one job at a time. Empty: all that there are."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()


def slots(jobs: int, gpus: Sequence[str], cores: Sequence[int]) -> list[Slot]:
    """Devices dealt to `jobs` jobs that run at once: runs of neighbours. Fewer GPUs than jobs, or, without any, fewer
    cores, are a Refusal."""
    kind, count = ("GPU", len(gpus)) if gpus else ("core", len(cores))
    if jobs > count:
        are = "is" if count == 1 else "are"
        raise Refusal(f"sweep.jobs={jobs}: each job has its own devices, and there {are} {counted(count, kind)}")
    cut = [_dealt(gpus, jobs), _dealt(cores, jobs) if jobs <= len(cores) else [()] * jobs]
    return [Slot(tuple(mine), tuple(own)) for mine, own in zip(*cut, strict=True)]


def _dealt(things: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    return [things[len(things) * part // parts : len(things) * (part + 1) // parts] for part in range(parts)]


def in_place(num_nodes: int) -> bool:
    """Whether jobs run in this very process."""
    return bool(external_workers()) or num_nodes > 1 or start_method() != "fork"


def run_jobs(
    jobs: Sequence[Job],
    start: Callable[[Job], None],
    ended: Callable[[Job, dict[str, Any]], None],
    places: Sequence[Slot],
    inside: Callable[[Job], dict[str, Any]] | None = None,
) -> None:
    """Runs jobs as places come free.

    Args:
        start: the run itself, in the job's process.
        ended: told of each end, with the job's summary.
        inside: run in this process, one after the other; what then tells a job's summary.

    Raises:
        Interrupted: SIGTERM or SIGINT ended the sweep; the jobs were asked to save, and have ended.
    """
    if inside:
        for job in jobs:
            job.started = time.monotonic()
            export(**{STARTED: str(time.time())})
            start(job)
            ended(job, inside(job))
        return
    import lockstep.run.evaluation  # noqa: F401  all that a run needs, once for all jobs

    imported()
    fork = multiprocessing.get_context("fork")
    running: dict[int, tuple[Any, Job, Slot]] = {}  # the processes, by what becomes ready when one ends
    waiting, free = list(jobs), list(places)
    with _signals_passed_on(together=len(places) > 1) as received:
        while True:
            while free and waiting:
                with held():
                    if received:
                        break
                    job, place = waiting.pop(0), free.pop(0)
                    job.started = time.monotonic()
                    process = fork.Process(target=_run, args=(start, job, place, len(places) > 1, os.getpid()))
                    process.start()
                    running[process.sentinel] = process, job, place
                    if received:  # before it was known
                        process.terminate()
            if not running:
                break
            for sentinel in wait(list(running)):
                process, job, place = running.pop(cast(int, sentinel))
                process.join()
                free.append(place)
                ended(job, _result(job, process.exitcode))
        if received:
            raise Interrupted(received[0])


def _run(start: Callable[[Job], None], job: Job, place: Slot, together: bool, parent: int) -> None:
    """The first function of a job's process."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the sweep, which passes it on once
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not ignores_hangup():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as in `cli.command`
    let_in()
    set_parent_death_signal(parent)
    if place.cores:
        os.sched_setaffinity(0, place.cores)
    if place.gpus:
        export(CUDA_VISIBLE_DEVICES=",".join(place.gpus))
    export(**{STARTED: str(time.time())})
    try:
        if together:  # they would talk at once
            job.folder.mkdir(parents=True, exist_ok=True)
            with open(job.folder / "output.log", "ab") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
        start(job)
    except (Interrupted, KeyboardInterrupt) as interrupted:
        code = getattr(interrupted, "code", 130)
        if summary_of(job.folder).get("status") != "interrupted":  # before there were workers
            conclude(job.folder, "interrupted", str(Interrupted(code - 128)))
        sys.exit(code)
    except FolderBusy as busy:  # the summary there is another run's
        print(f"error: {busy}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        conclude(job.folder, "failed", f"{type(error).__name__}: {error}")
        sys.exit(1)


def _result(job: Job, code: int) -> dict[str, Any]:
    """The job's summary; where its process died without one, written for it."""
    if code == 0 and (summary := summary_of(job.folder)):
        return summary
    if code < 0:
        conclude(job.folder, "failed", f"the job was killed by {signal.Signals(-code).name}")
    return {"status": "failed", "error": f"exit code {code}, without a summary"} | summary_of(job.folder)


@contextmanager
def _signals_passed_on(together: bool) -> Iterator[list[int]]:
    """Signals go to every job. Yields those received so far that end the sweep. Jobs that run
    `together` answer a Ctrl-C in their own logs only."""
    received: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGUSR1:
            if together and signum == signal.SIGINT and signum not in received:
                say_ending()
            received.append(signum)
        tell_children(signum)

    with handling(handler, *PASSED_ON):
        yield received
