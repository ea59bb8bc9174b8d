"""Promise 2: one data order, a pure function of (seed, epoch, step), whoever reads it and after any cut.

Its properties for all sizes: tests/arithmetic/test_order.py, tests/data/test_loaders.py.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from conftest import TRAINER_BY_DAY
from user_runs import RECORDED, go_on, recorded_pieces, train

from lockstep import hash64


def order_of(folder: Path) -> list[tuple[Any, ...]]:
    """Return the samples of each piece of a run, without the device that computed it."""
    return [tuple(row[key] for key in ("epoch", "step", "piece", "ids")) for row in recorded_pieces(folder)]


def samples_of(folder: Path) -> list[list[int]]:
    """Return the samples of each step of a run."""
    rows = recorded_pieces(folder)
    steps = sorted({row["step"] for row in rows})
    return [[sample for row in rows if row["step"] == step for sample in row["ids"]] for step in steps]


@TRAINER_BY_DAY
def test_every_layout_reads_the_same_order(either: Path, tmp_path: Path) -> None:
    swept = train(either, tmp_path / "layouts", "LitDigits", RECORDED, "strategy=ddp,dp", "devices=1,4", "-m")
    first, *others = [order_of(folder) for folder in swept.jobs]
    assert [order == first for order in others] == [True] * 3
    steps = samples_of(swept.jobs[0])
    assert [len(step) for step in steps] == [24, 24, 24, 9] * 2
    epochs = [list(chain(*steps[:4])), list(chain(*steps[4:]))]
    assert [sorted(epoch) for epoch in epochs] == [list(range(81))] * 2, "each sample once an epoch"
    assert epochs[0] != epochs[1]

    cut = train(either, tmp_path / "pieces", "LitDigits", RECORDED, "pieces=3,6", "seed=0,1", "max_epochs=1", "-m")
    three, three_of_another_seed, six, _ = cut.jobs
    assert samples_of(three) == samples_of(six) == steps[:4], "a piece is a slice of the step"
    assert order_of(three) != order_of(six), "the control: other slices"
    assert samples_of(three_of_another_seed) != steps[:4], "the control: another seed"


@TRAINER_BY_DAY
def test_a_run_that_was_cut_reads_on_where_it_was_on_another_layout(either: Path, tmp_path: Path) -> None:
    """The run is killed after six steps, of which the checkpoint holds five or six."""
    whole = train(either, tmp_path / "whole", "LitDigits", RECORDED)
    task = (RECORDED, "checkpoint_every=1")
    cut = train(either, tmp_path / "cut", "Cut", *task, cut="SIGKILL", ok=False)
    before = order_of(cut.folder)
    after = order_of(go_on(either, cut, "strategy=ddp", "devices=2").folder)[len(before) :]
    assert before
    assert after
    undisturbed = order_of(whole.folder)
    assert before == undisturbed[: len(before)]
    assert sorted(set(map(repr, before + after))) == sorted(map(repr, undisturbed)), "no sample is left out"


def test_the_numbers_behind_the_order_are_the_same_in_every_release() -> None:
    """Whole orders: tests/arithmetic/test_order.py."""
    assert int(hash64(1, 2, 3)) == 6224725266317119511
    assert len(np.unique([int(hash64(1, 2, number)) for number in range(100)])) == 100
