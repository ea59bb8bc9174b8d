"""Measure how fast pieces move when a worker is throttled in the middle of a run, and what that gains:

    python scripts/lab/rebalance.py                    # 2, 3 and 4 workers; Linux, root
    python scripts/lab/rebalance.py --workers 2 --phase 60 --cycles 5 --picture rebalance.png
    python scripts/lab/rebalance.py --still 6          # what the extra costs where nothing changes

Each worker runs in its own control group (`cpu.max`; in version 1, `cpu.cfs_quota_us`). Together they get `--room` of
this machine's cores, in equal parts; the rest is for all other programs. A run has phases of `--phase` steps. In every
second phase, `--cycles` times, the last worker gets a quarter of its part. Each number of workers has three runs: with
`extras=[rebalance]`; without it (the control, with short phases); and on one device. The first and the last must end
with the same weights, to the bit (exact=true).

A phase counts from 20 steps after its start, and is compared with the phases before and after it, since the speed of a
machine drifts; the median over cycles is printed. The table has the pieces of each rank while it is throttled; samples
per second as usual and throttled; the part of the usual rate that is left, without the extra and with it; the ideal,
which is the part of all workers' speed that is left; and the most steps until pieces had moved, and moved back. Without
the extra all wait for the throttled worker, so "left without" is its speed: below a quarter, because it is stopped
again and again. "of speeds" compares with an ideal of that speed. Draws rates and pieces over time.

`--still` runs with and without the extra in turns, so many times, with nothing throttled.

Exit codes: 0 done, 1 a run failed or has other weights, 2 bad input or no control groups.
"""

import argparse
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

from bench.machine import facts
from repository import ROOT

from lockstep.launch.machine import available_cores
from lockstep.programs.common.showing import BLUE, COLOURS, GREY, VERMILION, markdown, our_pyplot
from lockstep.report.summary import summary_of

QUARTER = 0.25  # the part of its CPU time that a throttled worker keeps
WEIGHT = 100  # weight of a worker, relative to a process outside of the control groups
PERIOD = 20_000  # microseconds in which a control group may use its quota
ANSWER = 20  # steps after a change within which pieces must have moved
PIECES = {2: 40, 3: 36, 4: 52}  # by workers; both the even and the ideal shares are whole numbers
SAMPLES = 32  # samples of a piece
CONTROL = 12  # steps of the control's phases; a throttled one takes four times as long
SETTLED = 2  # steps of these phases that do not count
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


@dataclass(frozen=True)
class Plan:
    """When the last worker is throttled: in every second phase of a run.

    Attributes:
        phase: steps of a phase.
        cycles: number of throttled phases. Another phase comes before each, and one after the last.
        settled: steps of a phase that do not count.
    """

    phase: int
    cycles: int
    settled: int = ANSWER

    @property
    def starts(self) -> list[int]:
        """Steps after which the phases begin."""
        return [self.phase * number for number in range(2 * self.cycles + 1)]

    @property
    def steps(self) -> int:
        return self.starts[-1] + self.phase

    def rates(self, run: Steps) -> list[float]:
        """Return the steps per second of each phase."""
        return [run.rate(start + self.settled, start + self.phase) for start in self.starts]

    def left(self, run: Steps) -> float:
        """Return the part of the usual rate that is left in throttled phases, the median over cycles."""
        rates = self.rates(run)
        return median(2 * rates[each] / (rates[each - 1] + rates[each + 1]) for each in range(1, len(rates), 2))


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
    folder: Path, overrides: Sequence[str], workers: int, cores: float, throttled_by: Plan | None = None
) -> Steps:
    """Run `src/train.py` to its end.

    Args:
        folder: a new folder for its output.
        overrides: its overrides.
        workers: its worker processes.
        cores: cores that they share in equal parts.
        throttled_by: when the last worker is slow.

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
            for number, step in enumerate(throttled_by.starts[1:] if throttled_by else ()):
                wait_for(process, folder / "0.steps", step)
                limits[-1].limit(cores / workers * (1.0 if number % 2 else QUARTER))
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise Failed(last_output(folder))
    (summary,) = folder.rglob("summary.json")
    rows = [lines(path) for path in sorted(folder.glob("*.steps"))]
    return Steps(
        ends=[float(line.split()[0]) for line in rows[0]],
        pieces=[[int(line.split()[1]) for line in rank] for rank in rows],
        sha=summary_of(summary.parent)["weights_sha256"],
    )


def lines(path: Path) -> list[str]:
    """Return the complete lines of a file that may still grow; none if it does not exist."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def last_output(folder: Path) -> str:
    """Return the last line that a run printed."""
    return ((folder / "output.txt").read_text().strip().splitlines() or ["no output"])[-1]


def wait_for(process: "subprocess.Popen[Any]", path: Path, count: int) -> list[str]:
    """Wait until a file has `count` lines, and return them.

    Raises:
        Failed: the process ended earlier.
    """
    while len(rows := lines(path)) < count:
        if process.poll() is not None:
            raise Failed(f"a run ended before {path.name} had {count} lines: {last_output(path.parent)}")
        time.sleep(0.01)
    return rows


# --- results ----------------------------------------------------------------------------------------------------------


