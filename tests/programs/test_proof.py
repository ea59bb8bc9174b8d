"""`lockstep proof`: its runs have the recorded weights, and another one is found."""

import pytest
import torch
from conftest import forked

from lockstep.errors import UserError
from lockstep.launch.portable import missing_instructions
from lockstep.programs import proof
from lockstep.programs.proof import KILLED, LAYOUTS, ONE, THREE, Different, main, prove, verdict
from lockstep.project import project

here = pytest.mark.skipif(bool(missing_instructions()), reason="this processor can't compute the recorded weights")
OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)  # a newer one must fail: record the weights again
recorded = pytest.mark.skipif(OLDER, reason=f"the weights were recorded with torch 2.15, this is {torch.__version__}")
SAME = dict.fromkeys(LAYOUTS, "a")


@recorded
@here
@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_three_runs_have_the_recorded_weights() -> None:
    done = forked("lockstep proof")
    assert done.returncode == 0, done.stdout + done.stderr
    _title, *hashes, last = done.stdout.splitlines()
    assert [line.split()[1] for line in hashes] == ["one", "ddp,", "killed,", "recorded"]
    assert len({line.split()[0] for line in hashes}) == 1
    assert last.startswith("proven: ")


@here
@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_a_run_with_another_seed_fails(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(LAYOUTS, KILLED)
    with pytest.raises(Different, match=f"^other weights than on {ONE}: {THREE}$"):
        prove(project(), {THREE: ["seed=1"]})
    assert "proven" not in capfd.readouterr().out


def test_each_hash_counts() -> None:
    assert verdict(SAME, "a").startswith("proven: ")
    for layout in (THREE, KILLED):
        with pytest.raises(Different, match=f"^other weights than on {ONE}: {layout}$"):
            verdict({**SAME, layout: "b"}, "a")
    with pytest.raises(Different, match=f"^other weights than on {ONE}: {THREE}; {KILLED}$"):
        verdict({**SAME, ONE: "b"}, "a")
    with pytest.raises(Different, match=r"^the runs agree, but their weights are not the recorded ones: "):
        verdict(SAME, "b")


def test_it_takes_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^lockstep proof devices=2: it takes no arguments: try lockstep parity"):
        main(["devices=2"])
    monkeypatch.setattr(proof, "missing_instructions", lambda: ["avx2", "fma"])
    with pytest.raises(UserError, match=r"^this processor has no avx2 and fma, with which the weights were recorded: "):
        main([])
