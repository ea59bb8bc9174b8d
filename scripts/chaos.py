"""Strikes a run again and again, resumes it as a user would, and compares its end with that of the undisturbed run:

    python scripts/chaos.py --faults 20 --layouts single,dp,ddp,ddp_accumulate
    python scripts/chaos.py --faults 300 --fork --exact model.dropout=0.5

Workers, their parent or all of them are killed, asked to end, or stopped for a while; the disk is full from one moment
on; the newest checkpoint is damaged where it lies. What strikes, whom and when follows from --seed (the moment by the
clock, so no two campaigns are quite the same). Each life after a fault is `resume=<run folder>`. A damaged checkpoint
must be refused by name; then the run goes on from best.ckpt, or starts again. Under --exact the number of devices and
the strategy change at random from life to life.

A campaign is survived when every run ended with the weights_sha256 and the metrics of the undisturbed one, each life
with the exit code that its fault calls for and without a traceback, and nothing was left behind: no process (hence no
port), no temporary file, no folder but the runs' own.

Exit codes: 0 all survived, 1 not. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from resource import RLIMIT_FSIZE, prlimit

from lives import Life, preload

JOB = [
    "data=digits",
    "model.dropout=0.25",
    "max_epochs=2",
    "batch_size=64",
    "checkpoint_every=5",
    "log_every=5",
    "threads=1",
    "accelerator=cpu",  # a crowd of workers on one GPU would measure its memory, not the promise
    "name=chaos",
]
LAYOUTS = {
    "single": ["strategy=auto", "devices=1"],
    "dp": ["strategy=dp", "devices=2"],
    "ddp": ["strategy=ddp", "devices=2"],
    "ddp_accumulate": ["strategy=ddp", "devices=2", "accumulate_grad_batches=2"],
}
EXACT = ["exact=true", "pieces=4"]
EXACT_LAYOUTS = [["strategy=auto", "devices=1"]] + [
    [f"strategy={s}", f"devices={n}"] for s in ("ddp", "dp") for n in (2, 3, 4)
]
LOADERS = ("num_workers=0", "num_workers=0", "num_workers=2")  # what a life draws from
GRACE = 30  # seconds that a life may take to end when something struck
LATE = 5  # seconds after which nobody trains on who was asked to end
FULL = 1 << 18  # bytes of the largest file when the disk is full
GONE = 8  # seconds: loader processes look for their parent every 5


LINE = "{:<15} {:<21} {:<14} {:>6}  {:>4}  {}"  # of the table


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What strikes. `strike` returns whom it struck, empty if they were gone; `codes` are the exit codes that it may
    lead to, beside 0 for a run that was over by then; `later`: only when there are workers (before, a signal finds no
    handler)."""

    name: str
    strike: Callable[[Life, random.Random], str]
    codes: tuple[int, ...]
    later: bool = False
    damage: bool = False  # the newest checkpoint is damaged when the life is over


def _rank(signum: int, pause: float = 0) -> Callable[[Life, random.Random], str]:
    def strike(life: Life, rng: random.Random) -> str:
        ranks = life.ranks()
        if not ranks:
            return ""
        number = rng.randrange(len(ranks))
        life.strike(signum, ranks[number])
        if pause:
            seconds = rng.uniform(0, pause)
            time.sleep(seconds)
            life.strike(signal.SIGCONT, ranks[number])
            return f"rank {number}, {seconds:.1f} s"
        return f"rank {number}"

    return strike


def _parent(*signals: int) -> Callable[[Life, random.Random], str]:
    def strike(life: Life, rng: random.Random) -> str:
        for number, signum in enumerate(signals):
            time.sleep(rng.uniform(0, 0.5) if number else 0)
            life.strike(signum, life.pid)
        return "parent"

    return strike


def _group(*signals: int) -> Callable[[Life, random.Random], str]:
    def strike(life: Life, rng: random.Random) -> str:
        for number, signum in enumerate(signals):
            time.sleep(rng.uniform(0, 0.5) if number else 0)
            members = life.members()
            life.strike(signum, *members)
        return f"all {len(members)}"

    return strike


