"""A storm: the machines of one run die or are cut off one after the other, and come back.

Linux and root only.
"""

import time
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any

from campaigns.campaign import Campaign, schedule
from campaigns.fleet import Fleet, Record
from campaigns.goodput import Goodput, goodput
from network.machines import Machines

KILLED, CUT, SERVER = "machine killed", "machine cut off", "store's host killed"
DOWN = (1.0, 5.0)  # seconds for which a machine is down, or cut off
STEP = 0.5  # seconds of a step on all machines


@dataclass(frozen=True)
class Plan:
    """What a storm does.

    Attributes:
        every: seconds between two strikes.
        strikes: number of strikes.
        server_every: every so many seconds a strike hits the machine that serves torchrun's store; 0: never.
        calm: undisturbed seconds before the first strike. The rate of their steps is the reference.
    """

    every: float
    strikes: int
    server_every: float
    calm: float

    @property
    def seconds(self) -> float:
        return self.calm + self.every * self.strikes

    def kinds(self, rng: Random) -> list[str]:
        """Return the kind of each strike."""
        kinds = schedule(rng, self.strikes, [KILLED, CUT])
        for number in range(self.strikes):
            now, before = (each * self.every // (self.server_every or float("inf")) for each in (number + 1, number))
            if now > before:
                kinds[number] = SERVER
        return kinds


class Storm(Campaign):
    """One run through a storm.

    The control is a run that skips a step after each restart, which must fail.

    Attributes:
        goodput: where the time of the storm went.
    """

    claim = "each ended with the bits of one device"

    def __init__(self, machines: Machines, plan: Plan, *common: Any) -> None:
        super().__init__(*common)
        self.machines, self.plan, self.runs = machines, plan, 1
        self.goodput: Goodput | None = None

    def go(self) -> None:
        self.undisturbed("strategy=auto", "devices=1")
        pieces = next(int(text.partition("=")[2]) for text in self.job if text.startswith("pieces="))
        count = len(self.machines.names)
        record = Record(self.home, STEP * count / pieces, self.control)
        homes = [self.home / name for name in self.machines.names]
        with closing(Fleet(self.machines, homes, self.job, record)) as fleet:
            fleet.tend_until_all_compute()
            fleet.tend(self.plan.calm)
            self._blow(fleet)
            fleet.finish(self)

    def _blow(self, fleet: Fleet) -> None:
        plan, began = self.plan, time.time()
        strikes: list[tuple[float, str]] = []
        for number, kind in enumerate(plan.kinds(self.rng)):
            fleet.tend(began + number * plan.every - time.time())
            seconds, server = self.rng.uniform(*DOWN), fleet.server
            target = self.rng.choice([each for each in range(len(fleet.homes)) if each != server])
            strikes.append((time.time() - began, kind))
            self.struck.append(kind)
            where = f"machine {server if kind == SERVER else target}, for {seconds:.1f} s"
            self.print_line(f"{kind} ({where}) after {strikes[-1][0]:.0f} s", f"step {fleet.record.steps()}")
            if kind == SERVER:
                fleet.kill_server(self.rng, seconds)
            elif kind == CUT:
                fleet.cut(target, seconds)
            else:
                fleet.kill(target, seconds)
        fleet.tend(began + plan.every * plan.strikes - time.time())
        if fleet.completed:
            self.problem("the run ended before the storm: give it more max_epochs")
        self.goodput = goodput(fleet.record.events(), began, time.time(), strikes)
        print("", *self.goodput.lines(), "", sep="\n", flush=True)
        self.print_line(f"goodput {self.goodput.share:.2f}", f"undisturbed {self.goodput.rate:.2f} steps/s")
