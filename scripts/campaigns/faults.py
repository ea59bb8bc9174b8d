"""What strikes a run: signals, a full disk, damage to the newest checkpoint."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from resource import RLIMIT_FSIZE, prlimit

from campaigns.lives import Life

FULL = 1 << 18  # bytes of the largest file when the disk is full


@dataclass(frozen=True)
class Fault:
    """What strikes. `strike` returns whom it struck, empty if they were gone; `codes` are the exit codes that it may
    lead to, beside 0 for a run that was over by then; `later`: only when there are workers (before, a signal finds no
    handler)."""

    name: str
    strike: Callable[[Life, random.Random], str]
    codes: tuple[int, ...]
    later: bool = False
    damage: bool = False  # the newest checkpoint is damaged when the life is over


def _rank(signum: int, pause: float = 0) -> Callable[[Life, random.Random], str]:
    def strike(life: Life, rng: random.Random) -> str:
        ranks = life.ranks()
        if not ranks:
            return ""
        number = rng.randrange(len(ranks))
        life.strike(signum, ranks[number])
        if pause:
            seconds = rng.uniform(0, pause)
            time.sleep(seconds)
            life.strike(signal.SIGCONT, ranks[number])
            return f"rank {number}, {seconds:.1f} s"
        return f"rank {number}"

    return strike


def _parent(signum: int) -> Callable[[Life, random.Random], str]:
    def strike(life: Life, rng: random.Random) -> str:
        life.strike(signum, life.pid)
        return "parent"

    return strike


def _group(*signals: int) -> Callable[[Life, random.Random], str]:
    def strike(life: Life, rng: random.Random) -> str:
        for number, signum in enumerate(signals):
            time.sleep(rng.uniform(0, 0.5) if number else 0)
            members = life.members()
            life.strike(signum, *members)
        return f"all {len(members)}"

    return strike


def _disk_full(life: Life, rng: random.Random) -> str:
    """No file of the parent and the workers may grow beyond less than a checkpoint. (Their loader processes keep
    batches in shared memory, which is no disk, but counts for this limit.)"""
    for pid in (life.pid, *life.ranks()):
        with contextlib.suppress(ProcessLookupError):
            prlimit(pid, RLIMIT_FSIZE, (FULL, FULL))
    return f"at {FULL >> 10} kB"


KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
FAULTS = (
    Fault("SIGKILL", _rank(KILL), (1,), later=True),
    Fault("SIGKILL", _parent(KILL), (128 + KILL,)),
    Fault("SIGKILL", _group(KILL), (128 + KILL,)),
    Fault("SIGTERM", _rank(TERM), (128 + TERM,), later=True),
    Fault("SIGTERM", _parent(TERM), (128 + TERM,)),
    Fault("SIGTERM", _group(TERM), (128 + TERM,)),
    Fault("Ctrl-C", _group(INT), (128 + INT,)),
    Fault("Ctrl-C twice", _group(INT, INT), (128 + INT,)),
    Fault("SIGUSR1", _parent(signal.SIGUSR1), (), later=True),
    Fault("SIGUSR1", _group(signal.SIGUSR1), (), later=True),
    Fault("SIGSTOP", _rank(signal.SIGSTOP, pause=3), (), later=True),
    Fault("disk full", _disk_full, (1,), later=True),
    Fault("SIGKILL, a bit flips", _group(KILL), (128 + KILL,), damage=True),
    Fault("SIGKILL, end cut off", _group(KILL), (128 + KILL,), damage=True),
)


def damage(path: Path, fault: Fault, rng: random.Random) -> None:
    """Flips one bit of a file, or cuts off its end, in place: a second name of the file is struck too."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if "flips" in fault.name:
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        else:
            file.truncate(rng.randrange(size))


def schedule(number: int, rng: random.Random) -> list[Fault]:
    """`number` faults in random order, each kind as often as the others."""
    drawn: list[Fault] = []
    while len(drawn) < number:
        drawn += rng.sample(FAULTS, len(FAULTS))
    return drawn[:number]
