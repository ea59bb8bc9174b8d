"""Flip bits without an error, and check whether the run detects it:

    python scripts/lab/silent_faults.py --faults 200 --aimed --clean 20000

Each run has three devices and one fault: in weights, activations or gradients, in messages sent or received when
gradients are summed, or in a checkpoint; once or repeatedly. The campaign passes if the audit, the checks of sums,
replicas and finite gradients, or `lockstep verify` at the end detect every change, if no rank is blamed wrongly, and
if nothing is reported in N steps --clean without a fault.

Exit codes: 0 all survived, 1 not, 2 bad input, 130 interrupted. Linux only.
"""

import argparse
import json
import re
import sys
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from campaigns.campaign import HOUR, Campaign, one_each, run_campaigns, schedule
from campaigns.flips import FLIP_FILE, PLACES
from campaigns.processes import Process

from lockstep.extras.ledger.ledger_file import LEDGER_FILE, config_sha256, line_sha256, parse_line, read, text_of
from lockstep.programs.common.showing import markdown
from lockstep.report.summary import summary_of

JOB = [  # small steps, because there are many runs
    *("model.dropout=0.25", "max_epochs=2", "log_every=5", "threads=1", "accelerator=cpu", "name=chaos"),
    *("data=synthetic", "data.samples=4000", "data.image_size=12", "data.num_classes=3"),
    *("batch_size=16", "max_steps=12", "checkpoint_every=4", "exact=true", "pieces=4", "extras=[audit,ledger]"),
    *("extras.audit.share=1.0", "logger=none", "scheduler=constant"),
]
RANKS = 3  # two can outvote a wrong one
LAYOUT = ["strategy=ddp", f"devices={RANKS}"]
CLEAN = {  # layouts for runs without a fault
    "one device": ["strategy=auto", "devices=1"],
    "dp on 2": ["strategy=dp", "devices=2"],
    "ddp on 2": ["strategy=ddp", "devices=2"],
    "ddp on 3": LAYOUT,
    "one device, bf16": ["strategy=auto", "devices=1", "precision=bf16-mixed"],
    "ddp on 3, bf16": [*LAYOUT, "precision=bf16-mixed"],
}
MESSAGES = {  # check -> its message, with the rank that it names
    "audit": r"rank (\d+) \([^)]*\) computed a wrong gradient",
    "sums": r"rank (\d+) failed: CorruptMessage|"
    r"do not match what the ranks sent.*?(?:what rank (\d+) sends or gets|$)",
    "replicas": r"the weights of rank (\d+) ",
    "not finite": r"the gradient is not finite",
    "lockstep verify": r"differs from its ledger",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=10, help="one run for each")
    parser.add_argument("--aimed", action="store_true", help="faults that happen once hit an audited piece")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="also run N steps without a fault")
    parser.add_argument("--control", action="store_true", help="do not verify: the campaign must fail")
    parser.add_argument("overrides", nargs="*", help="for train.py, such as model=resnet18")
    options = parser.parse_args()

    def planned(work: Path, _: ExitStack) -> list[Campaign]:
        job, rng = one_each([*JOB, *options.overrides]), Random(options.seed)
        return [Silent(options.faults, options.clean, options.aimed, "silent", job, work, rng, options.control)]

    return run_campaigns(planned)


class Outcome(NamedTuple):
    """The check that detected a fault, the steps until then, and whether it named the right rank."""

    fault: str
    by: str  # a key of `MESSAGES`, or `no change`, or `unseen`
    steps: int = 0
    right: bool | None = None  # None: no rank was named


