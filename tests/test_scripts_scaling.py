"""scripts/scaling.py: what it varies, what it keeps, and what it can't run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Program

TINY = ("data=synthetic", "data.samples=600", "data.image_size=12", "data.num_classes=3", "batch_size=24", "lr=0.02")


def test_strong_keeps_the_step_and_weak_lets_it_grow(tmp_path: Path) -> None:
    Program(tmp_path, "scripts/scaling.py")(*TINY, "over=[1,2]")
    (report,) = tmp_path.rglob("scaling.json")
    points = {(point["mode"], point["devices"]): point for point in json.loads(report.read_text())["points"]}
    assert {key: (point["batch_size"], point["lr"]) for key, point in points.items()} == {
        ("strong", 1): (24, 0.02),
        ("strong", 2): (24, 0.02),
        ("weak", 1): (24, 0.02),
        ("weak", 2): (48, 0.04),
    }
    assert points["strong", 1]["accuracy"] == pytest.approx(points["strong", 2]["accuracy"], abs=0.02)
    for mode in ("strong", "weak"):
        one, two = points[mode, 1], points[mode, 2]
        assert one["efficiency"] == 1
        assert two["efficiency"] == pytest.approx(two["samples_per_second"] / one["samples_per_second"] / 2)
    assert report.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("over=2", "over=2: must be a list"),
        ("over=[]", "over=[]: must be a list"),
        ("over=[0]", "over=0: must be a whole number of at least 1"),
        ("modes=[weakly]", "modes=weakly: did you mean weak?"),
        ("batch_size=many", "batch_size=many: must be a whole number"),
    ],
)
def test_what_it_cannot_run_is_a_line(tmp_path: Path, wrong: str, says: str) -> None:
    run = Program(tmp_path, "scripts/scaling.py")(*TINY, wrong, ok=False)
    assert run.returncode == 2, str(run)
    assert run.stderr.startswith(f"error: {says}")
    assert run.stderr.count("\n") == 1
    assert run.folders == []
