"""scripts/differences.py: what differs is seen, and what a switch removes is gone."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Program

TINY = ("data=synthetic", "data.samples=300", "data.image_size=12", "data.num_classes=3", "batch_size=24", "steps=3")


def test_what_differs_and_what_is_then_left(tmp_path: Path) -> None:
    run = Program(tmp_path, "scripts/differences.py")(*TINY, "nets=[mnist_cnn+dropout]", "test_samples=50")
    (report,) = tmp_path.rglob("differences.json")
    rows = {row["pair"].partition(" (")[0]: row for row in json.loads(report.read_text())["rows"]}
    order, cut, seed = rows["order of summation"], rows["another number of pieces"], rows["for scale: another seed"]
    assert not order["effect"]["same_bits"]
    assert order["effect"]["weights"] < 1e-5
    assert order["left"]["same_bits"]
    assert not cut["effect"]["same_bits"], "each piece drops other units"
    assert cut["effect"]["weights"] > 100 * order["effect"]["weights"]
    assert cut["left"]["weights"] < 1e-5
    assert seed["effect"]["weights"] > 0.1
    assert report.with_suffix(".md").read_text() in run.stdout


def test_what_it_cannot_run_is_a_line(tmp_path: Path) -> None:
    for wrong, says in (("nets=mnist_cnn", "must be a list"), ("nets=[mnist]", "neither a file in conf/model")):
        run = Program(tmp_path, "scripts/differences.py")(*TINY, wrong, ok=False)
        assert run.returncode == 2, str(run)
        assert says in run.stderr
        assert run.stderr.count("\n") == 1
