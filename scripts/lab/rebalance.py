"""Measure how fast pieces move when a worker is throttled in the middle of a run, and what that gains:

    python scripts/lab/rebalance.py                    # 2, 3 and 4 workers; Linux, root
    python scripts/lab/rebalance.py --workers 2 --steps 60 120 180 --picture rebalance.png
    python scripts/lab/rebalance.py --still 6          # what the extra costs where nothing changes

Each worker runs in its own control group (`cpu.max`; in version 1, `cpu.cfs_quota_us`). Together they get `--room` of
this machine's cores, in equal parts; the rest is for all other programs. From step A to step B of `--steps A B END`
the last worker gets a quarter of its part. Each number of workers has three runs: with `extras=[rebalance]`; without it
(the control), until 10 steps after A; and on one device. The first and the last must end with the same weights, to the
bit (exact=true).

Prints a table: pieces of each rank during the throttle; samples per second before it, during it from 20 steps after its
start, and after it likewise; the part of the usual rate (the mean of before and after) that is left during it, without
the extra and with it; the ideal, which is the part of all workers' speed that is left; and the steps until pieces had
moved, and moved back. Draws rates and pieces over time.

`--still` runs with and without the extra in turns, so many times, with nothing throttled.

Exit codes: 0 done, 1 a run failed or has other weights, 2 bad input or no control groups.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from bench.machine import facts
from common.showing import BLUE, COLOURS, GREY, VERMILION, markdown, our_pyplot

from lockstep.config.value_checks import ROOT
from lockstep.launch.machine import available_cores

QUARTER = 0.25  # the part of its CPU time that a throttled worker keeps
WEIGHT = 100  # weight of a worker, relative to a process outside of the control groups
PERIOD = 20_000  # microseconds in which a control group may use its quota
ANSWER = 20  # steps after a change within which pieces must have moved
PIECES = {2: 40, 3: 36, 4: 52}  # by workers; both the even and the ideal shares are whole numbers
SAMPLES = 32  # samples of a piece
CONTROL = 10  # throttled steps of the control, each of which takes four times as long
# Few weights, because a throttled rank's optimizer step takes four times as long, and cannot move.
TASK = (
    *("model=resnet9", "model.width=[8,8,8,8]", "data=synthetic", "data.val_fraction=0", "optimizer=sgd", "exact=true"),
    *("threads=1", "accelerator=cpu", "callbacks=none", "logger=none", "val_every=1000000", "num_workers=0"),
)
MOVING = ("extras=[rebalance]",)


class Failed(Exception):
    """A run has no result; the message says why."""


@dataclass
class Steps:
    """The steps of a run.

    Attributes:
        ends: the time at each step's end on rank zero, in seconds.
        pieces: a list for each rank: its number of pieces in each step.
        sha: `weights_sha256` at the end.
    """

    ends: list[float]
    pieces: list[list[int]]
    sha: str

    def rate(self, first: int, last: int) -> float:
        """Return the steps per second from the end of step `first` to the end of step `last` (1-based)."""
        return (last - first) / (self.ends[last - 1] - self.ends[first - 1])

    def moved(self, since: int, until: int) -> int | None:
        """Return after how many steps the pieces last moved between the steps `since` and `until`; None: never."""
        assignments = list(zip(*self.pieces, strict=True))[since:until]
        if assignments[0] == assignments[-1]:
            return None
        return max(number for number, assignment in enumerate(assignments) if assignment != assignments[-1]) + 1


# --- control groups ---------------------------------------------------------------------------------------------------


class Group:
    """A control group that limits the CPU time of one process.

    Raises:
        Failed: the system has no control groups, or this user may not make one.
    """

    def __init__(self, name: str) -> None:
        root = Path("/sys/fs/cgroup")
        self._version_1 = (root / "cpu" / "cgroup.procs").exists()
        self._folder = (root / "cpu" if self._version_1 else root) / f"lockstep_{os.getpid()}_{name}"
        try:
            if not self._version_1:
                (root / "cgroup.subtree_control").write_text("+cpu")
            self._folder.mkdir()
            usual, weight = (1024, "cpu.shares") if self._version_1 else (100, "cpu.weight")
            (self._folder / weight).write_text(str(WEIGHT * usual))
        except OSError as error:
            raise Failed(f"{self._folder}: no control group can be made ({error.strerror}): run as root") from error

    def add(self, pid: int) -> None:
        """Add a process, with all its threads."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float) -> None:
        """Limit the group to a number of cores."""
        quota = int(cores * PERIOD)
        if self._version_1:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._folder / "cpu.max").write_text(f"{quota} {PERIOD}")

    def remove(self) -> None:
        """Remove the group, after its processes have ended."""
        for _ in range(100):
            with suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)


