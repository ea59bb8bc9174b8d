"""Hit one run over several machines: a worker, a machine, a link, the machine that serves the store, or all.

The next fault waits until all machines compute again and have saved. Linux and root only.
"""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from campaigns.campaign import Campaign, schedule
from campaigns.fleet import PATIENCE, Fleet, Record
from network.machines import Machines

from lockstep.checkpoint import io as checkpoint_io

WORKER, MACHINE, STORE, ALL = "worker killed", "machine killed", "store killed", "all killed"
LINKS = {"link down for 5 s": 5, "link down for 20 s": 20}
KINDS = [WORKER, MACHINE, *LINKS, STORE, ALL]
EPOCHS_PER_FAULT = 6  # so many that the run outlasts its faults
SECONDS = 0.25  # for which a device computes a piece


class SeveralMachines(Campaign):
    """The run and its faults.

    The control is a run that skips a step after each restart, which must fail. All its faults restart it.
    """

    claim = "the run ended with the bits of one device, and each machine has its last checkpoint"

    def __init__(self, machines: Machines, faults: int, *common: Any) -> None:
        super().__init__(*common)
        self.machines, self.runs = machines, 1
        self.faults = schedule(self.rng, faults, [ALL] if self.control else KINDS)
        self.homes = [self.home / name for name in machines.names]

    def go(self) -> None:
        self.undisturbed()
        record = Record(self.home, SECONDS, self.control)
        with closing(Fleet(self.machines, self.homes, [*self.job, "hang_timeout=10"], record)) as fleet:
            self._tend_until_all_have_saved(fleet)
            for kind in self.faults:
                self._hit(fleet, kind)
            fleet.finish(self)
        copies = self._last_checkpoints()
        different = {copy.read_bytes() for copy in copies}
        if len(copies) != len(self.homes) or len(different) > 1:
            self.problem(f"{len(copies)} copies of the last checkpoint, {len(different)} of them different")

    def _hit(self, fleet: Fleet, kind: str) -> None:
        """Inject a fault, and wait until all machines compute again and have saved."""
        if fleet.completed:
            self.problem("the run ended before its faults: give it more max_epochs")
            return
        began, step, gave_up = time.time(), fleet.record.steps(), len(fleet.gave_up)
        self.struck.append(kind)
        target = self._strike(fleet, kind)
        copies = self._last_checkpoints() if kind in (STORE, ALL) else []  # otherwise the run goes on meanwhile
        saved = max((int(checkpoint_io.load(copy)["global_step"]) for copy in copies), default=0)
        fleet.tend(1.0)  # a step that had begun before the fault may still be completed
        self._tend_until_all_have_saved(fleet)
        starts = [event for event in fleet.record.events() if event["what"] == "begins" and event["time"] > began]
        if saved > max((event["step"] for event in starts), default=0):
            self.problem(f"a machine has a checkpoint of step {saved}, but the run did not resume from it")
        if kind in (WORKER, MACHINE) and (names := fleet.gave_up[gave_up:]):  # the agents must go on
            self.problem(f"torchrun failed on {', '.join(names)} and had to be started again:\n{fleet.output()}")
        self.print_line(f"{kind} ({target}) at step {step}", f"whole after {time.time() - began:.0f} s")

    def _strike(self, fleet: Fleet, kind: str) -> str:
        """Inject a fault. Return its target in words."""
        number = self.rng.choice([each for each in range(len(self.homes)) if each != fleet.server])
        if kind == ALL:
            fleet.kill_all(self.rng)
            return "all machines"
        if kind == STORE:
            number = fleet.server
            fleet.kill_server(self.rng, 0.0)
        elif kind == WORKER:
            number = self.rng.randrange(len(self.homes))
            fleet.kill_worker(number)
        elif kind == MACHINE:
            fleet.kill(number, self.rng.uniform(1, 5))
        else:
            fleet.cut(number, LINKS[kind])
        return f"machine {number}"

    def _tend_until_all_have_saved(self, fleet: Fleet) -> None:
        """Wait until all machines take steps, and each has a new checkpoint."""
        fleet.tend_until_all_compute()
        since = time.time()

        def have_saved() -> bool:
            return sum(copy.stat().st_mtime > since for copy in self._last_checkpoints()) == len(self.homes)

        if not fleet.tend(PATIENCE, have_saved):
            self.problem(f"not all machines have a new checkpoint after {PATIENCE} s:\n{fleet.output()}")

    def _last_checkpoints(self) -> list[Path]:
        """Return the last checkpoint of each machine."""
        return [path for home in self.homes for path in home.glob("*/*/checkpoints/last.ckpt")]
