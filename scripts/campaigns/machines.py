"""One run over several machines, struck within its life: a worker, a machine, a link, the machine that keeps the run.

The machines are network namespaces (scripts/machines.py), none of which sees another one's runs. Linux and root only.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from campaigns.faults import schedule
from campaigns.runs import LINE, unequal
from network.machines import Machines

from lockstep.run.checks import ROOT

LINKS = {"link down for 5 s": 5, "link down for 20 s": 20}
KINDS = ("worker killed", "machine killed", *LINKS, "keeper killed", "all killed")
PATIENCE = 180  # seconds that machines may take to compute again, or to end


class SeveralMachines:
    """The run and its faults.

    Args:
        job: overrides, without a layout.
        control: all machines are killed, and go on with another seed: must not be survived.

    Attributes:
        struck: the faults so far, by name.
        problems: what should not have happened.
    """

    runs = 1

    def __init__(
        self, machines: Machines, job: list[str], faults: int, home: Path, rng: random.Random, control: bool
    ) -> None:
        self.machines, self.job, self.home, self.rng, self.control = machines, job, home, rng, control
        self.faults = schedule(faults, rng, KINDS[-1:] if control else KINDS)
        self.struck: list[str] = []
        self.problems: list[str] = []
        self.homes = [home / f"machine_{number}" for number in range(len(machines.names))]
        self.met = [f"num_nodes={len(self.homes)}", f"rdzv_endpoint={machines.address(0)}:29500"]
        lasting = ["elastic=true", f"max_restarts={2 * faults}", "+callbacks.pace._target_=campaigns.flips.Pace"]
        self.command = [*job, "strategy=ddp", "devices=1", *self.met, *lasting]
        self.running: dict[int, subprocess.Popen[str]] = {}

    def go(self) -> None:
        began = time.monotonic()
        for folder in self.homes:
            folder.mkdir(parents=True)
        alone = [sys.executable, "src/train.py", *self.job, f"outputs={self.home / 'undisturbed'}"]
        with (self.home / "undisturbed.txt").open("w") as said:
            undisturbed = subprocess.Popen(alone, cwd=ROOT, stdout=said, stderr=said)
        for number in range(len(self.homes)):
            self._start(number)
        while self._whole() and self.faults:
            kind, at = self.faults.pop(0), time.monotonic()
            self.struck.append(kind)
            whom = self._strike(kind)
            followed = f"whole after {time.monotonic() - at:.0f} s" if self._whole() else "the run was over"
            print(
                LINE.format(f"{len(self.homes)} machines", kind, whom, f"{at - began:.1f} s", "", followed), flush=True
            )
        if self.faults:
            self._problem(f"{len(self.faults)} faults had no run to strike")
        if undisturbed.wait() != 0:
            raise SystemExit(f"the undisturbed run failed:\n{(self.home / 'undisturbed.txt').read_text()}")
        self._judge()

    def _start(self, number: int) -> None:
        own = self.homes[number]
        script = [sys.executable, str(ROOT / "src" / "train.py"), *self.command, f"outputs={own}"]
        found = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
        others = [folder for folder in self.homes if folder != own]
        with own.with_suffix(".txt").open("a") as said:
            output = {"stdout": said, "stderr": said, "env": {**os.environ, "PYTHONPATH": found}}
            self.running[number] = self.machines.start(number, script, others, cwd=ROOT, **output)

    def _strike(self, kind: str) -> str:
        """Returns whom it struck."""
        everybody = list(self.running)
        number = self.rng.choice(everybody[1:])
        if kind == "worker killed":
            number = self.rng.choice(everybody)
            for worker in workers_of(self.running[number].pid):
                os.kill(worker, signal.SIGKILL)
        elif kind in LINKS:
            self.machines.link(number, up=False)
            time.sleep(LINKS[kind])
            self.machines.link(number, up=True)
        else:
            killed = {"machine killed": [number], "keeper killed": [0], "all killed": everybody}[kind]
            for lost in killed:
                self.machines.kill(lost)
                self.running[lost].wait()
            if 0 in killed:  # who starts from now on goes on with the run
                folder = next(self.homes[0].glob("*/*"))
                self.command = [f"resume={folder}", *self.met, *(["seed=1"] if self.control else [])]
            time.sleep(self.rng.uniform(1, 5))
            for lost in killed:
                self._start(lost)
            return "all" if killed == everybody else f"machine {killed[0]}"
        return f"machine {number}"

    def _whole(self) -> bool:
        """Waits until all machines compute, and have saved since. False: the run is over, or they never do."""
        since, until = 0.0, time.monotonic() + PATIENCE
        while self.running[0].poll() is None:
            if time.monotonic() > until:
                self._problem(f"not whole after {PATIENCE} s")
                return False
            if not all(workers_of(process.pid) for process in self.running.values()):
                since = 0.0
            elif any(file.stat().st_mtime > since > 0 for file in self.homes[0].rglob("last.ckpt")):
                return True
            since = since or time.time()
            time.sleep(0.1)
        return False

    def _judge(self) -> None:
        """Waits for the run's end: is it that of the undisturbed one?"""
        until = time.monotonic() + PATIENCE
        for number, process in self.running.items():
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            if process.returncode != 0:
                self._problem(f"machine {number}: exit code {process.returncode}")
            if left := self.machines.processes(number):
                self._problem(f"machine {number}: {len(left)} processes left behind")
            if "Traceback" in self.homes[number].with_suffix(".txt").read_text():
                self._problem(f"machine {number}: a traceback on the console")
        ended, reference = (
            json.loads(next(home.glob("*/*/summary.json")).read_text())
            for home in (self.homes[0], self.home / "undisturbed")
        )
        for key, (found, value) in unequal(ended, reference).items():
            self._problem(f"{key} is {found}, undisturbed {value}")

    def _problem(self, text: str) -> None:
        print(f"PROBLEM {text}", flush=True)
        self.problems.append(text)


def workers_of(pid: int) -> list[int]:
    """The workers of a run's parent: its forks."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = Path(f"/proc/{pid}/cmdline").read_text()
        return [int(child) for child in children if Path(f"/proc/{child}/cmdline").read_text() == own]
    except OSError:  # one has ended meanwhile
        return []
