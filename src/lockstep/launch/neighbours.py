"""Threads that share their cores with other programs.

OpenMP's threads wait for each other in a loop of 300,000 turns before they sleep. On an idle machine that is what makes
small networks fast (2,800 samples a second of mnist_cnn on two cores; 1,600 where they sleep at once). Beside a program
that wants a core, too, each turn takes the place of somebody's work: 190 samples a second beside one, 1,600 where they
sleep. libgomp itself waits shortly (100 turns) as long as a process has more OpenMP threads than cores; so while
threads here wait for a core, some are added that do nothing. The bits of a result stay what they are.
"""

import ctypes
import glob
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from lockstep.launch.machine import cores

LOOK = 0.25  # seconds in which the wait for cores is measured
CROWDED = 0.5  # seconds of waiting for a core, of all threads together, in a second: with less, a long wait is faster
SHORTLY = 8.0  # seconds until it is measured again


@cache
def wait_shortly_beside_others() -> None:
    """From now on this process's threads wait for each other shortly while they lack cores (Linux, libgomp)."""
    if sys.platform == "linux":
        threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    while True:
        before = _waited()
        time.sleep(LOOK)
        if _waited() - before > CROWDED * LOOK:
            added = threading.Thread(target=_too_many, daemon=True)
            added.start()
            added.join()


def _too_many() -> None:
    """Starts as many OpenMP threads as there are cores; they sleep, and end with this thread."""
    with suppress(OSError, AttributeError):  # another OpenMP
        libgomp = ctypes.CDLL("libgomp.so.1")
        libgomp.GOMP_parallel(libgomp.omp_get_num_procs, None, cores(), 0)
    time.sleep(SHORTLY)


def _waited() -> float:
    """Seconds that this process's threads have waited for a core so far; 0 where the kernel does not count them."""
    total = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        with suppress(OSError):  # it has ended
            total += int(Path(path).read_text().split()[1])
    return total / 1e9
