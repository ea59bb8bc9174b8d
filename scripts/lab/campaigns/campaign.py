"""The base of all campaigns: runs of one job, the checks of those that faults hit, and a report."""

import math
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from typing import TypeVar

from campaigns.processes import Process

from lockstep.report.summary import summary_of

HOUR = 3600
END_SECONDS = 8  # seconds until all processes must have ended: loader processes check for their parent every 5
T = TypeVar("T")


class Campaign:
    """Runs of one job that faults hit.

    Args:
        job: overrides, without a layout.
        home: a folder for the runs.
        control: make the campaign fail on purpose: resume runs with another seed, skip a step, or do not verify.

    Attributes:
        struck: names of the faults so far.
        problems: descriptions of what went wrong.
        runs: number of runs with faults.
    """

    claim = "all ended bitwise equal, nothing was left behind"

    def __init__(self, name: str, job: list[str], home: Path, rng: Random, control: bool = False) -> None:
        self.name, self.job, self.home, self.rng, self.control = name, job, home, rng, control
        self.struck: list[str] = []
        self.problems: list[str] = []
        self.runs = 0

    def go(self) -> None:
        raise NotImplementedError

    def undisturbed(self, *layout: str) -> Path:
        """Run the job without faults. Its end is the reference for all runs. Return its folder.

        Raises:
            SystemExit: it failed.
        """
        home = self.home / "undisturbed"
        with closing(Process([*self.job, f"outputs={home}", *layout])) as process:
            process.wait(HOUR, process.ranks)
            self.starting = process.age  # seconds until the workers exist
            if process.wait(HOUR) != 0:
                raise SystemExit(f"the undisturbed run failed, exit code {process.code}:\n{process.text}")
            self.seconds = process.age
        (folder,) = home.glob("*/*")
        self.reference = summary_of(folder)
        return folder

    def check_process(self, process: Process, *codes: int) -> None:
        """Check a process after its end: exit code, remaining processes, traceback."""
        if process.code not in codes:
            self.problem(f"exit code {process.code}, not {' or '.join(map(str, sorted(codes)))}", process)
        if commands := process.kill_remaining(END_SECONDS):
            self.problem(f"processes left behind: {', '.join(sorted(commands))}", process)
        if "Traceback" in process.text:
            self.problem("a traceback on the console", process)

    def check_end(self, folder: Path, process: Process | None = None) -> None:
        """Check that a completed run has the same end as the undisturbed run."""
        ended, reference = summary_of(folder), self.reference
        for key in ("weights_sha256", "status", "steps", "samples_seen"):
            if ended.get(key) != reference[key]:
                self.problem(f"{key} is {ended.get(key)}, undisturbed {reference[key]}", process)
        for key, value in reference["metrics"].items():
            actual = ended.get("metrics", {}).get(key, math.nan)
            if not math.isclose(actual, value, rel_tol=1e-6, abs_tol=1e-9):  # the order of summation may differ
                self.problem(f"{key} is {actual}, undisturbed {value}", process)
        if unfinished := [path.name for path in folder.rglob(".*.tmp")]:
            self.problem(f"temporary files in the run folder: {', '.join(unfinished)}", process)

    def problem(self, what: str, process: Process | None = None) -> None:
        self.print_line(f"PROBLEM {what}")
        lines = [f"  struck last: {self.struck[-1]}"] if self.struck else []
        if process:
            lines += [
                f"  process: {' '.join(process.arguments)}",
                *(f"    {line}" for line in process.text.splitlines()[-12:]),
            ]
        self.problems.append("\n".join([f"{self.name}: {what}", *lines]))

    def print_line(self, *parts: str) -> None:
        print(f"{self.name}: {', '.join(filter(None, parts))}", flush=True)


def schedule(rng: Random, number: int, kinds: list[T]) -> list[T]:
    """Return `number` faults in random order. Each kind occurs equally often, give or take one."""
    drawn: list[T] = []
    while len(drawn) < number:
        drawn += rng.sample(kinds, len(kinds))
    return drawn[:number]


def run_campaigns(planned: Callable[[Path, ExitStack], Sequence[Campaign]]) -> int:
    """Run campaigns in a folder of their own, and print the report. Return the exit code.

    Args:
        planned: makes the campaigns from that folder and a stack that closes what they need.
    """
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # background jobs of a shell ignore SIGINT, and forks inherit that
    work = Path(tempfile.mkdtemp(prefix="chaos_"))
    scratch = work / "tmp"
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "cache")  # torch does not delete this cache
    try:
        with ExitStack() as stack:
            campaigns = planned(work, stack)
            for campaign in campaigns:
                campaign.go()
    except KeyboardInterrupt:
        shutil.rmtree(work)
        print("interrupted: nothing is concluded", file=sys.stderr)
        return 130
    except BaseException:
        shutil.rmtree(work)
        raise
    problems = [problem for campaign in campaigns for problem in campaign.problems]
    kinds = Counter(name for campaign in campaigns for name in campaign.struck)
    print("\n" + ", ".join(f"{count} x {name}" for name, count in kinds.most_common()))
    done = f"{kinds.total()} faults in {sum(campaign.runs for campaign in campaigns)} runs"
    if problems:
        print(f"\n{done}, {len(problems)} problems; all files are in {work}\n", *problems, sep="\n")
        return 1
    shutil.rmtree(work)
    print(f"{done} survived: {campaigns[0].claim}")
    return 0


def one_each(overrides: Sequence[str]) -> list[str]:
    """Return overrides without those that a later one of the same key replaces."""
    return [*{override.partition("=")[0]: override for override in overrides}.values()]
