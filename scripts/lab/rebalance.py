"""How fast pieces move when a worker is throttled in the middle of a run, and what that is worth:

    python scripts/lab/rebalance.py                    # 2, 3 and 4 workers; Linux, root
    python scripts/lab/rebalance.py --workers 2 --steps 60,120,180 --picture rebalance.png
    python scripts/lab/rebalance.py --still 6           # what the extra costs where nothing changes

Each worker is put into a control group (`cpu.max`, of version 1 `cpu.cfs_quota_us`). Together they get half of this
machine's cores, in equal parts, so that all else has room. From step A to step B of `--steps A,B,end` the last worker
gets a quarter of its part. Three runs for each number of workers: with `extras=[rebalance]`; without it (the control),
until 10 steps after A; and on one device, whose weights the first must have to the bit (exact=true).

Prints a table of samples per second before the throttle, in it from 20 steps after its begin on, and likewise after it;
the part of the usual rate (the mean of before and after) that is left in the throttle, without the extra and with it;
and the part that is left of all workers' speed, which is ideal. Draws rate and pieces over time.

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

from lockstep.config.checks import ROOT
from lockstep.launch.machine import cores

QUARTER = 0.25  # of its time, that a throttled worker has
ROOM = 0.5  # of the cores are dealt out, and first in turn; the rest is for everything else
WEIGHT = 100  # times that of a process outside
PERIOD = 20_000  # microseconds in which a control group may use its quota
ANSWER = 20  # steps after a change within which pieces must have moved
PIECES = {2: 40, 3: 36, 4: 52}  # the even and the ideal shares are whole numbers of them
SAMPLES = 32  # of a piece
CONTROL = 10  # steps of the throttle in the control, where each takes four times as long
# few weights: what a rank does beside its passes takes four times as long on a throttled one, and can't move
TASK = (
    *("model=resnet9", "model.width=[8,8,8,8]", "data=synthetic", "data.val_fraction=0", "optimizer=sgd", "exact=true"),
    *("threads=1", "accelerator=cpu", "callbacks=none", "logger=none", "val_every=1000000", "num_workers=0"),
)
MOVING = ("extras=[rebalance]",)


class Failed(Exception):
    """A run has no result, and why."""


@dataclass
class Steps:
    """What rank zero wrote of a run.

    Attributes:
        ends: the time at each step's end, in seconds.
        pieces: of each rank in each step.
        sha: of the weights at the end.
    """

    ends: list[float]
    pieces: list[list[int]]
    sha: str

    def rate(self, first: int, last: int) -> float:
        """Steps a second, from the end of step `first` to that of step `last` (1-based)."""
        return (last - first) / (self.ends[last - 1] - self.ends[first - 1])

    def moved(self, since: int, until: int) -> int | None:
        """After how many steps since a change the pieces had their last deal of those until `until`, with which all
        steps after it were computed; None: they did not move."""
        deals = list(zip(*self.pieces, strict=True))[since:until]
        if deals[0] == deals[-1]:
            return None
        return max(number for number, deal in enumerate(deals) if deal != deals[-1]) + 1


# --- control groups ---------------------------------------------------------------------------------------------------


class Group:
    """A control group for one process, which limits its CPU time.

    Raises:
        Failed: there are none, or this user can't make one.
    """

    def __init__(self, name: str) -> None:
        root = Path("/sys/fs/cgroup")
        self._first = (root / "cpu" / "cgroup.procs").exists()  # version 1
        self._folder = (root / "cpu" if self._first else root) / f"lockstep_{os.getpid()}_{name}"
        try:
            if not self._first:
                (root / "cgroup.subtree_control").write_text("+cpu")
            self._folder.mkdir()
            usual, weight = (1024, "cpu.shares") if self._first else (100, "cpu.weight")
            (self._folder / weight).write_text(str(WEIGHT * usual))
        except OSError as error:
            raise Failed(f"{self._folder}: no control group can be made ({error.strerror}): run as root") from error

    def take(self, pid: int) -> None:
        """Put a process into the group, with all its threads."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def limit(self, share: float) -> None:
        """Let the group use so many cores."""
        quota = int(share * PERIOD)
        if self._first:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._folder / "cpu.max").write_text(f"{quota} {PERIOD}")

    def remove(self) -> None:
        """Remove the group; its processes must have ended."""
        for _ in range(100):
            with suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)


@contextmanager
def groups(count: int) -> Iterator[list[Group]]:
    """So many control groups, which are removed at the end."""
    made: list[Group] = []
    try:
        for number in range(count):
            made.append(Group(str(number)))
        yield made
    finally:
        for group in made:
            group.remove()


# --- runs -------------------------------------------------------------------------------------------------------------


