"""`lockstep same` on two runs with the lines of two ledgers, and no checkpoint but the last."""

import json
from pathlib import Path

import pytest
from conftest import TINY, Program, forked

JOB = (*TINY, "extras=[ledger]", "checkpoint_every=1", "max_steps=6", "callbacks.pictures=null", "logger=none")


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_the_step_of_a_ledger(tmp_path: Path) -> None:
    """A schedule that ends at another rate differs after its peak. The data is gone, so no step is taken again."""
    one = Program(tmp_path / "one")(*JOB).folder
    other = Program(tmp_path / "other")(*JOB, "scheduler.final=0.2").folder
    hashes = [
        [json.loads(line)["weights_sha256"] for line in (run / "ledger.jsonl").read_text().splitlines()]
        for run in (one, other)
    ]
    first = next(step for step, pair in enumerate(zip(*hashes, strict=True)) if pair[0] != pair[1])
    assert first > 1
    done = forked("lockstep same", str(one), str(other))
    assert "different from step" in done.stdout, done.stdout + done.stderr
    assert "cause: scheduler.final (0, 0.2)" in done.stdout
    assert "cause: the learning rate of" in done.stdout

    record = other / "provenance.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"data_fingerprint": "0" * 64}))
    done = forked("lockstep same", str(one), str(other))
    assert f"different at step {first}: the weights have other hashes" in done.stdout, done.stdout + done.stderr
    assert "not taken again" in done.stdout