@contextmanager
def groups(count: int) -> Iterator[list[Group]]:
    """Make control groups, and remove them at the end."""
    made: list[Group] = []
    try:
        for number in range(count):
            made.append(Group(str(number)))
        yield made
    finally:
        for group in made:
            group.remove()


# --- runs -------------------------------------------------------------------------------------------------------------


def train(
    folder: Path, overrides: Sequence[str], workers: int, cores: float, throttle: tuple[int, int] | None = None
) -> Steps:
    """Run `src/train.py` to its end.

    Args:
        folder: a new folder for its output.
        overrides: its overrides.
        workers: its worker processes.
        cores: cores that they share in equal parts.
        throttle: the steps at the ends of which the last worker becomes slow, and fast again.

    Raises:
        Failed: the run did not complete.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "src/train.py", f"outputs={folder}", *TASK, *overrides]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "scripts" / "lab")])
    pace = ("+callbacks.pace._target_=rebalancing.pace.Pace", f"+callbacks.pace.folder={folder}")
    with groups(workers) as limits, (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, *pace],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            limits[0].add(process.pid)  # its weight lets the run start sooner
            for rank, group in enumerate(limits):
                group.add(int(wait_for(process, folder / f"{rank}.pid", 1)[0]))
                group.limit(cores / workers)
            for step, part in zip(throttle or (), (QUARTER, 1.0), strict=False):
                wait_for(process, folder / "0.steps", step)
                limits[-1].limit(cores / workers * part)
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise Failed((folder / "output.txt").read_text().strip().splitlines()[-1])
    (summary,) = folder.rglob("summary.json")
    rows = [lines(path) for path in sorted(folder.glob("*.steps"))]
    return Steps(
        ends=[float(line.split()[0]) for line in rows[0]],
        pieces=[[int(line.split()[1]) for line in rank] for rank in rows],
        sha=json.loads(summary.read_text())["weights_sha256"],
    )


def lines(path: Path) -> list[str]:
    """Return the complete lines of a file that may still grow; none if it does not exist."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def wait_for(process: "subprocess.Popen[Any]", path: Path, count: int) -> list[str]:
    """Wait until a file has `count` lines, and return them.

    Raises:
        Failed: the process ended earlier.
    """
    while len(rows := lines(path)) < count:
        if process.poll() is not None:
            raise Failed(f"a run ended before {path.name} had {count} lines: see {path.parent / 'output.txt'}")
        time.sleep(0.01)
    return rows


# --- results ----------------------------------------------------------------------------------------------------------


def row(workers: int, samples: int, steps: tuple[int, int, int], moved: Steps, still: Steps) -> list[str]:
    """Return the cells of a table's row."""
    begin, end, last = steps
    before, during, after = (
        moved.rate(*span) for span in ((ANSWER, begin), (begin + ANSWER, end), (end + ANSWER, last))
    )
    without = still.rate(begin + 2, begin + CONTROL) / still.rate(ANSWER, begin)
    parts = [without, during / usual(moved, steps), ideal(workers), during / usual(moved, steps) / ideal(workers)]
    pieces = " + ".join(str(rank[end - 1]) for rank in moved.pieces)
    away, back = (moved.moved(since, until) for since, until in ((begin, end), (end, last)))
    rates = [f"{samples * each:.0f}" for each in (before, during, after)]
    return [str(workers), pieces, *rates, *(f"{part:.2f}" for part in parts), f"{away or '-'} / {back or '-'}"]


def usual(moved: Steps, steps: tuple[int, int, int]) -> float:
    """Return the rate without a throttle, in steps per second: the mean of before and after, as speeds may drift."""
    begin, end, last = steps
    return (moved.rate(ANSWER, begin) + moved.rate(end + ANSWER, last)) / 2


def ideal(workers: int) -> float:
    """Return the part of all workers' speed that is left while one is throttled."""
    return (workers - 1 + QUARTER) / workers


COLUMNS = (
    *("workers", "pieces", "before", "throttled", "after"),
    *("left without", "left with", "ideal", "of ideal", "moved"),
)


