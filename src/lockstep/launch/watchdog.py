"""Every worker tells how far it is; the parent notices one that has gone silent, names it and ends it.

A rank that hangs makes all others wait in their next collective, so the culprit is the one that is least far.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.launch.environment import environment
from lockstep.launch.meeting import Meeting

WAITS = -1  # in place of the micro-batch, see `patient`
_beats: NDArray[np.float64] = np.zeros(4)  # when, step, micro-batch and process; nobody looks before `join`


def beat(step: int, micro_batch: int = 0) -> None:
    """Called by a worker at each micro-batch of a step, and at each batch of an evaluation."""
    _beats[:] = (time.time(), step, micro_batch, os.getpid())


@contextmanager
def patient() -> Iterator[None]:
    """While a worker compiles, or reads or writes what may take a slow disk or network longer than any step. A thread
    beats for it, so that only a process that stands still as a whole is silent; others that wait for it are not,
    either."""
    beats, micro_batch, done = _beats, _beats[2], threading.Event()

    def beat_on() -> None:
        while not done.wait(0.2):
            beats[0] = time.time()

    beats[0], beats[2] = time.time(), WAITS
    thread = threading.Thread(target=beat_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        beats[0], beats[2] = time.time(), micro_batch


def join(rank: int) -> None:
    """Called by a worker when it starts: from now on its silence is noticed."""
    global _beats
    if folder := environment().scratch:
        mapped = np.memmap(f"{folder}/beats", dtype=np.float64, mode="r+")
        _beats = np.asarray(mapped).reshape(-1, 4)[rank]  # faster to write to than np.memmap
        beat(0)


def leave() -> None:
    """Called by a worker whose work is done: from now on it may be silent."""
    global _beats
    _beats[:] = 0
    _beats = np.zeros(4)


def _runs(pid: float) -> bool:
    """False for a process that is stopped or sleeps uninterruptibly (Linux): the first suspect among equals."""
    try:
        state = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]  # a letter, see proc(5)
        return state not in "TtD"
    except (OSError, IndexError):
        return True


class Watch:
    """What a parent looks at while its workers run. It ends the least advanced one when all progress has stopped, and
    all of them when other machines can't go on.

    Args:
        folder: the run's scratch folder, where the beats are kept in a small file.
        names: of this machine's workers.
        timeout: seconds without a beat of the least advanced worker.
        meeting: what tells of other machines.

    Attributes:
        found: a message for each pid that it ended.
    """

    def __init__(self, folder: str, names: Sequence[str], timeout: float, meeting: Meeting) -> None:
        self.table = np.memmap(f"{folder}/beats", dtype=np.float64, mode="w+", shape=(len(names), 4))
        self.names, self.timeout, self.meeting = names, timeout, meeting
        self.found: dict[int, str] = {}
        self.asked = False  # whether the workers were asked to end, for a machine that came back
        self.pause, self.due, self.looked = min(1.0, timeout / 4), time.monotonic(), time.time()
        self.excused = 0.0  # when a worker that others may wait for was last seen `patient`

    def steps(self) -> int:
        """Optimizer steps that all workers have made."""
        return int(min((step for when, step, _, _ in self.table.tolist() if when), default=0))

    def look(self) -> None:
        """Called again and again; it looks once a second, or sooner for a short timeout."""
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + self.pause
        last, self.looked = self.looked, time.time()
        if self.looked - last > 2 * self.pause:  # all stood still, with Ctrl-Z or the machine
            self.table[:, 0] = np.where(self.table[:, 0] > 0, self.looked, 0)
        self._end_silent(self.looked)
        if trouble := self.meeting.trouble():
            self._signal(signal.SIGKILL, trouble)
        elif (back := self.meeting.returning()) and not self.asked:
            self.asked = True
            print(f"machine {back} is here: saving, to go on with it", file=sys.stderr)
            self._signal(signal.SIGTERM)

    def _signal(self, signum: int, why: str = "") -> None:
        for pid in {int(pid) for when, _, _, pid in self.table.tolist() if when}:
            if why:
                self.found[pid] = why
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _end_silent(self, looked: float) -> None:
        """Ends the least advanced worker when it has told nothing for too long."""
        rows = [
            (step, micro_batch, _runs(pid), when, rank, int(pid))
            for rank, (when, step, micro_batch, pid) in enumerate(self.table.tolist())
            if when
        ]
        if not rows:
            return
        self.excused = max([self.excused, *(when for _, micro_batch, _, when, _, _ in rows if micro_batch == WAITS)])
        step, _, _, when, rank, pid = min(rows)
        if looked - max(when, self.excused) <= self.timeout:  # not the time now: a machine may be suspended in here
            return
        self.found[pid] = (
            f"{self.names[rank]} was silent for {self.timeout:g} s in step {int(step) + 1} and taken for dead"
        )
        print(self.found[pid], file=sys.stderr)
        self.table[rank] = 0
        waited = self.table[:, 0] > 0  # for it: they get their time anew
        self.table[:, 0] = np.where(waited, time.time(), 0)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
