"""The faults of chaos.py: signals, a full disk, and damage to the newest checkpoint."""

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from resource import RLIMIT_FSIZE, prlimit

from campaigns.processes import Process

FULL = 1 << 18  # largest file in bytes on a full disk: less than a checkpoint


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        target: a `rank`, the `parent`, or `all`. With `disk` there is no signal; the parent and the workers
            get a full disk. Their loader processes do not, because they use shared memory, which counts for that limit.
        signals: sent one after the other.
        codes: exit codes that the fault may cause, besides 0 for a run that was already complete.
        pause: longest pause between two signals, in seconds.
        later: wait until workers exist, because earlier a signal finds no handler.
        damage: damage the newest checkpoint after the process has ended.
    """

    name: str
    target: str
    signals: tuple[int, ...]
    codes: tuple[int, ...]
    pause: float = 0.0
    later: bool = False
    damage: bool = False

    def strike(self, process: Process, rng: Random) -> str:
        """Inject the fault. Return the target in words, or an empty string if it had already ended."""
        ranks = process.ranks()
        if self.target == "disk":
            for pid in (process.pid, *ranks):
                with suppress(ProcessLookupError):
                    prlimit(pid, RLIMIT_FSIZE, (FULL, FULL))
            return f"at {FULL >> 10} kB"
        number = rng.randrange(len(ranks) or 1)
        pids = {"rank": ranks[number : number + 1], "parent": [process.pid], "all": [*process.members()]}[self.target]
        for at, signum in enumerate(self.signals):
            time.sleep(rng.uniform(0, self.pause) if at else 0)
            process.strike(signum, *pids)
        named = {"rank": f"rank {number}", "parent": "parent", "all": f"all {len(pids)}"}
        return named[self.target] if pids else ""


KILL, TERM, INT, USR1 = (signal.SIGKILL,), (signal.SIGTERM,), (signal.SIGINT,), (signal.SIGUSR1,)
KILLED, TERMINATED, INTERRUPTED = (128 + signal.SIGKILL,), (128 + signal.SIGTERM,), (128 + signal.SIGINT,)
FAULTS = [
    Fault("SIGKILL", "rank", KILL, (1,), later=True),
    Fault("SIGKILL", "parent", KILL, KILLED),
    Fault("SIGKILL", "all", KILL, KILLED),
    Fault("SIGTERM", "rank", TERM, TERMINATED, later=True),
    Fault("SIGTERM", "parent", TERM, TERMINATED),
    Fault("SIGTERM", "all", TERM, TERMINATED),
    Fault("Ctrl-C", "all", INT, INTERRUPTED),
    Fault("Ctrl-C twice", "all", INT * 2, INTERRUPTED, pause=0.5),
    Fault("SIGUSR1", "parent", USR1, (), later=True),
    Fault("SIGUSR1", "all", USR1, (), later=True),
    Fault("SIGSTOP", "rank", (signal.SIGSTOP, signal.SIGCONT), (), pause=3, later=True),
    Fault("disk full", "disk", (), (1,), later=True),
    Fault("SIGKILL, a bit flips", "all", KILL, KILLED, damage=True),
    Fault("SIGKILL, end cut off", "all", KILL, KILLED, damage=True),
]


def damage(path: Path, fault: Fault, rng: Random) -> None:
    """Flip one bit of a file or cut off its end, in place, so that hard links to it are damaged too."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if "flips" in fault.name:
        content[at] ^= 1 << rng.randrange(8)
    else:
        del content[at:]
    path.write_bytes(content)
