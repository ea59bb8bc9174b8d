"""Hit one run under torchrun over several machines: a worker, a machine, a link, the machine that serves the store.

The machines are network namespaces (scripts/lab/network/machines.py). None of them sees another one's run folders.
Linux and root only.
"""

import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

from campaigns.campaign import GONE, Campaign, schedule
from campaigns.faults import KILLED
from campaigns.processes import Process
from network.machines import Machines

from lockstep.checkpoint import io as checkpoint_io

LINKS = {"link down for 5 s": 5, "link down for 20 s": 20}
KINDS = ["worker killed", "machine killed", *LINKS, "store killed", "all killed"]
LASTING = 6  # epochs of the run for each fault, so that it outlasts them
PATIENCE = 180  # seconds until machines must compute again, or end
PORT = 29500
LOST = (1,)  # exit code of torchrun when its store is lost
# torchrun checks every second that all machines are alive, gives one up after five seconds without a message, and
# restarts one second after the last machine has joined.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1,read_timeout=60"


class SeveralMachines(Campaign):
    """The run and its faults.

    The control kills all machines and resumes with another seed, which must fail.
    """

    def __init__(self, machines: Machines, faults: int, *common: Any) -> None:
        super().__init__(*common)
        self.machines, self.runs = machines, 1
        self.faults = schedule(self.rng, faults, KINDS[-1:] if self.control else KINDS)
        self.homes = [self.home / name for name in machines.names]
        self.last_fault = self.home / "last_fault"
        pace = [f"+callbacks.pace={{_target_: campaigns.flips.Pace, until: '{self.last_fault}'}}"]
        self.arguments = [*self.job, "strategy=ddp", "hang_timeout=10", *pace]
        self.server = 0  # the machine that serves torchrun's store
        self.folder: Path | None = None  # of a run to resume, relative to each machine's home
        self.processes: dict[int, Process] = {}

    def go(self) -> None:
        self.undisturbed()
        try:
            for number, home in enumerate(self.homes):
                home.mkdir()
                self._start(number)
            while self._whole() and self.faults:
                kind, at = self.faults.pop(0), time.monotonic()
                self.struck.append(kind)
                after, hit = self.processes[0].age, self._strike(kind)
                whole = f"whole after {time.monotonic() - at:.0f} s" if self._whole() else "the run was over"
                self.print_line(f"{kind} ({hit}) after {after:.1f} s", whole)
            if self.faults:
                self.problem(f"the run ended before {len(self.faults)} faults")
            self.last_fault.touch()
            for number in range(len(self.homes)):
                self._ended(number, 0)
            self._check_homes()
        finally:
            for number, process in self.processes.items():
                self.machines.kill(number)
                process.close()

    def _start(self, number: int) -> None:
        home = self.homes[number]
        endpoint, local = (self.machines.address(machine) for machine in (self.server, number))
        engine = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable, "-m", "torch.distributed.run"]
        engine += [f"--nnodes=1:{len(self.homes)}", "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d"]
        engine += [f"--rdzv-endpoint={endpoint}:{PORT}", f"--local-addr={local}"]
        engine += [f"--rdzv-conf=is_host={int(number == self.server)},{RENDEZVOUS}"]
        command = self.machines.command(number, engine, hidden=[other for other in self.homes if other != home])
        overrides = [f"resume={home / self.folder}", *self.arguments] if self.folder else self.arguments
        self.processes[number] = Process([*overrides, f"outputs={home}"], elsewhere=command)

    def _strike(self, kind: str) -> str:
        """Inject a fault. Return its target in words."""
        everybody = list(self.processes)
        number = self.rng.choice([each for each in everybody if each != self.server])
        if kind == "worker killed":
            number = self.rng.choice(everybody)
            self.processes[number].strike(SIGKILL, *self._workers(number))
        elif kind in LINKS:
            self.machines.link(number, up=False)
            time.sleep(LINKS[kind])
            self.machines.link(number, up=True)
        elif kind == "machine killed":
            self.machines.kill(number)
            self._ended(number, *KILLED)
            time.sleep(self.rng.uniform(1, 5))
            self._start(number)
        else:
            killed = everybody if kind == "all killed" else [self.server]
            for each in killed:
                self.machines.kill(each)
            for each in everybody:
                self._ended(each, *(KILLED if each in killed else LOST))
            struck, self.server = self.server, number
            self._go_on()
            return "all" if killed == everybody else f"machine {struck}"
        return f"machine {number}"

    def _go_on(self) -> None:
        """Start all machines again, as a user does with the run's folder."""
        (self.folder, *strays) = sorted({Path(*path.parts[-2:]) for home in self.homes for path in home.glob("*/*")})
        if strays:
            self.problem(f"stray folders: {', '.join(map(str, strays))}")
        copies = [home / self.folder / "checkpoints" / "last.ckpt" for home in self.homes]
        newest = max(checkpoint_io.load(copy)["global_step"] for copy in copies if copy.exists())
        self.arguments = ["seed=1"] if self.control else []
        for number in range(len(self.homes)):
            self._start(number)
        self._whole()
        output = "\n".join(process.text for process in self.processes.values())
        if max(map(int, re.findall(r"resumes after step (\d+)", output)), default=0) < newest:
            self.problem(
                f"a machine has a checkpoint of step {newest}, but the run did not resume from it",
                self.processes[self.server],
            )

    def _workers(self, number: int) -> list[int]:
        """Return the pids that torchrun has started on a machine."""
        pid = self.processes[number].pid
        with suppress(OSError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def _whole(self) -> bool:
        """Wait until all machines compute and each has a new checkpoint.

        Return False if one has ended, or if this takes too long.
        """
        since, until = 0.0, time.monotonic() + PATIENCE
        while time.monotonic() < until:
            time.sleep(0.1)
            if any(process.code is not None for process in self.processes.values()):
                return False
            if not all(map(self._workers, self.processes)):
                since = 0.0
                continue
            since = since or time.time()
            if all(any(file.stat().st_mtime > since for file in home.rglob("last.ckpt")) for home in self.homes):
                return True
        self.problem(f"not all machines compute after {PATIENCE} s", self.processes[self.server])
        return False

    def _ended(self, number: int, *codes: int) -> None:
        """Wait for the end of a machine's torchrun, and check it."""
        process = self.processes[number]
        process.wait(PATIENCE)
        if process.code not in codes:
            self.problem(f"{self.machines.names[number]}: exit code {process.code}, not {codes[0]}", process)
        if process.code == 0 and "Traceback" in process.text:  # torchrun prints one itself if it fails
            self.problem("a traceback on the console", process)
        until = time.monotonic() + GONE
        while self.machines.processes(number) and time.monotonic() < until:
            time.sleep(0.1)
        if left := self.machines.processes(number):
            self.problem(f"{len(left)} processes left behind on {self.machines.names[number]}", process)
            self.machines.kill(number)
        process.close()

    def _check_homes(self) -> None:
        """Check that one machine has the undisturbed run's end, and all the same last checkpoint."""
        summaries = [path for home in self.homes for path in home.glob("*/*/summary.json")]
        self.check_end(max(summaries, key=lambda path: path.stat().st_mtime).parent)
        copies = [path.read_bytes() for home in self.homes for path in home.glob("*/*/checkpoints/last.ckpt")]
        if len(copies) != len(self.homes) or len(set(copies)) > 1:
            self.problem(f"{len(copies)} copies of the last checkpoint, {len(set(copies))} of them different")
