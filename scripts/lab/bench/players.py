"""Run programs against each other in turns, one block of steps each (see opponents/turns.py)."""

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from repository import ROOT

Command = Sequence[str]

OPPONENTS = ROOT / "scripts" / "lab" / "bench" / "opponents"
# train.py as users run it, with an additional callback that waits for the turns.
TRAIN = ("src/train.py", "+callbacks.turns={_target_: turns.callback}")


def program(*command: str) -> str:
    """Run a Python program to its end. Return its output.

    Raises:
        RuntimeError: it failed. The message has the last line of its output.
    """
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(f"{' '.join(command[:2])}: exit code {done.returncode}: {output[-1]}")
    return done.stdout


class Player:
    """A program in its own process that makes a block of steps on each message."""

    def __init__(self, name: str, command: Command, environment: Mapping[str, str], turns: str, errors: Path) -> None:
        self.name, self.errors = name, errors
        self.connection, theirs = Pipe()
        with theirs, errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, **environment, "TURNS": f"{theirs.fileno()},{turns}"},
                pass_fds=(theirs.fileno(),),
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
            )

    def answer(self) -> list[float]:
        """Return the seconds of each step of the block just made. Return an empty list when the program is ready.

        Raises:
            RuntimeError: the program ended instead. The message has the end of its errors.
        """
        try:
            return list(self.connection.recv())
        except (EOFError, ConnectionError):
            self.process.wait()
            raise RuntimeError(f"{self.name} ended early:\n{self.errors.read_text()[-2000:]}") from None

    def end(self) -> None:
        """Kill the program and its children."""
        self.connection.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def weights_of(name: str, folder: Path) -> Path:
    """Return the path of a player's parameters after `save_at` steps."""
    return folder / f"{name}.pt"


def play(
    commands: Mapping[str, Sequence[Command]],
    rounds: int,
    steps: int,
    *,
    games: int = 1,
    skip: int = 2,
    save_at: int = 0,
    clock: str = "perf_counter",
    folder: Path,
) -> dict[str, list[float]]:
    """Run blocks of all players in turns. In each round each player has one block, in a random order.

    The first round does not count.

    Args:
        commands: arguments to Python, by player. If a player has several programs, they run at once.
        rounds: rounds of a game that count.
        steps: steps of a block.
        games: how often all programs start anew. The memory layout of a process affects its speed.
        skip: first steps of a block that don't count, because the other players have used the caches.
        clock: the function of `time` that measures; see opponents/turns.py.

    Returns:
        Seconds of each counted block, by player.
    """
    blocks: dict[str, list[float]] = {name: [] for name in commands}
    paths = os.pathsep.join(filter(None, [str(OPPONENTS), os.environ.get("PYTHONPATH")]))
    order = random.Random(0)
    for _ in range(games):
        teams: dict[str, list[Player]] = {name: [] for name in commands}
        try:
            for name in commands:
                environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CLOCK": clock}
                environment["WEIGHTS"] = f"{save_at},{weights_of(name, folder)}"
                for command in commands[name]:
                    teams[name].append(Player(name, command, environment, f"{steps},{skip}", folder / f"{name}.txt"))
            for player in itertools.chain(*teams.values()):
                player.answer()
            for counts in (False, *[True] * rounds):
                for name in order.sample(list(teams), len(teams)):
                    for player in teams[name]:
                        player.connection.send("go")
                    took = max(sum(player.answer()[skip:]) for player in teams[name])
                    blocks[name] += [took] * counts
        finally:
            for player in itertools.chain(*teams.values()):
                player.end()
    return blocks


@dataclass
class Row:
    """A line of the table: `ours` against `other`, both in `unit`.

    Attributes:
        ratio: medians of ours over other, or how many times as fast ours is.
        goal: the largest allowed ratio, or the smallest with `at_least`. None: the row only explains other rows.
        spread: lower and upper quartile of the ratio over rounds.
        check: evidence that both sides computed the same.
    """

    what: str
    ours: float
    other: float
    ratio: float
    goal: float | None
    at_least: bool = False
    spread: tuple[float, float] | None = None
    unit: str = "s"
    check: str = ""

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal

    def cells(self) -> list[str]:
        goal = "" if self.goal is None else f"{'>=' if self.at_least else '<='} {self.goal:g}"
        sides = [f"{side:.4g} {self.unit}" for side in (self.ours, self.other)]
        quartiles = "" if self.spread is None else "{:.3f} to {:.3f}".format(*self.spread)
        verdict = {None: "", True: "met", False: "NOT MET"}[self.met]
        return [self.what, *sides, f"{self.ratio:.3f}", quartiles, goal, verdict, self.check]


def row(what: str, ours: Sequence[float], other: Sequence[float], goal: float | None, **more: Any) -> Row:
    """Return a row from both sides' measurements. Those with the same index were made next to each other."""
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    lower, _, upper = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Row(what, median(ours), median(other), median(ours) / median(other), goal, spread=(lower, upper), **more)
