"""One run on machines under `lockstep torchrun`, which is started again where it has ended, and its record.

An init system, or a cluster's controller, starts it again like that. The command is always the same; `--rdzv-id` names
the run's folder, so a machine continues the run also if no other is left. Linux and root only.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from subprocess import DEVNULL
from typing import Any

from campaigns.campaign import END_SECONDS, Campaign
from campaigns.processes import Process
from network.machines import Machines

AGAIN = 0.5  # seconds until torchrun is started again where it has ended
PATIENCE = 180  # seconds until machines must take steps, or end
REST = 600  # seconds for the rest of the run, after the last fault
PORT = 29500
# TCP repeats a packet that a cut link has lost after pauses that double; this limits them to 1 s. Linux 6.15 or newer.
RETRY = ["sh", "-c", "echo 1000 2>/dev/null > /proc/sys/net/ipv4/tcp_rto_max_ms"]


class Record:
    """What the devices of a run's workers write (campaigns/device.py).

    Args:
        home: the campaign's folder.
        seconds: for which a device computes a piece.
        skips: whether the run skips a step after each restart, as a control.
    """

    def __init__(self, home: Path, seconds: float, skips: bool = False) -> None:
        self.folder, self._hurry = home / "record", home / "hurry"
        self.folder.mkdir(parents=True)
        options = f"folder: '{self.folder}', seconds: {seconds}, until: '{self._hurry}', skips: {str(skips).lower()}"
        self.override = f"+extras.device={{_target_: campaigns.device.Device, {options}}}"

    def hurry(self) -> None:
        """From now on steps take no longer than they need."""
        self._hurry.touch()

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all machines in the order of time."""
        events = [event for file in self.folder.glob("*.jsonl") for event in self.events_of(file.stem)]
        return sorted(events, key=lambda event: float(event["time"]))

    def events_of(self, machine: str) -> list[dict[str, Any]]:
        """Return the events of a machine."""
        lines = (self.folder / f"{machine}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]  # a killed worker's last line may be cut off

    def steps(self) -> int:
        """Return the number of optimizer steps so far."""
        return max((event["step"] for event in self.events() if event["what"] == "step"), default=0)


class Fleet:
    """Machines on which torchrun runs and is started again, until the run is complete.

    Args:
        homes: the `outputs` of each machine; the same folder for machines that share it.
        job: overrides of src/train.py.

    Attributes:
        server: the machine that serves torchrun's store. Rank zero is on the first machine that takes part.
        completed: the machines whose torchrun has ended well.
        gave_up: the machines, by name, whose torchrun has failed although its machine and its store were there.
        problems: what was wrong where torchrun has ended by itself.
    """

    def __init__(self, machines: Machines, homes: Sequence[Path], job: Sequence[str], record: Record) -> None:
        self.machines, self.homes, self.job, self.record = machines, homes, [*job, record.override], record
        self.server = len(homes) - 1
        self.completed: set[int] = set()
        self.gave_up: list[str] = []
        self.problems: list[str] = []
        self._processes: dict[int, Process] = {}
        self._due: dict[int, float] = {}  # when to start torchrun again, by machine
        self._texts: list[str] = []  # output of processes that have ended
        for number, home in enumerate(homes):
            home.mkdir(parents=True, exist_ok=True)
            machines.start(number, RETRY, stderr=DEVNULL).wait()
            self._start(number)

    def tend(self, seconds: float = 0.0, ready: Callable[[], bool] = lambda: False) -> bool:
        """Start torchrun again where it has ended, for some seconds, or until `ready`. Return whether it is ready."""
        until = time.monotonic() + seconds
        while True:
            for number, process in [*self._processes.items()]:
                if process.code is not None:
                    if process.code:
                        self.gave_up.append(self.machines.names[number])
                    self._ended(number)
            for number in [number for number, due in self._due.items() if due <= time.monotonic()]:
                del self._due[number]
                self._start(number)
            if ready():
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(min(0.1, max(0.0, until - time.monotonic())))

    def tend_until_all_compute(self) -> None:
        """Wait until a group of all machines completes a step.

        Raises:
            SystemExit: that takes too long.
        """
        since = time.time()

        def computes() -> bool:
            events = self.record.events()
            groups = {event["pid"] for event in events if event.get("world") == len(self.homes)}
            return any(e["what"] == "step" and e["pid"] in groups and e["time"] > since for e in events)

        if not self.tend(PATIENCE, computes):
            raise SystemExit(f"not all machines compute after {PATIENCE} s:\n{self.output()}")

    def finish(self, campaign: Campaign) -> None:
        """Let the run complete, and check its end."""
        self.tend_until_all_compute()  # a machine that came back after the end would begin another run
        self.record.hurry()
        has_ended = self.tend(REST, lambda: len(self.completed) == len(self.homes))
        for problem in self.problems:
            campaign.problem(problem)
        if not has_ended:
            return campaign.problem(f"the run did not end within {REST} s:\n{self.output()}")
        summaries = [path for home in {*self.homes} for path in home.glob("*/*/summary.json")]
        if len({path.parent.name for path in summaries}) > 1:
            campaign.problem(f"stray folders: {', '.join(map(str, summaries))}")
        campaign.check_end(max(summaries, key=lambda path: path.stat().st_mtime).parent)
        return None

    def kill(self, number: int, seconds: float) -> None:
        """Kill all processes of a machine. It comes back after `seconds`."""
        self.machines.kill(number)
        if process := self._processes.get(number):
            process.wait(10)
            self._ended(number)
        self._due[number] = time.monotonic() + seconds

    def cut(self, number: int, seconds: float) -> None:
        """Cut a machine's link for `seconds`."""
        self.machines.link(number, up=False)
        self.tend(seconds)
        self.machines.link(number, up=True)

    def kill_server(self, rng: Random, seconds: float) -> None:
        """Kill the machine that serves the store, for `seconds`. The others end, and start with another one's store."""
        lost, others = self.server, [number for number in range(len(self.homes)) if number != self.server]
        self.kill(lost, seconds)
        for number in others:
            if process := self._processes.get(number):
                if process.wait(PATIENCE) != 1:
                    name = self.machines.names[number]
                    self.problems.append(f"without its store torchrun on {name} ended with {process.code}, not 1")
                self._ended(number)
        self.server = rng.choice(others)
        self._due |= dict.fromkeys(others, time.monotonic())

    def output(self) -> str:
        """Return the newest output of torchrun."""
        return "\n".join([*self._texts[-len(self.homes) :], *(each.text for each in self._processes.values())])

    def close(self) -> None:
        """End all processes, and mend the network."""
        self.machines.part([])
        for number in range(len(self.homes)):
            self.machines.link(number, up=True)
            self.machines.kill(number)
        for process in self._processes.values():
            process.close()

    def _start(self, number: int) -> None:
        home = self.homes[number]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        engine = ["env", f"PATH={path}", "lockstep", "torchrun", f"--nnodes=1:{len(self.homes)}"]
        engine += ["--nproc-per-node=1", "--max-restarts=1000", "--rdzv-id=storm"]
        engine += [f"--rdzv-endpoint={self.machines.address(self.server)}:{PORT}"]
        command = self.machines.command(number, engine, hidden=[other for other in self.homes if other != home])
        self._processes[number] = Process([*self.job, "strategy=ddp", f"outputs={home}"], prefix=command)

    def _ended(self, number: int) -> None:
        process = self._processes.pop(number)
        text = f"{process.text}\n--- {self.machines.names[number]} ends with {process.code} after {process.age:.1f} s"
        self._texts.append(text)
        with (self.record.folder / "output.txt").open("a") as file:
            file.write(text + "\n")
        if process.code in (0, 1):
            self._check_end(number, process)
        if process.code == 0:
            self.completed.add(number)
        else:
            self._due[number] = time.monotonic() + AGAIN
        self.machines.kill(number)
        process.close()

    def _check_end(self, number: int, process: Process) -> None:
        name, until = self.machines.names[number], time.monotonic() + END_SECONDS
        while (left := self.machines.processes(number)) and time.monotonic() < until:
            time.sleep(0.1)
        if left:
            self.problems.append(f"{len(left)} processes left behind on {name}")
        if process.code == 0 and (traceback := traceback_of_program(process.text)):
            self.problems.append(f"a traceback on the console of {name}:\n{traceback}")


def traceback_of_program(text: str) -> str:
    """Return a console's text from the first traceback of the program on, or an empty text.

    torchrun logs tracebacks of its own, such as when another machine's torchrun ends first. Each of their lines begins
    with the logger's prefix.
    """
    at = f"\n{text}".find("\nTraceback")
    return text[at:] if at >= 0 else ""
