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
from typing import Any

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
KINDS = [(place, lasting) for lasting in (False, True) for place in PLACES]
SEEN = {  # by what, and what that says, with whom it names
    "audit": r"rank (\d+) \([^)]*\) computed a wrong gradient",
    "sums": r"rank (\d+) failed: Damaged",
    "replicas": r"the weights of rank (\d+) ",
    "finite": r"the gradient is not finite",
    "verify": r"is not what its ledger says",
}
ROW = "{:<22} {:>6} {:>9} {:>6} {:>6} {:>9} {:>7} {:>7} {:>7} {:>6} {:>6}  {}"


@dataclass
class Outcome:
    """What came of a fault: what it was `seen` by, empty if by nothing; so many `steps` later; whom that `named`."""

    changed: bool
    seen: str = ""
    steps: int = 0
    named: int | None = None
    right: bool = False


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
    struck: list[str] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    runs: int = 0

    def go(self) -> None:
        for name, layout in CLEAN.items() if self.clean else ():
            self._cleanly(name, layout)
        if not self.faults:
            return
        code, self.undisturbed = self._run(LAYOUT)
        if code or self._verified(self.undisturbed):
            raise SystemExit(f"{self.undisturbed}: the undisturbed run failed, exit code {code}, or is not verified")
        self.length = summary(self.undisturbed)["steps"]
        kinds = [kind for kind in KINDS if not self.aimed or kind[0] != "checkpoint"]
        for place, lasting in schedule(self.faults, self.random, kinds):
            self._strike(place, lasting)
        self._tell()

    def _cleanly(self, name: str, layout: list[str]) -> None:
        """Training without a fault: nothing may be said."""
        steps = -(-self.clean // len(CLEAN))
        code, folder = self._run([*layout, f"max_steps={steps}", "max_epochs=1000000", "checkpoint_every=null"])
        audited = summary(folder)["metrics"].get("audit/pieces", 0)
        print(f"{name}: {steps} steps without a fault, exit code {code}, {audited:g} pieces audited", flush=True)
        if code:
            self._problem(f"{name}: a false alarm: {summary(folder)['error']}")

    def _strike(self, place: str, lasting: bool) -> None:
        """One run with one fault."""
        rank = 0 if place == "checkpoint" else "null" if self.aimed and not lasting else self.random.randrange(RANKS)
        fault = {"place": place, "rank": rank, "step": self.random.randint(2, self.length // 2)}
        fault |= {"bits": self.random.choice((1, 1, 3)), "lasting": lasting, "seed": self.random.randrange(10**6)}
        options = {"_target_": "campaigns.flips.Flips", **fault}
        code, folder = self._run([*LAYOUT, *(f"+callbacks.flips.{key}={value}" for key, value in options.items())])
        name = f"{place}, {'lasting' if lasting else 'once'}"
        if not (folder / NAME).exists():
            return self._problem(f"{folder}: {name}: nothing was struck, exit code {code}")
        self.struck.append(name)
        struck, said = json.loads((folder / NAME).read_text()), summary(folder)["error"] or ""
        if code == 0:
            self._forget(folder)
            said = "" if recorded(folder) == recorded(self.undisturbed) or self.control else self._verified(folder)
        outcome = Outcome(bool(code) or recorded(folder) != recorded(self.undisturbed))
        found = {by: match for by, words in SEEN.items() if (match := re.search(words, said))}
        for outcome.seen, match in found.items():
            outcome.steps = int(re.findall(r"step (\d+)", said)[0]) - struck["step"]
            if match.groups() and place != "sent":  # a sum does not tell who sent it wrong, only where it was seen
                outcome.named, outcome.right = int(match[1]), int(match[1]) == struck["rank"]
        self.outcomes.setdefault(name, []).append(outcome)
        where = f"rank {struck['rank']}, step {struck['step']}, {fault['bits']} bits of {struck['name']}"
        print(f"{name}: {where}: {said or 'no change' * (not outcome.changed) or 'NOT SEEN'}", flush=True)
        if outcome.changed and not outcome.seen:
            self._problem(f"{folder}: {name}: {where}: not seen, exit code {code}: {said}")
        if outcome.named is not None and not outcome.right:
            self._problem(f"{folder}: {name}: {where}: rank {outcome.named} was named")

    def _tell(self) -> None:
        print("\n" + ROW.format("fault", "struck", "no change", *SEEN, "unseen", "named", "right", "steps until seen"))
        everything = [outcome for outcomes in self.outcomes.values() for outcome in outcomes]
        for name, outcomes in [*sorted(self.outcomes.items()), ("all", everything)]:
            seen = Counter(outcome.seen for outcome in outcomes if outcome.changed)
            steps = [outcome.steps for outcome in outcomes if outcome.seen]
            named = [outcome.right for outcome in outcomes if outcome.named is not None]
            waited = f"median {median(steps):g}, most {max(steps)}" if steps else ""
            same = sum(not outcome.changed for outcome in outcomes)
            counts = [seen[by] for by in (*SEEN, "")]
            print(ROW.format(name, len(outcomes), same, *counts, len(named), sum(named), waited))

    def _run(self, overrides: list[str]) -> tuple[int | None, Path]:
        """The exit code of a run, and its folder."""
        home = self.outputs / f"run_{self.runs}"
        self.runs += 1
        with closing(Life([*self.job, f"outputs={home}", *overrides])) as life:
            code = life.wait(3600)
            folders = [*home.glob("*/*")]
            if code is None or not folders:
                raise SystemExit(f"{' '.join(life.arguments)}: exit code {code}:\n{life.text}")
            return code, folders[0]

    def _verified(self, folder: Path) -> str:
        """What verify.py finds wrong in all steps of a run."""
        chosen = f"steps=[{recorded(folder)[-1][0]}]"
        with closing(Life([f"run={folder}", f"outputs={self.outputs}", chosen], "verify")) as life:
            return life.text.partition("error: ")[2].strip() if life.wait(3600) else ""

    def _forget(self, folder: Path) -> None:
        """Takes the fault out of what a run says of itself: a device would not have told."""
        lines = [parsed(text) for text in read(folder / LEDGER)]
        config = lines[0]["about"]["config"]
        del config["callbacks"]["flips"]
        texts: list[str] = []
        for line in lines:
            line |= {"config_sha256": config_sha256(config), "before": line_sha256(texts[-1]) if texts else None}
            texts.append(text_of(line))
        (folder / LEDGER).write_text("".join(f"{text}\n" for text in texts))

    def _problem(self, text: str) -> None:
        print(f"PROBLEM {text}", flush=True)
        self.problems.append(text)


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def recorded(folder: Path) -> list[Any]:
    """What a run's ledger says of its steps."""
    lines = map(parsed, read(folder / LEDGER))
    return [(line["step"], line["weights_sha256"], line.get("optimizer_sha256")) for line in lines]
