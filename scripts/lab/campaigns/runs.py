"""Hit runs on one machine again and again, resume them, and check each process after its end.

The faults are signals, a full disk, and damage to the newest checkpoint.
"""

import re
import signal
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from resource import RLIMIT_FSIZE, prlimit
from typing import Any

from campaigns.campaign import HOUR, Campaign
from campaigns.processes import Process

LOADERS = ("num_workers=0", "num_workers=0", "num_workers=2")  # the choices for a start
GRACE = 30  # seconds until the program must end after a fault
PATIENCE = 5  # seconds after SIGTERM or SIGINT within which training must stop
UNLOCKED_SECONDS = 2  # a little more than the seconds for which a run keeps unlocked folders (scratch_folder)
FULL_DISK_BYTES = 1 << 18  # largest file in bytes on a full disk: less than a checkpoint


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        target: a `rank`, the `parent`, or `all`. With `disk` there is no signal; the parent and the workers
            get a full disk. Their loader processes do not, because they use shared memory, which counts for that limit.
        signals: sent one after the other.
        codes: exit codes that the fault may cause, besides 0 for a run that was already complete.
        pause: longest pause between two signals, in seconds.
        later: wait until workers exist, because earlier a signal finds no handler.
        damage: damage the newest checkpoint after the process has ended.
    """

    name: str
    target: str
    signals: tuple[int, ...]
    codes: tuple[int, ...]
    pause: float = 0.0
    later: bool = False
    damage: bool = False

    def strike(self, process: Process, rng: Random) -> str:
        """Inject the fault. Return the target in words, or an empty string if it had already ended."""
        ranks = process.ranks()
        if self.target == "disk":
            for pid in (process.pid, *ranks):
                with suppress(ProcessLookupError):
                    prlimit(pid, RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))
            return f"at {FULL_DISK_BYTES >> 10} kB"
        number = rng.randrange(len(ranks) or 1)
        pids = {"rank": ranks[number : number + 1], "parent": [process.pid], "all": [*process.members()]}[self.target]
        for at, signum in enumerate(self.signals):
            time.sleep(rng.uniform(0, self.pause) if at else 0)
            process.strike(signum, *pids)
        named = {"rank": f"rank {number}", "parent": "parent", "all": f"all {len(pids)}"}
        return named[self.target] if pids else ""


KILL, TERM, INT, USR1 = (signal.SIGKILL,), (signal.SIGTERM,), (signal.SIGINT,), (signal.SIGUSR1,)
KILLED, TERMINATED, INTERRUPTED = (128 + signal.SIGKILL,), (128 + signal.SIGTERM,), (128 + signal.SIGINT,)
FAULTS = [
    Fault("SIGKILL", "rank", KILL, (1,), later=True),
    Fault("SIGKILL", "parent", KILL, KILLED),
    Fault("SIGKILL", "all", KILL, KILLED),
    Fault("SIGTERM", "rank", TERM, TERMINATED, later=True),
    Fault("SIGTERM", "parent", TERM, TERMINATED),
    Fault("SIGTERM", "all", TERM, TERMINATED),
    Fault("Ctrl-C", "all", INT, INTERRUPTED),
    Fault("Ctrl-C twice", "all", INT * 2, INTERRUPTED, pause=0.5),
    Fault("SIGUSR1", "parent", USR1, (), later=True),
    Fault("SIGUSR1", "all", USR1, (), later=True),
    Fault("SIGSTOP", "rank", (signal.SIGSTOP, signal.SIGCONT), (), pause=3, later=True),
    Fault("disk full", "disk", (), (1,), later=True),
    Fault("SIGKILL, a bit flips", "all", KILL, KILLED, damage=True),
    Fault("SIGKILL, end cut off", "all", KILL, KILLED, damage=True),
]


def damage(path: Path, fault: Fault, rng: Random) -> None:
    """Flip one bit of a file or cut off its end, in place, so that hard links to it are damaged too."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if "flips" in fault.name:
        content[at] ^= 1 << rng.randrange(8)
    else:
        del content[at:]
    path.write_bytes(content)


# --- runs -------------------------------------------------------------------------------------------------------------


class Runs(Campaign):
    """Runs on one layout, or with exact on changing layouts, each hit until it completes, until no fault is left.

    Args:
        layouts: each start draws one of these.
    """

    def __init__(self, layouts: list[list[str]], faults: list[Fault], *common: Any) -> None:
        super().__init__(*common)
        self.layouts, self.faults = layouts, faults

    def go(self) -> None:
        self.undisturbed(*self.layouts[0])
        while self.faults:
            Run(self, self.home / f"run_{self.runs}").go()
            self.runs += 1