def train(folder: Path, overrides: Sequence[str], throttle: tuple[int, int] | None = None, workers: int = 0) -> Steps:
    """Run `src/train.py` to its end.

    Args:
        throttle: the last worker is slow from the end of one step to that of the other.
        workers: each is limited to an equal part of the cores; 0: none is limited.

    Raises:
        Failed: it did not complete.
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
            if limits:
                share = ROOM * cores() / workers
                limits[0].take(process.pid)  # it starts sooner
                for rank, group in enumerate(limits):
                    group.take(int(wait_for(process, folder / f"{rank}.pid", 1)[0]))
                    group.limit(share)
                for step, part in zip(throttle or (), (QUARTER, 1.0), strict=False):
                    wait_for(process, folder / "0.steps", step)
                    limits[-1].limit(share * part)
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
    """Return the whole lines of a file that may still be written."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def wait_for(process: "subprocess.Popen[Any]", path: Path, count: int) -> list[str]:
    """Wait until a file has so many lines, and return them.

    Raises:
        Failed: the process has ended before.
    """
    while len(rows := lines(path)) < count:
        if process.poll() is not None:
            raise Failed(f"a run ended before {path.name} had {count} lines: see {path.parent / 'output.txt'}")
        time.sleep(0.01)
    return rows


# --- what is shown ----------------------------------------------------------------------------------------------------


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
    """Return the rate of a run while nothing is throttled: before and after, since a machine's speed may drift."""
    begin, end, last = steps
    return (moved.rate(ANSWER, begin) + moved.rate(end + ANSWER, last)) / 2


def ideal(workers: int) -> float:
    """Return the part of the workers' speed that is left."""
    return (workers - 1 + QUARTER) / workers


COLUMNS = (
    *("workers", "pieces, throttled", "samples/s before", "throttled", "after"),
    *("part left without", "with the extra", "ideal", "of ideal", "steps until moved / back"),
)


def draw(results: dict[int, tuple[Steps, Steps]], steps: tuple[int, int, int], path: Path) -> None:
    """Draw for each number of workers the rate and the pieces of each rank over time."""
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


def throttled(workers: int, steps: tuple[int, int, int], folder: Path) -> tuple[Steps, Steps]:
    """Run with the extra and without it.

    Raises:
        Failed: a run failed, or its weights are not those of one device.
    """
    begin, end, last = steps
    pieces = PIECES[workers]
    batch = pieces * SAMPLES
    task = (f"pieces={pieces}", f"batch_size={batch}", f"data.samples={20 * batch}")  # no short last step
    ddp = (*task, "strategy=ddp", f"devices={workers}")
    moved = train(folder / f"{workers}_moved", (*ddp, *MOVING, f"max_steps={last}"), (begin, end), workers)
    short = begin + CONTROL
    still = train(folder / f"{workers}_still", (*ddp, f"max_steps={short}"), (begin, short), workers)
    one = train(folder / f"{workers}_one", (*task, f"max_steps={last}"), workers=1)
    if moved.sha != one.sha:
        raise Failed(f"{workers} workers end with other weights than one: {moved.sha}, {one.sha}")
    print(f"{workers} workers: weights_sha256 {one.sha[:16]} as on one device", flush=True)
    return moved, still


def unchanged(rounds: int, folder: Path) -> None:
    """Print what a step of two workers takes with the extra and without, in runs that take turns."""
    rows = []
    for samples in (1, 8):
        sizes = ("pieces=40", f"batch_size={40 * samples}", f"data.samples={800 * samples}")
        task = (*sizes, "max_steps=120", "strategy=ddp", "devices=2")
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * rounds):
            moves = number % 4 in (0, 3)
            run = train(folder / f"{samples}_{number}", (*task, *(MOVING if moves else ())), workers=2)
            taken = [b - a for a, b in zip(run.ends, run.ends[1:], strict=False)][ANSWER:]
            seconds[moves].append(median(taken))
        with_, without = (1000 * median(seconds[moves]) for moves in (True, False))
        rows.append([str(samples), f"{without:.1f}", f"{with_:.1f}", f"{without / with_:.3f}"])
    print(markdown(("samples of a piece", "without, ms a step", "with, ms a step", "rate, of that without"), rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0].rstrip(":"))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4], choices=list(PIECES))
    parser.add_argument("--steps", default="30,60,90", help="first and last step of the throttle, and of the run")
    parser.add_argument("--picture", type=Path, help="where to draw")
    parser.add_argument("--still", type=int, default=0, help="rounds of runs in which nothing changes, instead")
    parser.add_argument("--folder", type=Path, help="where runs go; else they are removed")
    options = parser.parse_args()
    begin, end, last = map(int, options.steps.split(","))
    if not 2 * ANSWER <= begin + ANSWER <= end <= last - ANSWER - 1:
        parser.error(f"--steps={options.steps}: each part must have more than {ANSWER} steps")
    print("\n".join(facts()), flush=True)
    with tempfile.TemporaryDirectory(prefix="rebalance_") as temporary:
        folder = options.folder or Path(temporary)
        try:
            if options.still:
                unchanged(options.still, folder)
                return 0
            results = {workers: throttled(workers, (begin, end, last), folder) for workers in options.workers}
        except Failed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    rows = [row(workers, PIECES[workers] * SAMPLES, (begin, end, last), *runs) for workers, runs in results.items()]
    print(markdown(COLUMNS, rows))
    if options.picture:
        draw(results, (begin, end, last), options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