def _disk_full(life: Life, rng: random.Random) -> str:
    """No file of the parent and the workers may grow beyond less than a checkpoint. (Their loader processes keep
    batches in shared memory, which is no disk, but counts for this limit.)"""
    for pid in (life.pid, *life.ranks()):
        with contextlib.suppress(ProcessLookupError):
            prlimit(pid, RLIMIT_FSIZE, (FULL, FULL))
    return f"at {FULL >> 10} kB"


KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
FAULTS = (
    Fault("SIGKILL", _rank(KILL), (1,), later=True),
    Fault("SIGKILL", _parent(KILL), (128 + KILL,)),
    Fault("SIGKILL", _group(KILL), (128 + KILL,)),
    Fault("SIGTERM", _rank(TERM), (128 + TERM,), later=True),
    Fault("SIGTERM", _parent(TERM), (128 + TERM,)),
    Fault("SIGTERM", _group(TERM), (128 + TERM,)),
    Fault("Ctrl-C", _group(INT), (128 + INT,)),
    Fault("Ctrl-C twice", _group(INT, INT), (128 + INT,)),
    Fault("SIGUSR1", _parent(signal.SIGUSR1), (), later=True),
    Fault("SIGUSR1", _group(signal.SIGUSR1), (), later=True),
    Fault("SIGSTOP", _rank(signal.SIGSTOP, pause=3), (), later=True),
    Fault("disk full", _disk_full, (1,), later=True),
    Fault("SIGKILL, a bit flips", _group(KILL), (128 + KILL,), damage=True),
    Fault("SIGKILL, end cut off", _group(KILL), (128 + KILL,), damage=True),
)