def draw(results: dict[int, tuple[Steps, Steps]], steps: tuple[int, int, int], path: Path) -> None:
    """Draw the rate and the pieces of each rank over time, for each number of workers."""
    pyplot = our_pyplot()
    figure, axes = pyplot.subplots(2, len(results), figsize=(4.2 * len(results), 5), squeeze=False, sharex="col")
    for column, (workers, (moved, still)) in enumerate(results.items()):
        rates, shares = axes[0][column], axes[1][column]
        samples = PIECES[workers] * SAMPLES
        begin, end, _ = steps
        start = moved.ends[0]
        times = [at - start for at in moved.ends]
        for axis in (rates, shares):
            axis.axvspan(times[begin - 1], times[end - 1], color=GREY, alpha=0.2, linewidth=0)
        even = usual(moved, steps) * samples
        levels = [even, even * ideal(workers), even]
        edges = [times[0], times[begin - 1], times[end - 1], times[-1]]
        rates.stairs(levels, edges, baseline=None, color=GREY, linestyle="--", label="ideal")
        for run, colour, label in ((still, VERMILION, "without"), (moved, BLUE, "extras=[rebalance]")):
            shown = [at - run.ends[0] for at in run.ends]
            smooth = [5 * samples / (b - a) for a, b in zip(shown, shown[5:], strict=False)]
            rates.plot(shown[5:], smooth, color=colour, linewidth=1.2, label=label)
        rates.set(title=f"{workers} workers, the last one throttled to 25%", ylim=(0, 1.6 * even))
        rates.set_xlim(0, times[-1] * 1.02)
        for rank, pieces in enumerate(moved.pieces):
            shares.step(times, pieces, where="pre", color=COLOURS[rank], label=f"rank {rank}", linewidth=1.4)
        shares.set(xlabel="seconds", ylim=(0, 1.3 * max(map(max, moved.pieces))))
        shares.legend(ncols=2, loc="upper right")
    axes[0][0].set_ylabel("samples per second")
    axes[0][0].legend(loc="upper right")
    axes[1][0].set_ylabel("pieces of a step")
    figure.savefig(path)


def compare_throttled(workers: int, steps: tuple[int, int, int], cores: float, folder: Path) -> tuple[Steps, Steps]:
    """Return the steps of a run with the extra and of one without it, while the last worker is throttled.

    Raises:
        Failed: a run failed, or the extra changed the weights.
    """
    begin, end, last = steps
    pieces = PIECES[workers]
    batch = pieces * SAMPLES
    task = (f"pieces={pieces}", f"batch_size={batch}", f"data.samples={20 * batch}")  # no short last step
    ddp = (*task, "strategy=ddp", f"devices={workers}")
    moved = train(folder / f"{workers}_moved", (*ddp, *MOVING, f"max_steps={last}"), workers, cores, (begin, end))
    short = begin + CONTROL
    still = train(folder / f"{workers}_still", (*ddp, f"max_steps={short}"), workers, cores, (begin, short))
    one = train(folder / f"{workers}_one", (*task, f"max_steps={last}"), 1, cores)
    if moved.sha != one.sha:
        raise Failed(f"{workers} workers have weights_sha256 {moved.sha}: must be that of one device, {one.sha}")
    print(f"{workers} workers: weights_sha256 {one.sha[:16]} as on one device", flush=True)
    return moved, still


def compare_still(rounds: int, cores: float, folder: Path) -> None:
    """Print the time of a step of two workers, with the extra and without it, from runs in turns."""
    rows = []
    for samples in (1, 8):
        sizes = ("pieces=40", f"batch_size={40 * samples}", f"data.samples={800 * samples}")
        task = (*sizes, "max_steps=120", "strategy=ddp", "devices=2")
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * rounds):
            moves = number % 4 in (0, 3)
            run = train(folder / f"{samples}_{number}", (*task, *(MOVING if moves else ())), 2, cores)
            times = [b - a for a, b in zip(run.ends, run.ends[1:], strict=False)][ANSWER:]
            seconds[moves].append(median(times))
        with_, without = (1000 * median(seconds[moves]) for moves in (True, False))
        rows.append([str(samples), f"{without:.1f}", f"{with_:.1f}", f"{without / with_:.3f}"])
    print(markdown(("samples of a piece", "without, ms a step", "with, ms a step", "rate, of that without"), rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0].rstrip(":"))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4], choices=list(PIECES))
    names = ("A", "B", "END")
    parser.add_argument("--steps", type=int, nargs=3, default=(30, 60, 90), metavar=names, help="throttled from A to B")
    parser.add_argument("--room", type=float, default=0.5, help="part of the cores that the workers share")
    parser.add_argument("--picture", type=Path, help="file of the picture")
    parser.add_argument("--still", type=int, default=0, help="instead, so many pairs of runs without a throttle")
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: a temporary one)")
    options = parser.parse_args()
    begin, end, last = steps = tuple(options.steps)
    if min(begin, end - begin, last - end) <= ANSWER:
        parser.error(f"--steps {begin} {end} {last}: each part must have more than {ANSWER} steps")
    if not 0 < options.room <= 1:
        parser.error(f"--room={options.room:g}: must be above 0 and at most 1")
    cores = options.room * available_cores()
    print("\n".join(facts()), flush=True)
    with tempfile.TemporaryDirectory(prefix="rebalance_") as temporary:
        folder = options.folder or Path(temporary)
        try:
            if options.still:
                compare_still(options.still, cores, folder)
                return 0
            results = {workers: compare_throttled(workers, steps, cores, folder) for workers in options.workers}
        except Failed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    rows = [row(workers, PIECES[workers] * SAMPLES, steps, *runs) for workers, runs in results.items()]
    print(markdown(COLUMNS, rows))
    if options.picture:
        draw(results, steps, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
