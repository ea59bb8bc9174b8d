"""What the parent of a run prints before it starts workers."""

from pathlib import Path

import pytest

from lockstep import compose
from lockstep.config.check import check
from lockstep.data.build import open_data
from lockstep.job import supervisor as runs
from lockstep.job.training import fit_and_test


@pytest.mark.usefixtures("whole_run")
def test_emulated_bf16_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    splits = open_data({"_target_": "lockstep.vision.data.synthetic", "samples": 90}, "data")
    monkeypatch.setattr(runs, "launch", lambda *launched, **how: None)
    for has_bf16 in (True, False):
        for decides in ("job.supervisor", "config.check"):
            monkeypatch.setattr(f"lockstep.{decides}.computes_bf16", lambda accelerator, has=has_bf16: has)
        for precision in ("auto", "32-true", "bf16-mixed"):
            runs.run_in_workers(fit_and_test, check(dict(compose(f"precision={precision}"))), splits, tmp_path)
        output = capsys.readouterr().err.splitlines()
        assert len(output) == (0 if has_bf16 else 1)
        assert all("precision=bf16-mixed: this processor emulates bf16" in line for line in output)
