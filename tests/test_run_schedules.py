"""What ends a run early, schedules that go up again or follow a metric, clipping by value: on any layout, resumed."""

from __future__ import annotations

import pytest
from conftest import TINY, Program, summary_of

TASK = (
    *(*TINY, "pieces=2", "exact=true", "logger=none", "callbacks=early_stopping"),
    *("callbacks.early_stopping.patience=3", "callbacks.early_stopping.min_delta=1"),
    *("gradient_clip_val=0.002", "gradient_clip_algorithm=value", "lr=0.3"),
)


@pytest.mark.slow
def test_the_same_bits_on_another_layout_and_resumed(run_train: Program) -> None:
    task = (*TASK, "scheduler=warm_restarts")
    told = run_train(*task, "max_epochs=9", "name=alone").stderr
    rates = [line.rpartition("  lr ")[2] for line in told.splitlines() if "  lr " in line]
    run_train(*task, "max_epochs=2", "strategy=ddp", "devices=2", "name=moved")
    run_train(f"resume={next((run_train.outputs / 'moved').iterdir())}", "strategy=auto", "devices=1", "max_epochs=9")
    run_train(*task, "max_epochs=9", "gradient_clip_algorithm=norm", "name=other")
    names = ("alone", "moved", "other")
    expected, moved, control = (summary_of(next((run_train.outputs / name).iterdir())) for name in names)
    assert (moved["weights_sha256"], moved["steps"]) == (expected["weights_sha256"], expected["steps"])
    assert expected["epochs"] == 4, "the first validation, and three that were no better by 1"
    assert control["weights_sha256"] != expected["weights_sha256"]
    assert len(set(rates)) > 1, rates