def damage(path: Path, fault: Fault, rng: random.Random) -> None:
    """Flips one bit of a file, or cuts off its end, in place: a second name of the file is struck too."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if "flips" in fault.name:
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        else:
            file.truncate(rng.randrange(size))


# --- a campaign -------------------------------------------------------------------------------------------------------


@dataclass
class Blow:
    """A fault that struck: a line of the table."""

    fault: Fault
    whom: str
    age: float  # of the life that it struck, seconds
    time: float  # since the epoch
    code: int | None = None
    followed: list[str] = field(default_factory=list)


@dataclass
class Campaign:
    """Runs of one job on one layout (or, exact, on changing ones): struck until they end, until no fault is left.

    Attributes:
        blows: what struck so far.
        problems: what should not have happened.
    """

    name: str
    job: list[str]
    layouts: list[list[str]]
    faults: list[Fault]
    outputs: Path
    rng: random.Random
    fork: bool = False
    control: bool = False
    blows: list[Blow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    runs: int = 0

    def go(self) -> None:
        home = self.outputs / "undisturbed"
        life = Life([*self.job, f"outputs={home}", *self.layouts[0]], self.fork)
        while life.code is None and not life.ranks():
            time.sleep(0.01)
        starting = life.age
        if life.wait(600) != 0:
            life.close()
            raise SystemExit(f"the undisturbed run failed, exit code {life.code}:\n{life.text}")
        self.seconds = life.age
        self.starting = starting
        life.close()
        self.reference = json.loads(next(home.glob("*/*/summary.json")).read_text())
        while self.faults:
            Run(self, self.outputs / f"run_{self.runs}").go()
            self.runs += 1


class Run:
    """One run, from its start to its end in as many lives as it takes."""

    def __init__(self, campaign: Campaign, home: Path) -> None:
        self.campaign, self.home = campaign, home
        self.targets: list[Path] = []  # what to resume from; none: start
        self.damaged: set[tuple[int, int]] = set()  # files that must be refused, by inode and time
        self.folders: set[Path] = set()
        self.blow: Blow | None = None  # the last one

    def go(self) -> None:
        while not self._live():
            pass
        self._tell()

    def _live(self) -> bool:
        """One life. Returns whether it was the last."""
        campaign = self.campaign
        target = self.targets[0] if self.targets else None
        refusal = target is not None and identity(newest(target)) in self.damaged
        life = Life(self._arguments(target), campaign.fork)
        blow = None if refusal else self._strike(life)
        code = life.wait(GRACE if blow and blow.fault.codes else 60 + 20 * campaign.seconds)
        if self.blow:
            self.blow.followed += [_beginning(life, target, code)]
        if blow:
            self._tell()
            self.blow, blow.code = blow, code
        expected = {2} if refusal else {0, *(blow.fault.codes if blow else ())}
        if code not in expected:
            self._problem(life, f"exit code {code}, not {' or '.join(map(str, sorted(expected)))}")
        if target is not None and refusal and str(newest(target)) not in life.text:
            self._problem(life, f"{newest(target)} is damaged, and not refused by its name")
        self._nothing_left(life, target)
        if code == 0:
            self._compare(life)
        elif refusal:
            self.targets.pop(0)
        elif blow:
            self._what_next(blow)
        life.close()
        return code == 0 or not (blow or refusal)  # who ended without a reason would do so again

    def _arguments(self, target: Path | None) -> list[str]:
        campaign = self.campaign
        arguments = [*campaign.job, f"outputs={self.home}"] if target is None else [f"resume={target}"]
        if campaign.control and target is not None:
            arguments.append("seed=1")
        return [*arguments, *campaign.rng.choice(campaign.layouts), campaign.rng.choice(LOADERS)]

    def _strike(self, life: Life) -> Blow | None:
        """Waits for the moment and strikes, unless no fault is left or the run is over before."""
        campaign = self.campaign
        if not campaign.faults:
            return None
        fault = campaign.faults[0]
        early = not fault.later and campaign.rng.random() < 0.2
        while not early and life.code is None and not life.ranks():
            time.sleep(0.01)
        life.wait(campaign.rng.uniform(0.05, campaign.starting if early else campaign.seconds - campaign.starting))
        if life.code is not None:
            return None
        blow = Blow(fault, "", life.age, time.time())
        blow.whom = fault.strike(life, campaign.rng)
        if not blow.whom:
            return None
        campaign.faults.pop(0)
        campaign.blows.append(blow)
        return blow

    def _what_next(self, blow: Blow) -> None:
        """After a life that a fault has ended: where the next one begins, as its user would decide."""
        self.targets = [folder for folder in sorted(self.folders) if newest(folder).exists()][-1:]
        if not self.targets:
            return
        last, best = newest(self.targets[0]), self.targets[0] / "checkpoints" / "best.ckpt"
        if blow.fault.damage:
            damage(last, blow.fault, self.campaign.rng)
            self.damaged.add(identity(last))
        if identity(last) in self.damaged and best.exists():
            self.targets.append(best)

    # --- what must be so ---

    def _nothing_left(self, life: Life, target: Path | None) -> None:
        campaign = self.campaign
        if processes := life.left(GONE):
            self._problem(life, f"{len(processes)} processes left behind: {', '.join(sorted(set(processes.values())))}")
        scratch = Path(tempfile.gettempdir())
        if life.code in (0, 1) and (files := list(scratch.iterdir())):  # killed parents leave it to the next life
            self._problem(life, f"temporary files left: {', '.join(sorted(file.name for file in files))}")
            scratch.rename(self.home.with_name(f"tmp_{len(campaign.problems)}"))
            scratch.mkdir()
        new = set(self.home.glob("*/*")) - self.folders
        self.folders |= new
        if len(new) > (target is None):
            self._problem(life, f"stray folders: {', '.join(map(str, new))}")
        if "Traceback" in life.text:
            self._problem(life, "a traceback on the console")

    def _compare(self, life: Life) -> None:
        """After a life that ended well: is this the undisturbed run's end?"""
        folder, before = max(self.folders), len(self.campaign.problems)
        ended, reference = json.loads((folder / "summary.json").read_text()), self.campaign.reference
        for key in ("status", "weights_sha256", "steps", "samples_seen"):
            if ended[key] != reference[key]:
                self._problem(life, f"{key} is {ended[key]}, undisturbed {reference[key]}")
        for key, value in reference["metrics"].items():
            if not math.isclose(ended["metrics"].get(key, math.nan), value, rel_tol=1e-6, abs_tol=1e-9):
                self._problem(life, f"{key} is {ended['metrics'].get(key)}, undisturbed {value}")
        if unfinished := [path.name for path in folder.rglob(".*.tmp")]:
            self._problem(life, f"temporary files in the run folder: {', '.join(unfinished)}")
        if self.blow:
            asked = self.blow.code == 0 and {128 + TERM, 128 + INT} & set(self.blow.fault.codes)
            if asked and newest(folder).stat().st_mtime > self.blow.time + LATE:
                self._problem(life, f"trained on for more than {LATE} s when it was asked to end")
            self.blow.followed.append("equal" if len(self.campaign.problems) == before else "NOT EQUAL")

    def _problem(self, life: Life, what: str) -> None:
        struck = f"{self.blow.fault.name} {self.blow.whom} after {self.blow.age:.1f} s" if self.blow else "nothing"
        said = "".join(f"\n    {line}" for line in life.text.strip().splitlines()[-12:])
        arguments = " ".join(life.arguments)
        self.campaign.problems.append(f"{self.campaign.name}: {what}\n  struck: {struck}\n  life: {arguments}{said}")
        print(f"PROBLEM {what}", flush=True)

    def _tell(self) -> None:
        if blow := self.blow:
            when, followed = f"{blow.age:.1f} s", ", ".join(blow.followed)
            print(
                LINE.format(self.campaign.name, blow.fault.name, blow.whom, when, str(blow.code), followed), flush=True
            )


