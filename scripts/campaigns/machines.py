"""One run over several machines, struck within its life: a worker, a machine, a link, the machine that keeps the run.

The machines are network namespaces (scripts/network/machines.py), none of which sees another one's runs. Linux and root
only.
"""

import signal
import time
from typing import Any

from campaigns.campaign import Campaign, schedule
from campaigns.faults import KILLED
from campaigns.lives import Life
from network.machines import Machines

LINKS = {"link down for 5 s": 5, "link down for 20 s": 20}
KINDS = ["worker killed", "machine killed", *LINKS, "keeper killed", "all killed"]
LASTING = 3  # epochs of the run, for each fault that it must outlast
PATIENCE = 180  # seconds that machines may take to compute again, or to end


class SeveralMachines(Campaign):
    """The run and its faults. The control: all machines are killed, and go on with another seed."""

    def __init__(self, machines: Machines, faults: int, *common: Any) -> None:
        super().__init__(*common)
        self.machines, self.runs = machines, 1
        self.faults = schedule(self.rng, faults, KINDS[-1:] if self.control else KINDS)
        self.homes = [self.home / name for name in machines.names]
        self.met = [f"num_nodes={len(self.homes)}", f"rdzv_endpoint={machines.address(0)}:29500"]
        lasting = ["elastic=true", f"max_restarts={2 * faults}", "+callbacks.pace._target_=campaigns.flips.Pace"]
        self.arguments = [*self.job, "strategy=ddp", "devices=1", *self.met, *lasting]
        self.lives: dict[int, Life] = {}

    def go(self) -> None:
        self.undisturbed()
        try:
            for number, folder in enumerate(self.homes):
                folder.mkdir()
                self._start(number)
            while self._whole() and self.faults:
                kind, at = self.faults.pop(0), time.monotonic()
                self.struck.append(kind)
                after, whom = self.lives[0].age, self._strike(kind)
                whole = f"whole after {time.monotonic() - at:.0f} s" if self._whole() else "the run was over"
                self.tell(f"{kind} ({whom}) after {after:.1f} s", whole)
            if self.faults:
                self.problem(f"{len(self.faults)} faults had no run to strike")
            for life in self.lives.values():
                life.wait(PATIENCE)
                self.check_life(life, 0)
            self.check_end(next(self.homes[0].glob("*/*")), self.lives[0])
        finally:
            for life in self.lives.values():
                life.close()

    def _start(self, number: int) -> None:
        others = [folder for folder in self.homes if folder != self.homes[number]]
        there = self.machines.command(number, [], hidden=others)
        self.lives[number] = Life([*self.arguments, f"outputs={self.homes[number]}"], elsewhere=there)

    def _strike(self, kind: str) -> str:
        """Returns whom it struck."""
        everybody = list(self.lives)
        number = self.rng.choice(everybody[1:])
        if kind == "worker killed":
            number = self.rng.choice(everybody)
            self.lives[number].strike(signal.SIGKILL, *self.lives[number].ranks())
        elif kind in LINKS:
            self.machines.link(number, up=False)
            time.sleep(LINKS[kind])
            self.machines.link(number, up=True)
        else:
            killed = {"machine killed": [number], "keeper killed": [0], "all killed": everybody}[kind]
            for lost in killed:
                self.machines.kill(lost)
                self.lives[lost].wait(PATIENCE)
                self.check_life(self.lives[lost], *KILLED)
                self.lives[lost].close()
            if 0 in killed:  # who starts from now on goes on with the run
                folder = next(self.homes[0].glob("*/*"))
                self.arguments = [f"resume={folder}", *self.met, *(["seed=1"] if self.control else [])]
            time.sleep(self.rng.uniform(1, 5))
            for lost in killed:
                self._start(lost)
            return "all" if killed == everybody else f"machine {killed[0]}"
        return f"machine {number}"

    def _whole(self) -> bool:
        """Waits until all machines compute, and have saved since. False: the run is over, or they never do."""
        since = 0.0

        def ready() -> bool:
            nonlocal since
            time.sleep(0.1)
            if not all(life.ranks() for life in self.lives.values()):
                since = 0.0
                return False
            since = since or time.time()
            return any(file.stat().st_mtime > since for file in self.homes[0].rglob("last.ckpt"))

        if self.lives[0].wait(PATIENCE, ready) is not None:
            return False
        if not ready():
            self.problem(f"not whole after {PATIENCE} s", self.lives[0])
            return False
        return True
