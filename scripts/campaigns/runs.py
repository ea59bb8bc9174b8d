"""One run that is struck again and again: its lives, and what must be so after each of them."""

from __future__ import annotations

import json
import math
import random
import re
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.faults import INTERRUPTED, TERMINATED, Fault, damage
from campaigns.lives import Life

LOADERS = ("num_workers=0", "num_workers=0", "num_workers=2")  # what a life draws from
GRACE = 30  # seconds that a life may take to end when something struck
PATIENCE = 5  # seconds after which nobody trains on who was asked to end
YOUNG = 2  # seconds until a run trusts that nobody holds a folder (lockstep.launch.scratch), and some more
GONE = 8  # seconds: loader processes look for their parent every 5
LINE = "{:<15} {:<21} {:<14} {:>6}  {:>4}  {}"  # of the table


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
    control: bool = False
    blows: list[Blow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    runs: int = 0

    @property
    def struck(self) -> list[str]:
        """The faults so far, by name."""
        return [blow.fault.name for blow in self.blows]

    def go(self) -> None:
        home = self.outputs / "undisturbed"
        with closing(Life([*self.job, f"outputs={home}", *self.layouts[0]])) as life:
            while life.code is None and not life.ranks():
                time.sleep(0.01)
            self.starting = life.age
            if life.wait(600) != 0:
                raise SystemExit(f"the undisturbed run failed, exit code {life.code}:\n{life.text}")
            self.seconds = life.age
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
        last = False
        while not last:
            target = self.targets[0] if self.targets else None
            refusal = target is not None and identity(newest(target)) in self.damaged
            with closing(Life(self._arguments(target))) as life:
                last = self._followed(life, target, refusal)
        self._tell()

    def _followed(self, life: Life, target: Path | None, refusal: bool) -> bool:
        """Strikes a life, waits for its end and judges it. Returns whether it was the last."""
        campaign = self.campaign
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
        return code == 0 or not (blow or refusal)  # who ended without a reason would do so again

    def _arguments(self, target: Path | None) -> list[str]:
        campaign = self.campaign
        arguments = [*campaign.job, f"outputs={self.home}"] if target is None else [f"resume={target}"]
        if campaign.control and self.blow:
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
        scratch, began = Path(tempfile.gettempdir()), time.time() - life.age
        # Killed parents leave theirs to the next life; of the last moments before it, to the one after.
        files = [file for file in scratch.iterdir() if not began - YOUNG < file.stat().st_mtime < began]
        if life.code in (0, 1) and files:
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
        if pairs := unequal(ended, reference):
            told = (f"{key} is {found}, undisturbed {value}" for key, (found, value) in pairs.items())
            self._problem(life, "; ".join(told))
        if unfinished := [path.name for path in folder.rglob(".*.tmp")]:
            self._problem(life, f"temporary files in the run folder: {', '.join(unfinished)}")
        if self.blow:
            asked = self.blow.code == 0 and {*TERMINATED, *INTERRUPTED} & set(self.blow.fault.codes)
            if asked and newest(folder).stat().st_mtime > self.blow.time + PATIENCE:
                self._problem(life, f"trained on for more than {PATIENCE} s when it was asked to end")
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


def unequal(ended: dict[str, Any], reference: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs in two summaries that should be equal. Metrics may by a rounding: of their sum's order."""
    keys = ("weights_sha256", "status", "steps", "samples_seen")
    pairs = {key: (ended.get(key), reference[key]) for key in keys if ended.get(key) != reference[key]}
    for key, value in reference["metrics"].items():
        found = ended.get("metrics", {}).get(key, math.nan)
        if not math.isclose(found, value, rel_tol=1e-6, abs_tol=1e-9):
            pairs[key] = found, value
    return pairs


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