def newest(target: Path) -> Path:
    """The checkpoint that `resume=<target>` means."""
    return target / "checkpoints" / "last.ckpt" if target.is_dir() else target


def identity(path: Path) -> tuple[int, int]:
    """Tells a file from the one that takes its place."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _beginning(life: Life, target: Path | None, code: int | None) -> str:
    if code == 2 and target is not None:
        return f"{newest(target).name} refused"
    found = re.search(r"resumes after step \d+", life.text)
    return found[0] if found else "starts again" if target is None else f"resumes from {newest(target).name}"


# --- the command ------------------------------------------------------------------------------------------------------


def schedule(number: int, rng: random.Random) -> list[Fault]:
    """`number` faults in random order, each kind as often as the others."""
    drawn: list[Fault] = []
    while len(drawn) < number:
        drawn += rng.sample(FAULTS, len(FAULTS))
    return drawn[:number]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=len(FAULTS), help="in all, over the layouts")
    parser.add_argument(
        "--layouts", default=",".join(LAYOUTS), help="with --exact: these are left out, they change at random"
    )
    parser.add_argument("--exact", action="store_true", help="another layout in each life, exact=true")
    parser.add_argument("--fork", action="store_true", help="lives are forks of this process: about 5 s less for each")
    parser.add_argument("--control", action="store_true", help="resume with another seed: must not be survived")
    parser.add_argument("overrides", nargs="*", help="for train.py, such as model=resnet18")
    options = parser.parse_args()
    if unknown := set(options.layouts.split(",")) - set(LAYOUTS):
        parser.error(f"--layouts: there is no {', '.join(sorted(unknown))}; known: {', '.join(LAYOUTS)}")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would lives
    work = Path(tempfile.mkdtemp(prefix="chaos_"))
    scratch = work / "tmp"
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "cache")  # a cache of torch's, that it keeps
    if options.fork:
        preload()
    given = {
        override.split("=")[0]: override for override in [*JOB, *(EXACT if options.exact else ()), *options.overrides]
    }
    layouts = (
        {"exact": EXACT_LAYOUTS} if options.exact else {name: [LAYOUTS[name]] for name in options.layouts.split(",")}
    )
    rng = random.Random(options.seed)
    faults = schedule(options.faults, rng)
    campaigns = [
        Campaign(
            name,
            [*given.values()],
            choice,
            faults[number :: len(layouts)],
            work / name,
            rng,
            options.fork,
            options.control,
        )
        for number, (name, choice) in enumerate(layouts.items())
    ]
    print(LINE.format("layout", "fault", "whom", "after", "exit", "what followed"))
    for campaign in campaigns:
        campaign.go()
    return conclude(campaigns, work)


def conclude(campaigns: list[Campaign], work: Path) -> int:
    """The last words, and the exit code."""
    problems = [problem for campaign in campaigns for problem in campaign.problems]
    kinds = Counter(blow.fault.name for campaign in campaigns for blow in campaign.blows)
    print("\n" + ", ".join(f"{count} x {name}" for name, count in kinds.most_common()))
    runs = sum(campaign.runs for campaign in campaigns)
    if problems:
        print(f"\n{kinds.total()} faults in {runs} runs, {len(problems)} problems; all files are in {work}\n")
        print("\n".join(problems))
        return 1
    shutil.rmtree(work)
    print(f"{kinds.total()} faults in {runs} runs survived: all ended bitwise equal, nothing was left behind")
    return 0


if __name__ == "__main__":
    sys.exit(main())
