"""What ends a run early, schedules that go up again or follow a metric, clipping by value: on any layout, resumed."""

from __future__ import annotations

import pytest
from conftest import Program, composed, summary_of

from lockstep.arithmetic.layout import Refusal
from lockstep.run.config import check

TASK = (
    *("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "batch_size=32", "pieces=2"),
    *("exact=true", "threads=1", "logger=none", "callbacks=early_stopping", "callbacks.early_stopping.patience=3"),
    *("callbacks.early_stopping.min_delta=1", "gradient_clip_val=0.002", "gradient_clip_algorithm=value", "lr=0.3"),
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["warm_restarts", "plateau"])
def test_the_same_bits_on_another_layout_and_resumed(schedule: str, run_train: Program) -> None:
    task = (*TASK, f"scheduler={schedule}", *["scheduler.patience=0", "scheduler.mode=max"] * (schedule == "plateau"))
    told = run_train(*task, "max_epochs=9", "name=alone").stderr
    rates = [line.rpartition("  lr ")[2] for line in told.splitlines() if "  lr " in line]
    run_train(*task, "max_epochs=2", "strategy=ddp", "devices=2", "name=moved", "callbacks.early_stopping.patience=8")
    changes = ("strategy=auto", "devices=1", "max_epochs=9", "callbacks.early_stopping.patience=3")
    run_train(f"resume={next((run_train.outputs / 'moved').iterdir())}", *changes)
    run_train(*task, "max_epochs=9", "gradient_clip_algorithm=norm", "name=other")
    names = ("alone", "moved", "other")
    expected, moved, control = (summary_of(next((run_train.outputs / name).iterdir())) for name in names)
    assert (moved["weights_sha256"], moved["steps"]) == (expected["weights_sha256"], expected["steps"])
    assert expected["epochs"] == 4, "the first validation, and three that were no better by 1"
    assert control["weights_sha256"] != expected["weights_sha256"]
    assert len(set(rates)) > 1, rates


def test_a_clipping_that_clips_nothing_is_refused() -> None:
    check(composed("gradient_clip_algorithm=value", "gradient_clip_val=0.1"))  # the control
    with pytest.raises(Refusal, match="gradient_clip_algorithm=value and gradient_clip_val=null don't go together"):
        check(composed("gradient_clip_algorithm=value"))