def row(workers: int, plan: Plan, moved: Steps, without: float) -> list[str]:
    """Return the cells of a table's row; `without` is the part of the usual rate that is left without the extra."""
    rates, left = plan.rates(moved), plan.left(moved)
    per_second = [f"{PIECES[workers] * SAMPLES * median(each):.0f}" for each in (rates[::2], rates[1::2])]
    pieces = " + ".join(str(rank[plan.starts[2] - 1]) for rank in moved.pieces)
    steps = [moved.moved(start, start + plan.phase) for start in plan.starts]
    away, back = ("-" if None in each else str(max(filter(None, each))) for each in (steps[1::2], steps[2::2]))
    parts = [without, left, ideal(workers, QUARTER), left / ideal(workers, QUARTER), left / ideal(workers, without)]
    return [str(workers), pieces, *per_second, *(f"{part:.2f}" for part in parts), f"{away} / {back}"]


def ideal(workers: int, speed: float) -> float:
    """Return the part of all workers' speed that is left while one has only this part of its own."""
    return (workers - 1 + speed) / workers


COLUMNS = (
    *("workers", "pieces", "usual", "throttled", "left without", "left with"),
    *("ideal", "of ideal", "of speeds", "moved"),
)


def draw(results: dict[int, tuple[Steps, float]], plan: Plan, path: Path) -> None:
    """Draw the rate and the pieces of each rank over time, for each number of workers."""
    pyplot = our_pyplot()
    figure, axes = pyplot.subplots(2, len(results), figsize=(4.2 * len(results), 5), squeeze=False, sharex="col")
    for column, (workers, (moved, without)) in enumerate(results.items()):
        rates, shares = axes[0][column], axes[1][column]
        samples = PIECES[workers] * SAMPLES
        times = [at - moved.ends[0] for at in moved.ends]
        edges = [times[max(0, start - 1)] for start in plan.starts] + [times[-1]]
        for axis in (rates, shares):
            for begin, end in zip(edges[1::2], edges[2::2], strict=False):
                axis.axvspan(begin, end, color=GREY, alpha=0.2, linewidth=0)
        usual = samples * median(plan.rates(moved)[::2])
        for part, colour, label in ((ideal(workers, QUARTER), GREY, "ideal"), (without, VERMILION, "without")):
            levels = [usual * (part if number % 2 else 1) for number in range(len(plan.starts))]
            rates.stairs(levels, edges, baseline=None, color=colour, linestyle="--", label=label)
        smooth = [5 * samples / (b - a) for a, b in zip(times, times[5:], strict=False)]
        rates.plot(times[5:], smooth, color=BLUE, linewidth=1.2, label="extras=[rebalance]")
        rates.set(title=f"{workers} workers, the last one throttled to 25%", ylim=(0, 1.6 * usual))
        rates.set_xlim(0, times[-1] * 1.02)
        for rank, pieces in enumerate(moved.pieces):
            shares.step(times, pieces, where="pre", color=COLOURS[rank], label=f"rank {rank}", linewidth=1.4)
        shares.set(xlabel="seconds", ylim=(0, 1.3 * max(map(max, moved.pieces))))
        shares.legend(ncols=2, loc="upper right")
    axes[0][0].set_ylabel("samples per second")
    axes[0][0].legend(loc="upper right")
    axes[1][0].set_ylabel("pieces of a step")
    figure.savefig(path)


def compare_throttled(workers: int, plan: Plan, cores: float, folder: Path) -> tuple[Steps, float]:
    """Return the steps of a run with the extra while the last worker is throttled, and what is left without the extra.

    Raises:
        Failed: a run failed, or the extra changed the weights.
    """
    pieces = PIECES[workers]
    batch = pieces * SAMPLES
    task = (f"pieces={pieces}", f"batch_size={batch}", f"data.samples={20 * batch}")  # no short last step
    ddp = (*task, "strategy=ddp", f"devices={workers}")
    moved = train(folder / f"{workers}_moved", (*ddp, *MOVING, f"max_steps={plan.steps}"), workers, cores, plan)
    short = Plan(CONTROL, plan.cycles, SETTLED)
    still = train(folder / f"{workers}_still", (*ddp, f"max_steps={short.steps}"), workers, cores, short)
    one = train(folder / f"{workers}_one", (*task, f"max_steps={plan.steps}"), 1, cores)
    if moved.sha != one.sha:
        raise Failed(f"{workers} workers have weights_sha256 {moved.sha}: must be that of one device, {one.sha}")
    print(f"{workers} workers: weights_sha256 {one.sha[:16]} as on one device", flush=True)
    return moved, short.left(still)


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
    parser.add_argument("--phase", type=int, default=40, help=f"steps of a phase, more than {ANSWER}")
    parser.add_argument("--cycles", type=int, default=3, help="throttled phases")
    parser.add_argument("--room", type=float, default=0.5, help="part of the cores that the workers share")
    parser.add_argument("--picture", type=Path, help="file of the picture")
    parser.add_argument("--still", type=int, default=0, help="instead, so many pairs of runs without a throttle")
    options = parser.parse_args()
    if options.phase <= ANSWER or options.cycles < 1:
        parser.error(f"--phase={options.phase} --cycles={options.cycles}: must be more than {ANSWER}, and 1 or more")
    plan = Plan(options.phase, options.cycles)
    if not 0 < options.room <= 1:
        parser.error(f"--room={options.room:g}: must be above 0 and at most 1")
    cores = options.room * available_cores()
    print("\n".join(facts()), flush=True)
    with tempfile.TemporaryDirectory(prefix="rebalance_") as folder:
        try:
            if options.still:
                compare_still(options.still, cores, Path(folder))
                return 0
            results = {workers: compare_throttled(workers, plan, cores, Path(folder)) for workers in options.workers}
        except Failed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    rows = [row(workers, plan, *runs) for workers, runs in results.items()]
    print(markdown(COLUMNS, rows))
    if options.picture:
        draw(results, plan, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
