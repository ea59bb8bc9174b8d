"""scripts/lab/pairing.py: what the same seeds save, on numbers whose answer is known, and on small runs."""

import random
import re

import pytest
from conftest import forked
from pairing import saving


def test_what_pairing_saves() -> None:
    """Settings that share most of their noise; the control shares none."""
    draw = random.Random(1).gauss
    common = [draw(0, 3) for _ in range(2000)]
    base, changed = ([value + draw(mean, 1) for value in common] for mean in (0, 0.5))
    measured = saving(base, changed)
    assert measured["difference"] == pytest.approx(0.5, abs=0.1)
    assert measured["paired"] == pytest.approx(2**0.5, rel=0.05)
    assert measured["unpaired"] == pytest.approx(20**0.5, rel=0.05)
    assert measured["correlation from"] < 0.9 < measured["correlation to"]
    alone = saving(base, random.Random(2).sample(changed, 2000))
    assert alone["paired"] == pytest.approx(alone["unpaired"], rel=0.05)
    assert alone["correlation from"] < 0 < alone["correlation to"]
    assert saving([0.5] * 4, [0.5] * 4)["correlation"] == 0


def test_runs_are_paired_by_seed() -> None:
    tiny = ("data=synthetic", "data.samples=64", "data.image_size=12", "max_steps=2", "batch_size=16", "threads=1")
    program = ("scripts/lab/pairing.py", *tiny, "accelerator=cpu", "--seeds", "4")
    done = forked(*program, "--change", "lr=0.02")  # the default: a change of nothing
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert [row[:5] for row in rows] == [
        ["`lr=0.02`", score, "4", "+0.00000", "0.00000"] for score in ("val/acc", "val/loss", "test/acc", "test/loss")
    ]
    assert all(float(row[5]) > 0 for row in rows[1::2]), "the seeds differ"
    failed = forked(*program, "--change", "lr=-1")
    assert failed.returncode == 1
    assert re.fullmatch(r"error: .*lr=-1.*: must be .*\n", failed.stderr)
    assert forked(*program, "--change", "lr=0.1", "--seeds", "3").returncode == 2
