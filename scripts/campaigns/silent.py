"""Runs in which bits flip and nobody says so: what is seen of it, after how many steps, and who is named."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from campaigns.faults import schedule
from campaigns.flips import NAME, PLACES
from campaigns.lives import Life

from lockstep.run.ledger import NAME as LEDGER
from lockstep.run.ledger import config_sha256, line_sha256, parsed, read, text_of

RANKS = 3  # of which two can say that the other one is wrong
LAYOUT = ["strategy=ddp", f"devices={RANKS}"]
CLEAN = {  # layouts on which nothing strikes
    "one device": ["strategy=auto", "devices=1"],
    "dp on 2": ["strategy=dp", "devices=2"],
    "ddp on 2": ["strategy=ddp", "devices=2"],
    "ddp on 3": LAYOUT,
    "one device, bf16": ["strategy=auto", "devices=1", "precision=bf16-mixed"],
    "ddp on 3, bf16": [*LAYOUT, "precision=bf16-mixed"],
}
HOW = ("once", "lasting")
SEEN = {  # by what, and what that says, with whom it names
    "audit": r"rank (\d+) \([^)]*\) computed a wrong gradient",
    "sums": r"rank (\d+) failed: Damaged",
    "replicas": r"the weights of rank (\d+) ",
    "finite": r"the gradient is not finite",
    "verify": r"is not what its ledger says",
}
ROW = "{:<22} {:>6} {:>9} {:>6} {:>5} {:>9} {:>7} {:>7} {:>7} {:>8}  {}"


class Outcome(NamedTuple):
    """What came of a fault: what it was seen `by`, so many `steps` later, and whether it named the right rank."""

    fault: str
    by: str  # of `SEEN`; or `no change`, `unseen`
    steps: int = 0
    right: bool | None = None  # None: nobody was named


@dataclass
class Silent:
    """Runs of one job, each of which a fault strikes.

    Args:
        clean: steps without a fault, over all layouts.
        aimed: a fault that passes strikes the piece that is audited in its step.
        control: nothing is verified: must leave changes that nothing has seen.

    Attributes:
        problems: what should not have happened: a false alarm, a wrong rank named, a change that nothing has seen.
    """

    job: list[str]
    faults: int
    clean: int
    aimed: bool
    outputs: Path
    random: Random
    control: bool = False
    problems: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    runs: int = 0

    @property
    def struck(self) -> list[str]:
        """The faults so far, by name."""
        return [outcome.fault for outcome in self.outcomes]

    def go(self) -> None:
        for name, layout in CLEAN.items() if self.clean else ():
            steps = -(-self.clean // len(CLEAN))
            code, folder = self._run([*layout, f"max_steps={steps}", "max_epochs=1000000", "checkpoint_every=null"])
            ended = summary(folder)
            audited = ended["metrics"].get("audit/pieces", 0)
            print(
                f"{name}: {steps} steps, exit code {code}, {audited} pieces audited {ended['error'] or ''}", flush=True
            )
            if code:
                self._problem(f"{name}: a false alarm: {ended['error']}")
        if not self.faults:
            return
        code, folder = self._run(LAYOUT)
        self.undisturbed, self.length = recorded(folder), summary(folder)["steps"]
        if code or self._verified(folder):
            raise SystemExit(f"{folder}: the undisturbed run failed, exit code {code}, or is not verified")
        places = [place for place in PLACES if place != "checkpoint" or not self.aimed]  # none is audited in one
        for name in schedule(self.faults, self.random, [f"{place}, {how}" for place in places for how in HOW]):
            self.outcomes.append(self._strike(*name.split(", ")))
        self._tell()

    def _strike(self, place: str, how: str) -> Outcome:
        """One run with one fault."""
        rank = 0 if place == "checkpoint" else "null" if self.aimed and how == "once" else self.random.randrange(RANKS)
        fault = {"_target_": "campaigns.flips.Flips", "place": place, "rank": rank, "lasting": how == "lasting"}
        fault |= {"step": self.random.randint(2, self.length // 2), "seed": self.random.randrange(10**6)}
        fault["bits"] = self.random.choice((1, 1, 3))
        code, folder = self._run([*LAYOUT, *(f"+callbacks.flips.{key}={value}" for key, value in fault.items())])
        if not (folder / NAME).exists():
            raise SystemExit(f"{folder}: nothing was struck, exit code {code}")
        at, said = json.loads((folder / NAME).read_text()), summary(folder)["error"] or ""
        where = f"{place}, {how}: rank {at['rank']}, step {at['step']}, {fault['bits']} bits of {at['name']}"
        by, steps, right = "unseen", 0, None
        if code == 0:
            forget(folder)
            by = "no change" if recorded(folder) == self.undisturbed else "unseen"
            said = self._verified(folder) if by == "unseen" and not self.control else ""
        for seen, words in SEEN.items():
            if match := re.search(words, said):
                by, steps = seen, int(re.findall(r"\bstep (\d+)", said)[0]) - at["step"]
                if match.groups() and place != "sent":  # a sum tells where it is seen, not who sent another one
                    right = int(match[1]) == at["rank"]
        print(f"{where}: {said or by}", flush=True)
        if by == "unseen" or right is False:
            self._problem(f"{folder}: {where}: not seen, or the wrong rank is named; exit code {code}, {said}")
        return Outcome(f"{place}, {how}", by, steps, right)

    def _tell(self) -> None:
        columns = ("no change", *SEEN, "unseen")
        print("\n" + ROW.format("fault", "struck", *columns, "right", "steps until seen"))
        for name in [*sorted({outcome.fault for outcome in self.outcomes}), ""]:
            found = [outcome for outcome in self.outcomes if name in outcome.fault]
            counts, named = Counter(outcome.by for outcome in found), [o.right for o in found if o.right is not None]
            steps = [outcome.steps for outcome in found if outcome.by in SEEN]
            waited = f"median {median(steps):g}, most {max(steps)}" if steps else ""
            right = f"{sum(named)} of {len(named)}"
            print(ROW.format(name or "all", len(found), *(counts[column] for column in columns), right, waited))

    def _run(self, overrides: list[str]) -> tuple[int | None, Path]:
        """The exit code of a run, and its folder."""
        home = self.outputs / f"run_{self.runs}"
        self.runs += 1
        with closing(Life([*self.job, f"outputs={home}", *overrides])) as life:
            life.wait(3600)
            for folder in home.glob("*/*"):
                return life.code, folder
            raise SystemExit(f"no run: {life.text}")

    def _verified(self, folder: Path) -> str:
        """What verify.py finds wrong in the steps of a run."""
        steps = f"steps=[{recorded(folder)[-1][0]}]"
        with closing(Life([f"run={folder}", f"outputs={self.outputs}", steps], "verify")) as life:
            return life.text.partition("error: ")[2].strip() if life.wait(3600) else ""

    def _problem(self, text: str) -> None:
        print(f"PROBLEM {text}", flush=True)
        self.problems.append(text)


def forget(folder: Path) -> None:
    """Takes the fault out of what a run's ledger says of it: a device would not have told."""
    lines = [parsed(text) for text in read(folder / LEDGER)]
    config = lines[0]["about"]["config"]
    del config["callbacks"]["flips"]
    before = None
    for line in lines:
        line |= {"config_sha256": config_sha256(config), "before": before}
        before = line_sha256(text_of(line))
    (folder / LEDGER).write_text("".join(f"{text_of(line)}\n" for line in lines))


def recorded(folder: Path) -> list[Any]:
    """What a run's ledger says of its steps."""
    lines = map(parsed, read(folder / LEDGER))
    return [(line["step"], line["weights_sha256"], line.get("optimizer_sha256")) for line in lines]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found
