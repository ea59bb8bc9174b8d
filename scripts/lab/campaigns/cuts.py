"""Cut the network between machines at random, and check that no two runs write one run's folder.

The machines run under `lockstep torchrun`, see campaigns/fleet.py. Each has its own `outputs`, or all share one, as if
it were on a file server that every part of a cut network still reaches. Linux and root only.
"""

import os
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

from campaigns.campaign import Campaign
from campaigns.fleet import Fleet, Record
from campaigns.goodput import Group, groups_of
from campaigns.processes import command_of, stat_of
from network.machines import Machines

from lockstep.text import plural

LASTS = (0.5, 12.0)  # seconds of a cut: shorter and longer than hang_timeout
PAUSE = (0.5, 6.0)  # seconds between two cuts
SECONDS = 0.25  # for which a device computes a piece
LOOK = 0.05  # seconds between two looks at who writes
WRITTEN = ("train.log", "summary.json", "events.out", ".ckpt")  # parts of the names of rank zero's files


class Cuts(Campaign):
    """A run whose network is cut again and again.

    Args:
        shared: whether all machines share one `outputs`.
        cuts: number of cuts.
    """

    claim = "no two runs wrote one folder, and each ended with the bits of one device"

    def __init__(self, machines: Machines, shared: bool, cuts: int, *common: Any) -> None:
        super().__init__(*common)
        self.machines, self.shared, self.cuts, self.runs = machines, shared, cuts, 1

    def go(self) -> None:
        self.undisturbed("strategy=auto", "devices=1")
        names = self.machines.names
        homes = [self.home / ("outputs" if self.shared else name) for name in names]
        record = Record(self.home, SECONDS)
        fleet = Fleet(self.machines, homes, self.job, record)
        writers = Writers(self.machines, homes)
        try:
            writers.start()
            fleet.tend_until_all_compute()
            for _ in range(self.cuts):
                self._cut(fleet)
            fleet.finish(self)
        finally:
            writers.stop()
            fleet.close()
        for line in writers.together:
            self.problem(line)
        for line in overlaps(groups_of(record.events())):
            self.problem(line)
        if not writers.seen:
            self.problem("no process was seen to write a run's folder: the check sees nothing")
        self.print_line(f"{self.cuts} cuts", f"{len(writers.seen)} processes wrote, one after the other")

    def _cut(self, fleet: Fleet) -> None:
        count = len(fleet.homes)
        apart = sorted(self.rng.sample(range(count), self.rng.randint(1, count - 1)))
        seconds = self.rng.uniform(*LASTS)
        self.struck.append("cut")
        fleet.machines.part(apart)
        fleet.tend(seconds)
        fleet.machines.part([])
        fleet.tend(self.rng.uniform(*PAUSE))
        self.print_line(f"cut {len(self.struck)}: {apart} apart for {seconds:.1f} s", f"step {fleet.record.steps()}")


class Writers(Thread):
    """Watch which processes have rank zero's files of a run's folder open for writing.

    Attributes:
        seen: all such processes.
        together: a line for each pair of processes that wrote one folder at the same time.
    """

    def __init__(self, machines: Machines, homes: list[Path]) -> None:
        super().__init__(daemon=True)
        self.machines, self.homes = machines, {str(home) for home in homes}
        self.seen: set[int] = set()
        self.together: list[str] = []
        self._over = Event()

    def run(self) -> None:
        while not self._over.wait(LOOK):
            by_folder: dict[str, set[int]] = {}
            for number in range(len(self.machines.names)):
                for pid in self.machines.processes(number):
                    for folder in folders_written_by(pid, self.homes):
                        by_folder.setdefault(folder, set()).add(pid)
            for folder, pids in by_folder.items():
                pids = without_children(pids)
                self.seen |= pids
                # A process may have ended between two looks of one round: all must live now.
                if len(pids) > 1 and all(folder in folders_written_by(pid, self.homes) for pid in pids):
                    names = " and ".join(f"{pid} ({command_of(pid) or 'ended'})" for pid in sorted(pids))
                    self.together.append(f"processes {names} wrote {folder} at the same time, {time.strftime('%X')}")

    def stop(self) -> None:
        self._over.set()
        self.join()


def folders_written_by(pid: int, homes: set[str]) -> set[str]:
    """Return the folders of runs in which a process has a file of rank zero open for writing."""
    folders = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError, IndexError):
                path = os.readlink(link)
                home = next((home for home in homes if path.startswith(f"{home}/")), None)
                if home is None or not any(part in path for part in WRITTEN):
                    continue
                info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
                flags = int(info.partition("flags:")[2].split()[0], 8)
                if flags & (os.O_WRONLY | os.O_RDWR):
                    folders.add(str(Path(home, *Path(path).relative_to(home).parts[:2])))
    return folders


def without_children(pids: set[int]) -> set[int]:
    """Leave out processes whose parent is in `pids` too.

    A run starts git, for example. Until the child's program begins, it has the files open that its parent has.
    """
    return {pid for pid in pids if parent_of(pid) not in pids}


def parent_of(pid: int) -> int | None:
    """Return the id of a process's parent; None if the process has ended."""
    with suppress(OSError):
        return int(stat_of(pid)[1])
    return None


def overlaps(groups: list[Group]) -> list[str]:
    """Return a line for each two groups of workers that took steps at the same time."""
    lines = []
    for first, second in pairwise(groups):
        if second.first < first.last:
            both = " and ".join(f"{plural(each.world, 'machine')} ({each.name})" for each in (first, second))
            lines.append(f"two groups took steps at once for {first.last - second.first:.1f} s: {both}")
    return lines
