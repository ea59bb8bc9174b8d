"""What scripts/compare.py tells of two run folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Program

TINY = ("data=synthetic", "data.samples=64", "data.image_size=12", "max_steps=2", "batch_size=32", "logger=none")


def compare(*runs: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/compare.py", *map(str, runs)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def rows(text: str) -> dict[str, tuple[str, str]]:
    """key -> the two values, of the table's rows with values in both columns."""
    cells = [line.split() for line in text.splitlines()]
    return {line[-3]: (line[-2], line[-1]) for line in cells if len(line) in (3, 4)}


def written(folder: Path, **summary: Any) -> Path:
    """A run folder made by hand."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(
        "lr: 0.1\nname: ${model.name}\nmodel: {name: mnist_cnn, dropout: 0.5}\n"
    )
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_two_runs(tmp_path: Path) -> None:
    one, two = Program(tmp_path / "one")(*TINY), Program(tmp_path / "two")(*TINY, "strategy=dp", "devices=2", "lr=0.07")
    done = compare(one.folder, two.folder)
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert found["lr"] == ("0.03", "0.07")
    assert found["strategy"] == ("single", "dp")
    assert found["devices"] == ("1", "2")
    assert found["weights_sha256"] == (one.summary["weights_sha256"][:12], two.summary["weights_sha256"][:12])
    assert "seed" not in found
    assert "the same in both: code, versions" in done.stdout
    assert done.stdout.endswith("weights: different bits\n")


def test_the_same_run(tmp_path: Path) -> None:
    run = written(tmp_path / "run", weights_sha256="a" * 64, metrics={"test/acc": 0.5})
    done = compare(run, run)
    assert (done.returncode, done.stdout) == (
        0,
        "the same in both: config, outcome\n"
        "neither tells: code, versions, machine, layout, data\n"
        "weights: the same bits\n",
    )


def test_what_one_has_and_the_other_lacks(tmp_path: Path) -> None:
    one = written(tmp_path / "one", metrics={"test/acc": 0.123456789}, git={"commit": "b" * 40, "dirty": True})
    two = written(tmp_path / "two", metrics={}, git={"commit": "c" * 40, "dirty": True})
    (one / "git.diff").write_text("+ a line")
    done = compare(one, two)
    found = rows(done.stdout)
    assert found["metrics.test/acc"] == ("0.123457", "-")
    assert found["commit"] == ("b" * 12, "c" * 12)
    assert found["changes"][1] == "-"
    assert "dirty" not in found
    assert done.stdout.endswith("weights: a run without an end has none to compare\n")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "no such folder"), ("", "neither summary.json nor"), ("{", "can't be read"), ("[1]", "not a mapping")],
)
def test_what_is_no_run_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    good, bad = written(tmp_path / "good"), tmp_path / "bad"
    if content is not None:
        bad.mkdir()
    if content:
        (bad / "summary.json").write_text(content)
    done = compare(good, bad)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {bad}")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