class Run:
    """One run, from its start to its end, in as many starts as it takes."""

    def __init__(self, campaign: Runs, home: Path) -> None:
        self.campaign, self.home, self.rng = campaign, home, campaign.rng
        self.targets: list[Path] = []  # checkpoints or folders to resume from; empty: start anew
        self.damaged: set[tuple[int, int]] = set()  # damaged files, which must be refused, by inode and time
        self.folders: set[Path] = set()
        self.struck = False  # a fault has hit this run

    def go(self) -> None:
        last = False
        while not last:
            target = self.targets[0] if self.targets else None
            arguments = [*self.campaign.job, f"outputs={self.home}"] if target is None else [f"resume={target}"]
            arguments += ["seed=1"] if self.campaign.control and self.struck else []
            arguments += [*self.rng.choice(self.campaign.layouts), self.rng.choice(LOADERS)]
            with closing(Process(arguments)) as process:
                last = self._run_once(process, target)

    def _run_once(self, process: Process, target: Path | None) -> bool:
        """Hit a program, wait for its end and check it. Return True if it was the run's last."""
        campaign, problems = self.campaign, len(self.campaign.problems)
        refused = target is not None and identity(newest(target)) in self.damaged
        fault, hit = (None, "") if refused else self._strike(process)
        at = time.time()
        code = process.wait(GRACE if fault and fault.codes else 60 + 20 * campaign.seconds)
        codes = fault.codes if fault else ()
        campaign.check_process(process, *((2,) if refused else (0, *codes)))
        if target is not None and refused and str(newest(target)) not in process.text:
            campaign.problem(f"{newest(target)} is damaged, but was not refused by name", process)
        self._check_files(process, target)
        if code == 0:
            folder = max(self.folders)
            campaign.check_end(folder, process)
            if {*TERMINATED, *INTERRUPTED} & {*codes} and newest(folder).stat().st_mtime > at + PATIENCE:
                campaign.problem(f"trained for more than {PATIENCE} s after the signal to end", process)
        elif refused:
            self.targets.pop(0)
        elif fault:
            self._what_next(fault)
        resumes = re.search(r"resumes after step \d+", process.text)
        begins = "starts" if target is None else resumes[0] if resumes else f"resumes from {newest(target).name}"
        ended = f"{'as' if len(campaign.problems) == problems else 'NOT as'} the undisturbed run" if code == 0 else ""
        campaign.print_line(begins, hit, f"ends with {code}", ended)
        return code == 0 or not (fault or refused)  # a program that ended without a fault would do so again

    def _strike(self, process: Process) -> tuple[Fault | None, str]:
        """Wait for a random moment and inject the next fault, unless none is left or the run ends before.

        Returns:
            the fault, and its description.
        """
        campaign = self.campaign
        if not campaign.faults:
            return None, ""
        fault = campaign.faults[0]
        early = not fault.later and self.rng.random() < 0.2
        if not early:
            process.wait(HOUR, process.ranks)
        process.wait(self.rng.uniform(0.05, campaign.starting if early else campaign.seconds - campaign.starting))
        age = process.age
        hit = fault.strike(process, self.rng) if process.code is None else ""
        if not hit:
            return None, ""
        campaign.struck.append(campaign.faults.pop(0).name)
        self.struck = True
        return fault, f"{fault.name} ({hit}) after {age:.1f} s"

    def _what_next(self, fault: Fault) -> None:
        """Choose, as a user would, what the next start resumes from."""
        self.targets = [folder for folder in sorted(self.folders) if newest(folder).exists()][-1:]
        if not self.targets:
            return
        last, best = newest(self.targets[0]), self.targets[0] / "checkpoints" / "best.ckpt"
        if fault.damage:
            damage(last, fault, self.rng)
            self.damaged.add(identity(last))
        if identity(last) in self.damaged and best.exists():
            self.targets.append(best)

    def _check_files(self, process: Process, target: Path | None) -> None:
        scratch, began = Path(tempfile.gettempdir()), time.time() - process.age
        # The next start deletes the files of a killed parent, but skips files that are too young.
        files = [file.name for file in scratch.iterdir() if not began - UNLOCKED_SECONDS < file.stat().st_mtime < began]
        if process.code in (0, 1) and files:
            self.campaign.problem(f"temporary files left: {', '.join(sorted(files))}", process)
            scratch.rename(self.home.with_name(f"tmp_{len(self.campaign.problems)}"))
            scratch.mkdir()
        new = set(self.home.glob("*/*")) - self.folders
        self.folders |= new
        if len(new) > (target is None):
            self.campaign.problem(f"stray folders: {', '.join(map(str, new))}", process)


def newest(target: Path) -> Path:
    """Return the checkpoint that `resume=<target>` reads."""
    return target / "checkpoints" / "last.ckpt" if target.is_dir() else target


def identity(path: Path) -> tuple[int, int]:
    """Return an identity of a file that differs for a file that replaces it."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns
