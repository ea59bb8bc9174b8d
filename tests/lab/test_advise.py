"""The advice: a whole answer on this machine, and what it says of devices that differ."""

import json
from pathlib import Path
from typing import Any

import pytest
from advise import Choice, conclusion
from conftest import ROOT, Program, forked

from lockstep.commands.api import compose
from lockstep.config.check import check
from lockstep.config.pages import find, group_file
from lockstep.errors import UserError

TINY = ("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "accelerator=cpu")


def test_an_answer_rests_on_what_was_run(tmp_path: Path) -> None:
    run = Program(tmp_path, "scripts/lab/advise.py")(*TINY, "seconds=0.1", "batch_size=4", "threads=1", cwd=ROOT)
    report = json.loads((run.folder / "advise.json").read_text())
    choices = report["choices"]
    assert {choice["strategy"] for choice in choices} == {"single", "ddp", "dp"}
    assert all(choice["seconds"] > 0 and choice["peak_gib"] > 0.1 for choice in choices)
    assert choices == sorted(choices, key=lambda choice: choice["seconds"])
    best = choices[0]
    assert f"devices={best['devices']} accumulate_grad_batches={best['accumulate_grad_batches']}" in report["answer"]
    assert report["answer"] in run.stdout
    assert min(report["speeds"]) == 1
    assert len(report["speeds"]) == max(choice["devices"] for choice in choices)
    assert run.stdout.startswith("python ")


def test_a_front_page_of_the_lab_is_not_in_conf(tmp_path: Path) -> None:
    """It lies beside the programs, and is shown, composed with train.yaml and checked from any folder."""
    for name, key in (("advise", "seconds: 2"), ("communication", "rounds: 5")):
        assert not find(f"program/{name}")
        assert key in forked(f"scripts/lab/{name}.py", "--help", cwd=tmp_path).stdout
        composed = forked(f"scripts/lab/{name}.py", "model=resnet18", "--cfg", "job", cwd=tmp_path)
        assert (composed.returncode, composed.stderr) == (0, "")
        assert {key, "batch_size: 64", "  name: resnet18"} <= set(composed.stdout.splitlines())


def test_what_to_measure_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    run = Program(tmp_path, "scripts/lab/advise.py")(*TINY, "seconds=-1", ok=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: seconds=-1: must be")


def test_shares_are_named_where_devices_differ() -> None:
    config = check(compose(*TINY, "batch_size=64"))
    two, one = Choice("ddp", 2, 2, 16, 0.1, 1.0), Choice("single", 1, 1, 64, 0.25, 1.0)
    output = conclusion([two, one], config, [1.5, 1.0])
    assert output.startswith(
        "Use strategy=ddp devices=2 accumulate_grad_batches=2: a step of 64 samples takes 100.0 ms."
    )
    assert "2.50 times as fast as one device (250.0 ms)" in output
    assert "strategy.shares=[1.5,1] with pieces=16" in output
    named: dict[str, Any] = group_file("strategy", "ddp") | {"shares": [1.5, 1]}
    assert check(compose("devices=2", "pieces=16") | {"strategy": named}).layout.shares == (1.5, 1)
    assert "shares" not in conclusion([two, one], config, [1.1, 1.0])
    with pytest.raises(UserError, match="no layout of this machine can run it: it broke"):
        conclusion([Choice("single", 1, 1, 64, failed="it broke")], config, [])
