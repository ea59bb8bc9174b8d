"""recorded_runs.py: it agrees with itself, and sees another seed, a failed run and weights that should be the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import recorded_runs
from recorded_runs import Run, effective, main

# In place of a checkout: a program whose weights are its seed.
FAKE = """
import json, pathlib, sys
told = dict(override.split("=", 1) for override in sys.argv[1:])
if told["seed"] == "bad":
    sys.exit("error: seed=bad: a seed is a number")
summary = {"weights_sha256": told["seed"], "steps": 1, "samples_seen": 2, "metrics": {"test/loss": float(told["loss"])}}
pathlib.Path(told["outputs"], "summary.json").write_text(json.dumps(summary))
"""


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_another_seed_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = next(run for run in recorded_runs.RUNS if run.name == "exact_single"), str(tmp_path / "hashes.json")
    assert main(["write", file, "--only", run.name]) == 0
    (written,) = json.loads(Path(file).read_text()).values()
    assert (len(written["weights_sha256"]), written["steps"], written["metrics"]["test/count"]) == (64, 8, 17)
    assert main(["compare", file, "--only", run.name]) == 0
    assert lines(capsys)[-1] == "1 runs: all as they must be"
    monkeypatch.setattr(recorded_runs, "RUNS", [replace(run, overrides=(*run.overrides, "seed=4"))])
    assert main(["compare", file]) == 1
    assert lines(capsys)[-1].startswith(f"exact_single: differs: weights_sha256 {written['weights_sha256']} -> ")


@pytest.mark.usefixtures("processes")
def test_what_is_no_result_or_not_the_same_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(FAKE)
    options = [str(tmp_path / "hashes.json"), "--source", str(tmp_path)]

    def problems(action: str, *runs: Run) -> list[str]:
        monkeypatch.setattr(recorded_runs, "RUNS", runs)
        code = main([action, *options])
        actual = [line for line in lines(capsys) if "  test/loss" not in line]
        assert code == (actual != [f"{len(runs)} runs: all as they must be"])
        return actual

    one, other = Run("one", ("seed=1", "loss=0")), Run("other", ("seed=1", "loss=0"), same_as="one")
    assert problems("write", one, other) == ["2 runs: all as they must be"]
    assert problems("compare", one, other) == ["2 runs: all as they must be"]
    two = replace(other, overrides=("seed=2", "loss=0"))
    assert problems("write", one, two) == ["other: its weights are not those of one: they must be the same bits"]
    bad, worse = replace(two, overrides=("seed=bad", "loss=0")), replace(one, overrides=("seed=1", "loss=1"))
    actual = problems("compare", worse, bad, Run("third", ("seed=1", "loss=0")))
    assert actual == [
        "one: differs: test/loss 0.0 -> 1.0",
        "other: failed: exit code 1: error: seed=bad: a seed is a number",
        "third: not recorded: write a new file with the old checkout",
    ]
    early = Run("one", ("seed=1", "loss=0"), resumed=("devices=2",))
    assert problems("compare", early)[0] == "one: failed: no checkpoint to be killed after: it printed nothing"


def test_a_later_override_replaces_an_earlier_one() -> None:
    assert effective(("model=a", "model.width=1", "lr=0", "data/transforms=none", "model=b", "lr=1", "data=c")) == [
        *("data/transforms=none", "model=b", "lr=1", "data=c")
    ]
    assert len({run.name for run in recorded_runs.RUNS}) == len(recorded_runs.RUNS)
    assert {run.same_as for run in recorded_runs.RUNS} <= {"", *(run.name for run in recorded_runs.RUNS)}
