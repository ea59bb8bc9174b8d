"""A storm: machines of one run under scripts/torchrun.sh die or are cut off one after the other, and come back.

The machines are network namespaces. Each has its own run folders. torchrun starts again where it has ended, as an init
system or a cluster's controller starts it again. Linux and root only.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from signal import SIGKILL
from statistics import fmean
from typing import Any

from campaigns.campaign import Campaign, schedule
from campaigns.processes import Process
from network.machines import Machines

from lockstep.config.value_checks import ROOT

KILLED, CUT, STORE = "machine killed", "machine cut off", "store's host killed"
DOWN = (1.0, 5.0)  # seconds for which a machine is down
AGAIN = 0.5  # seconds until torchrun is started again where it has ended
PATIENCE = 180  # seconds until the run must take steps, or end
PORT = 29500
PARTS = ("noticing", "rendezvous", "start", "reading", "first step", "repeated", "fewer machines")


@dataclass(frozen=True)
class Plan:
    """What a storm does.

    Attributes:
        every: seconds between strikes.
        strikes: number of strikes.
        store_every: every so many seconds a strike hits the machine that serves torchrun's store; 0: never.
        calm: seconds of undisturbed steps before the first strike, whose rate is the reference.
        step: seconds of a step on all machines.
    """

    every: float
    strikes: int
    store_every: float = 120.0
    calm: float = 30.0
    step: float = 0.5

    @property
    def seconds(self) -> float:
        return self.calm + self.every * self.strikes

    def kinds(self, rng: Random) -> list[str]:
        """Return the kind of each strike."""
        kinds = schedule(rng, self.strikes, [KILLED, CUT])
        for number in range(self.strikes):
            if self.store_every and (number + 1) * self.every // self.store_every > number * self.every // self.store_every:
                kinds[number] = STORE
        return kinds


@dataclass
class Report:
    """What a storm has shown.

    Attributes:
        rate: steps a second before the storm.
        goodput: useful steps a second in the storm, as a share of `rate`.
        lost: seconds of the storm that did not become useful steps at `rate`, by cause.
        strikes: (seconds since the storm began, kind) of each strike.
        steps: (seconds since the storm began, steps completed) where the number grew.
        groups: (seconds since the storm began, machines) at the first step of each group of workers.
    """

    plan: Plan
    machines: int
    rate: float
    goodput: float
    seconds: float
    lost: dict[str, float]
    strikes: list[tuple[float, str]] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    groups: list[tuple[float, int]] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield a table: where the time of the storm went."""
        number, share = max(1, len(self.strikes)), 100 / self.seconds
        yield f"| a strike every {self.plan.every:g} s, {number} strikes | s a strike | share of the time |"
        yield "|---|---|---|"
        useful = self.goodput * self.seconds
        for name, seconds in {"useful steps": useful, **self.lost}.items():
            yield f"| {name} | {seconds / number:.2f} | {seconds * share:.0f}% |"
        yield f"goodput {self.goodput:.2f} (undisturbed {self.rate:.2f} steps/s)"

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Fleet:
    """Machines on which torchrun runs and is started again, until its run is complete.

    Args:
        homes: the `outputs` of each machine; the same folder for machines that share it.
        arguments: of src/train.py.
        logs: the folder of the events that the workers' devices write.
    """

    def __init__(self, machines: Machines, homes: Sequence[Path], arguments: Sequence[str], logs: Path) -> None:
        self.machines, self.homes, self.arguments, self.logs = machines, homes, list(arguments), logs
        self.server = len(homes) - 1  # the machine that serves torchrun's store; rank zero is on the first one
        self.processes: dict[int, Process] = {}
        self.due: dict[int, float] = {}  # when to start torchrun again, by machine
        self.texts: list[str] = []  # output of processes that have ended
        self.done: set[int] = set()
        for each in (logs, *homes):
            each.mkdir(parents=True, exist_ok=True)
        for number in range(len(homes)):
            self.start(number)

    def start(self, number: int) -> None:
        home = self.homes[number]
        endpoint = self.machines.address(self.server)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        engine = ["env", f"PATH={path}", str(ROOT / "scripts" / "torchrun.sh")]
        engine += [f"--nnodes=1:{len(self.homes)}", "--nproc-per-node=1", "--max-restarts=1000"]
        engine += [f"--rdzv-endpoint={endpoint}:{PORT}", "--rdzv-id=storm"]
        hidden = [other for other in self.homes if other != home]
        overrides = [*self.arguments, "strategy=ddp", f"outputs={home}"]
        command = self.machines.command(number, engine, hidden)
        self.processes[number] = Process(overrides, elsewhere=command)

    def tend(self, seconds: float = 0.0) -> None:
        """Start torchrun again where it has ended, for some seconds."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for number, process in [*self.processes.items()]:
                if process.code is not None:
                    self._ended(number, process, now)
            for number in [number for number, due in self.due.items() if due <= now]:
                del self.due[number]
                self.start(number)
            if now >= until:
                return
            time.sleep(min(0.05, until - now))

    def _ended(self, number: int, process: Process, now: float) -> None:
        self._note(number, process)
        if process.code == 0:
            self.done.add(number)
        else:
            self.due.setdefault(number, now + AGAIN)
        process.close()
        self.machines.kill(number)
        del self.processes[number]

    def _note(self, number: int, process: Process) -> None:
        """Keep the output of a process that has ended."""
        self.texts.append(process.text)
        with (self.logs / f"{self.machines.names[number]}.txt").open("a") as file:
            file.write(f"{process.text}\n--- exit code {process.code} after {process.age:.1f} s, {time.time():.2f}\n")

    def kill(self, number: int, seconds: float) -> None:
        """Kill all processes of a machine. It comes back after `seconds`."""
        self.machines.kill(number)
        if process := self.processes.pop(number, None):
            process.wait(10)
            self._note(number, process)
            process.close()
        self.due[number] = time.monotonic() + seconds

    def cut(self, number: int, seconds: float) -> None:
        self.machines.link(number, up=False)
        self.tend(seconds)
        self.machines.link(number, up=True)

    def lose_store(self, rng: Random, seconds: float) -> None:
        """Kill the machine that serves the store. Start all others with another one, once their torchrun has ended."""
        struck, others = self.server, [number for number in range(len(self.homes)) if number != self.server]
        self.kill(struck, PATIENCE)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and any(process.code is None for process in self.processes.values()):
            time.sleep(0.05)
        for number, process in [*self.processes.items()]:
            self._ended(number, process, time.monotonic())
        self.server = rng.choice(others)
        self.due = dict.fromkeys(others, time.monotonic()) | {struck: time.monotonic() + seconds}

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all machines in the order of time."""
        events = []
        for file in self.logs.glob("*.jsonl"):  # the last line of a killed worker may be incomplete
            events += [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        return sorted(events, key=lambda event: float(event["time"]))

    def steps(self) -> int:
        return max((event["step"] for event in self.events() if event["what"] == "step"), default=0)

    def close(self) -> None:
        for number in range(len(self.homes)):
            self.machines.link(number, up=True)
            self.machines.kill(number)
        for process in self.processes.values():
            process.close()


class Storm(Campaign):
    """One run through a storm, and where its time went."""

    claim = "each ended with the bits of one device"

    def __init__(self, machines: Machines, plan: Plan, *common: Any) -> None:
        super().__init__(*common)
        self.machines, self.plan, self.runs = machines, plan, 1
        self.report: Report | None = None

    def go(self) -> None:
        plan, count = self.plan, len(self.machines.names)
        self.undisturbed("strategy=auto", "devices=1")
        over = self.home / "over"
        pieces = next(int(text.partition("=")[2]) for text in self.job if text.startswith("pieces="))
        target = "campaigns.device.Device" if not self.control else "campaigns.device.Skips"
        logs = self.home / "events"
        options = f"folder: '{logs}', seconds: {plan.step * count / pieces}, until: '{over}'"
        homes = [self.home / name for name in self.machines.names]
        job = [*self.job, f"+extras.device={{_target_: {target}, {options}}}"]
        fleet = Fleet(self.machines, homes, job, logs)
        try:
            self._blow(fleet)
            self._wait_for_all(fleet)  # a machine that comes back after the end would start another run
            over.touch()
            self._end(fleet)
        finally:
            fleet.close()

    def _blow(self, fleet: Fleet) -> None:
        plan, rng = self.plan, self.rng
        self._wait_for_all(fleet)
        began = time.time() + plan.calm
        fleet.tend(plan.calm)
        strikes: list[tuple[float, str]] = []
        for number, kind in enumerate(plan.kinds(rng)):
            fleet.tend(began + number * plan.every - time.time())
            seconds = rng.uniform(*DOWN)
            target = fleet.server if kind == STORE else rng.choice(
                [each for each in range(len(fleet.homes)) if each != fleet.server]
            )
            strikes.append((time.time() - began, kind))
            self.struck.append(kind)
            before = fleet.steps()
            if kind == STORE:
                fleet.lose_store(rng, seconds)
            elif kind == CUT:
                fleet.cut(target, seconds)
            else:
                fleet.kill(target, seconds)
            self.print_line(f"{kind} (machine {target}, for {seconds:.1f} s) after {strikes[-1][0]:.0f} s, step {before}")
        fleet.tend(began + plan.every * plan.strikes - time.time())
        if fleet.done:
            self.problem("the run ended before the storm: give more max_epochs")
        self.report = account(fleet.events(), plan, len(fleet.homes), began, time.time(), strikes)
        for line in self.report.lines():
            print(line, flush=True)

    def _wait_for_all(self, fleet: Fleet) -> None:
        """Wait until a group of all machines takes steps."""
        since, until = time.time(), time.monotonic() + PATIENCE
        while time.monotonic() < until:
            fleet.tend(0.2)
            groups = {event["pid"] for event in fleet.events() if event.get("world") == len(fleet.homes)}
            if any(e["what"] == "step" and e["pid"] in groups and e["time"] > since for e in fleet.events()):
                return
        raise SystemExit("\n".join([f"not all machines compute after {PATIENCE} s", *output(fleet)]))

    def _end(self, fleet: Fleet) -> None:
        until = time.monotonic() + PATIENCE
        while len(fleet.done) < len(fleet.homes) and time.monotonic() < until:
            fleet.tend(0.2)
        if len(fleet.done) < len(fleet.homes):
            return self.problem("\n".join([f"the run did not end within {PATIENCE} s", *output(fleet)]))
        summaries = [path for home in {*fleet.homes} for path in home.glob("*/*/summary.json")]
        self.check_end(max(summaries, key=lambda path: path.stat().st_mtime).parent)
        if len({path.parent.name for path in summaries}) > 1:
            self.problem(f"stray folders: {', '.join(map(str, summaries))}")
        return None


def output(fleet: Fleet) -> list[str]:
    return [*fleet.texts[-len(fleet.homes) :], *(process.text for process in fleet.processes.values())]


# --- where the time went ---


@dataclass
class Group:
    """Workers of one rendezvous, from their first step to their last."""

    name: str
    world: int = 0
    times: dict[str, float] = field(default_factory=dict)  # of its slowest worker's start, by event
    steps: dict[int, float] = field(default_factory=dict)  # when each step was completed
    ended: list[float] = field(default_factory=list)  # when a worker noticed the end

    @property
    def first(self) -> float:
        return min(self.steps.values())

    @property
    def last(self) -> float:
        return max(self.steps.values())


def groups_of(events: Sequence[dict[str, Any]]) -> list[Group]:
    """Return the groups that have completed a step, in the order of time."""
    groups: dict[str, Group] = {}
    of_worker: dict[int, Group] = {}
    for event in events:
        if event["what"] == "starts":
            group = of_worker[event["pid"]] = groups.setdefault(event["group"], Group(event["group"], event["world"]))
            for name in ("born", "checked", "read"):
                group.times[name] = max(group.times.get(name, 0), event[name])
            continue
        group = of_worker[event["pid"]]
        if event["what"] == "begins":
            group.times["begins"] = max(group.times.get("begins", 0), event["time"])
        elif event["what"] == "step":
            group.steps.setdefault(event["step"], event["time"])
        else:
            group.ended.append(event["time"])
    return sorted((group for group in groups.values() if group.steps), key=lambda group: group.first)


def account(
    events: Sequence[dict[str, Any]],
    plan: Plan,
    machines: int,
    began: float,
    ended: float,
    strikes: list[tuple[float, str]],
) -> Report:
    """Return where the time between `began` and `ended` went."""
    groups = groups_of(events)
    calm = [moment for group in groups for moment in group.steps.values() if moment <= began]
    rate = (len(calm) - 1) / (max(calm) - min(calm))
    lost = dict.fromkeys(PARTS, 0.0)
    useful = 0.0
    most, before = 0, began  # steps completed, and until when the time is accounted for
    grown: list[tuple[float, int]] = []

    def spend(part: str, until: float) -> None:
        nonlocal before
        until = min(max(until, before), ended)
        lost[part] += until - before
        before = until

    for number, group in enumerate(groups):
        if group.first > began and number:
            earlier, times = groups[number - 1], group.times
            begins = times.get("begins", group.first)
            spend("noticing", max((t for t in earlier.ended if t < times["born"]), default=earlier.last))
            spend("rendezvous", times["born"])
            spend("start", times["checked"])
            spend("reading", times["read"])
            spend("first step", begins)
        for step, moment in sorted(group.steps.items()):
            if moment <= began:
                most = max(most, step)
                continue
            if step <= most:
                spend("repeated", moment)
                continue
            most = step
            start = before
            spend("fewer machines", moment)
            lost["fewer machines"] -= min(before - start, 1 / rate)
            if moment <= ended:
                useful += 1
                grown.append((moment - began, most))
    if grown:
        spend("fewer machines", ended)
    seconds = ended - began
    return Report(
        plan, machines, rate, useful / seconds / rate, seconds, lost, strikes, grown,
        [(group.first - began, group.world) for group in groups],
    )


