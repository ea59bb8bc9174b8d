"""Promise 4 and 6 for what a run can be told beside its layout: each row of conf/parity.yaml, several in a run.

`python scripts/parity.py features=true` has them one by one, and their controls by rank.
"""

from __future__ import annotations

import os
import signal
from itertools import chain
from pathlib import Path

import pytest
from conftest import NORMS, Program, composed, summary_of, wait_for

pytestmark = pytest.mark.slow

ROWS: dict[str, list[str]] = composed(page="parity")["rows"]
TOGETHER = [
    ("ema", "class_weights", "plateau", "trivial_augment", "balanced_sampling"),
    ("mixup", "random_erasing", "frozen"),
    ("cutmix",),
]
TASK = (*NORMS, "accelerator=cpu", "pieces=4", "max_epochs=4", "checkpoint_every=3", "exact=true")


def told(names: tuple[str, ...]) -> list[str]:
    return list(chain.from_iterable(ROWS[name] for name in names))


def test_every_row_is_in_a_run() -> None:
    assert set(chain.from_iterable(TOGETHER)) == set(ROWS)


@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_one_sha256_on_all_layouts_and_after_a_kill(names: tuple[str, ...], run_train: Program, tmp_path: Path) -> None:
    run = run_train(*TASK, *told(names), "strategy=ddp,dp", "devices=1,3", "-m")
    found = [summary_of(folder) for folder in run.jobs]
    (sha,) = {summary["weights_sha256"] for summary in found}
    assert len({summary["metrics"]["val/loss"] for summary in found}) == 1
    losses = [summary["metrics"]["train/loss"] for summary in found]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)

    program = Program(tmp_path / "struck")
    process = program.start(*TASK, *told(names), "strategy=ddp", "devices=3")
    (last,) = wait_for(lambda: list(program.outputs.rglob("last.ckpt")), process)  # after step 3 of 6 in an epoch
    os.killpg(process.pid, signal.SIGKILL)
    assert program.finish(process).returncode == -signal.SIGKILL
    resumed = program(f"resume={last.parent.parent}", "strategy=dp", "devices=2")
    assert "resumes after step" in resumed.stderr + resumed.stdout
    assert resumed.summary["weights_sha256"] == sha

    for name in names:  # the controls: each has a part in these bits
        others = told(tuple(other for other in names if other != name))
        without = Program(tmp_path / name)(*TASK, *others, "callbacks.console=null")
        assert without.summary["weights_sha256"] != sha, name
