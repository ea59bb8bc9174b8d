"""Ranks that are threads die at any instruction of a fit; the others begin again from the newest copy in memory.

The copies and how they are read are those of `survive=true`. Processes that die are in launch/test_survival.py.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors import data_connector
from rank_fits import Fit, Net, fit, fits, layout_of, same_bits
from thread_ranks import Ranks

from lockstep.checkpoint import snapshots
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.checkpoint.snapshots import Snapshots, load_snapshot

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH: dict[str, Any] = {"train": 30, "max_epochs": 3}
STEP: dict[str, Any] = {"batch_size": 18, "pieces": 6}  # the second step of each epoch has 12 samples
SOURCE = str(Path(snapshots.__file__).parents[1])  # of Lockstep
WORLD = 4
SECONDS = 600.0  # for a group, whose instructions are traced, however busy the machine is
Instants = list[tuple[int, float]]  # of deaths: the rank, and the share of the fit's instructions that it runs


class Died(BaseException):
    """A rank's thread ends here. No code of Lockstep can catch it by mistake."""


class AdamWNet(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Instructions:
    """Counts the instructions of Lockstep that this thread runs, and dies at one of them, if there is a last one."""

    def __init__(self, last: int | None = None) -> None:
        self.number, self.last, self.died = 0, last, False

    def __enter__(self) -> "Instructions":
        sys.settrace(self._of_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _of_call(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._of_instruction

    def _of_instruction(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.number += 1
            if self.number == self.last:
                sys.settrace(None)
                self.died = True
                raise Died
        return self._of_instruction


class History:
    """A run of ranks that die one after the other.

    Attributes:
        wrong: changes a copy before the ranks begin again from it: a control.
        deaths: how many ranks have died.
        resumed: how many ranks have begun again from a copy.
    """

    def __init__(self, ranks: Ranks, net: pl.LightningModule, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._ranks, self._net, self._folder = ranks, net, folder
        self._workers: list[Any] = []
        self.wrong: Any = lambda content: None
        self.deaths = self.resumed = 0
        # Lightning changes torch's classes while it asks for a loader: ranks that are threads would meet there, and one
        # that dies leaves them changed.
        monkeypatch.setattr(data_connector, "_replace_dunder_methods", lambda *_: nullcontext())
        monkeypatch.setattr(snapshots, "SHARE", 1e9)  # a copy after each step
        monkeypatch.setattr(snapshots, "survivor", lambda: self._workers[dist.get_rank()])

    def run(self, deaths: Instants, instructions: int) -> list[Fit]:
        """Return the fits of the ranks that are left."""
        self._workers = [SimpleNamespace(state=None) for _ in range(WORLD)]
        for number in range(len(deaths) + 1):
            for rank, worker in enumerate(self._workers):
                worker.group = SimpleNamespace(number=number, rank=rank)
            victim, share = deaths[number] if number < len(deaths) else (0, 0.0)
            victim %= len(self._workers)
            traced = {victim: Instructions(int(share * instructions))} if share else {}
            try:
                return self._of_group(traced)
            except (Exception, Died):  # in the dead one, what Lightning does at the end may fail as well
                if not (traced and traced[victim].died):
                    raise
            self.deaths += 1
            del self._workers[victim]
        raise AssertionError("the last group has no death")

    def instructions(self) -> int:
        """Return how many instructions rank zero of an undisturbed run takes."""
        group = [SimpleNamespace(number=0, rank=rank) for rank in range(WORLD)]
        self._workers = [SimpleNamespace(state=None, group=each) for each in group]
        self._of_group({0: (count := Instructions())})
        return count.number

    def _of_group(self, traced: dict[int, Instructions]) -> list[Fit]:
        world = len(self._workers)
        layout = layout_of(world, exact=True, **STEP)

        def of_rank(rank: int) -> Fit:
            with traced.get(rank, nullcontext()):  # to trace a rank takes ten times as long
                path, content = load_snapshot(self._folder) or (None, {})
                if path:
                    self.resumed += 1
                    self.wrong(content)
                more: dict[str, Any] = {"plugins": [AtomicCheckpointIO(loaded=content or None)], "ckpt": path}
                more |= {"callbacks": [Snapshots(self._workers[rank])], "enable_checkpointing": True}
                return fit(rank, self._net, layout, **more, **LENGTH)

        results: list[Fit] = self._ranks(world, of_rank, seconds=SECONDS)
        return results


@pytest.fixture(scope="module", params=[pytest.param(Net, marks=pytest.mark.nightly), AdamWNet])
def net(request: pytest.FixtureRequest) -> pl.LightningModule:
    module: pl.LightningModule = request.param()
    return module


@pytest.fixture
def history(ranks: Ranks, net: Net, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> History:
    return History(ranks, net, monkeypatch, tmp_path)


@pytest.mark.parametrize("number", [2, pytest.param(500, marks=pytest.mark.nightly)])
def test_deaths_at_any_instruction_change_no_bit(ranks: Ranks, history: History, net: Net, number: int) -> None:
    [undisturbed] = fits(ranks, net, 1, **STEP, **LENGTH)
    rng, instructions = Random(number), history.instructions()
    for _ in range(number):
        deaths = [(rng.randrange(WORLD), rng.random()) for _ in range(rng.randrange(1, WORLD))]
        left = history.run(deaths, instructions)
        assert same_bits(undisturbed.state, *(each.state for each in left)), deaths
    assert min(history.deaths, history.resumed) >= number // 2


def test_an_optimizer_that_begins_anew_is_seen(ranks: Ranks, history: History, net: Net) -> None:
    history.wrong = lambda content: content["optimizer_states"][0]["state"].clear()
    [undisturbed] = fits(ranks, net, 1, **STEP, **LENGTH)
    left = history.run([(1, 0.7)], history.instructions())
    assert history.resumed == len(left) == WORLD - 1
    assert not same_bits(undisturbed.state, left[0].state)