class Silent(Campaign):
    """Runs with one fault each. The control does not verify, so undetected changes remain, and the campaign must fail.

    Args:
        clean: steps without a fault, over all layouts.
        aimed: faults that happen once hit the audited piece of their step.
    """

    claim = "every change was detected, no rank was blamed wrongly, and there was no false alarm"

    def __init__(self, faults: int, clean: int, aimed: bool, *common: Any) -> None:
        super().__init__(*common)
        self.faults, self.clean, self.aimed = faults, clean, aimed

    def go(self) -> None:
        steps = -(-self.clean // len(CLEAN))
        for name, layout in CLEAN.items() if steps else ():
            code, folder = self._run([*layout, f"max_steps={steps}", "max_epochs=1000000", "checkpoint_every=null"])
            ended = summary_of(folder)
            self.print_line(name, f"{steps} steps", f"{ended['metrics'].get('audit/pieces', 0)} pieces audited")
            if code:
                self.problem(f"{name}: a false alarm: {ended['error']}")
        if not self.faults:
            return
        folder = self.undisturbed(*LAYOUT)
        self.recorded = recorded(folder)
        if wrong := self._verified(folder):
            raise SystemExit(f"the undisturbed run is not verified: {wrong}")
        places = [
            place for place in PLACES if place != "checkpoint" or not self.aimed
        ]  # no piece is audited in a checkpoint
        kinds = [f"{place}, {how}" for place in places for how in ("once", "lasting")]
        self._summarize([self._strike(*kind.split(", ")) for kind in schedule(self.rng, self.faults, kinds)])

    def _strike(self, place: str, how: str) -> Outcome:
        """Run once with one fault."""
        rank = 0 if place == "checkpoint" else "null" if self.aimed and how == "once" else self.rng.randrange(RANKS)
        fault = {"_target_": "campaigns.flips.Flips", "place": place, "rank": rank, "lasting": how == "lasting"}
        fault |= {"step": self.rng.randint(2, self.reference["steps"] // 2), "seed": self.rng.randrange(10**6)}
        fault["bits"] = self.rng.choice((1, 1, 3))
        self.struck.append(f"{place}, {how}")
        code, folder = self._run([*LAYOUT, *(f"+callbacks.flips.{key}={value}" for key, value in fault.items())])
        if not (folder / FLIP_FILE).exists():
            raise SystemExit(f"{folder}: nothing was struck, exit code {code}")
        at, message = json.loads((folder / FLIP_FILE).read_text()), summary_of(folder)["error"] or ""
        by, steps, right = "unseen", 0, None
        if code == 0:
            remove_fault(folder)
            by = "no change" if recorded(folder) == self.recorded else "unseen"
            message = self._verified(folder) if by == "unseen" and not self.control else ""
        for seen, words in MESSAGES.items():
            if match := re.search(words, message):
                by, steps = seen, int(re.findall(r"\bstep (\d+)", message)[0]) - at["step"]
                named = [number for number in match.groups() if number]
                if named:  # the sender of one wrong sum can't be identified
                    right = int(named[0]) == at["rank"]
        where = f"rank {at['rank']}, step {at['step']}, {fault['bits']} bits of {at['name']}"
        self.print_line(self.struck[-1], where, message or by)
        if by == "unseen" or right is False:
            self.problem(f"{folder}: {where}: not detected, or the wrong rank is named; exit code {code}, {message}")
        return Outcome(self.struck[-1], by, steps, right)

    def _summarize(self, outcomes: list[Outcome]) -> None:
        columns, rows = ("no change", *MESSAGES, "unseen"), []
        for name in [*sorted({outcome.fault for outcome in outcomes}), ""]:
            group = [outcome for outcome in outcomes if name in outcome.fault]
            counts, named = Counter(outcome.by for outcome in group), [o.right for o in group if o.right is not None]
            steps = [outcome.steps for outcome in group if outcome.by in MESSAGES]
            waited = f"median {median(steps):g}, most {max(steps)}" if steps else ""
            right = f"{sum(named)} of {len(named)}"
            rows.append([name or "all", len(group), *(counts[column] for column in columns), waited, right])
        print("\n" + markdown(["fault", "struck", *columns, "steps later", "right rank named"], rows))

    def _run(self, overrides: list[str]) -> tuple[int | None, Path]:
        """Run the job. Return the exit code and the folder of the run."""
        home = self.home / f"run_{self.runs}"
        self.runs += 1
        with closing(Process([*self.job, f"outputs={home}", *overrides])) as process:
            process.wait(HOUR)
            for folder in home.glob("*/*"):
                return process.code, folder
            raise SystemExit(f"no run: {process.text}")

    def _verified(self, folder: Path) -> str:
        """Return the error of lockstep verify on the steps of a run, or an empty string."""
        steps = f"steps=[{recorded(folder)[-1][0]}]"
        with closing(Process([f"run={folder}", f"outputs={self.home}", steps], "verify")) as process:
            code = process.wait(HOUR)
            if code not in (0, 1):
                raise SystemExit(f"{folder}: lockstep verify has not compared, exit code {code}: {process.text}")
            return process.text.partition("error: ")[2].strip() if code else ""


def remove_fault(folder: Path) -> None:
    """Remove the fault from a run's ledger.

    The ledger records the callback that injects the fault; a faulty device would leave no such record.
    """
    lines = [parse_line(text) for text in read(folder / LEDGER_FILE)]
    config = lines[0]["about"]["config"]
    del config["callbacks"]["flips"]
    before = None
    for line in lines:
        line |= {"config_sha256": config_sha256(config), "before": before}
        before = line_sha256(text_of(line))
    (folder / LEDGER_FILE).write_text("".join(f"{text_of(line)}\n" for line in lines))


def recorded(folder: Path) -> list[Any]:
    """Return the steps and hashes in a run's ledger."""
    lines = map(parse_line, read(folder / LEDGER_FILE))
    return [(line["step"], line["weights_sha256"], line.get("optimizer_sha256")) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
