"""A metric that something follows, and nothing logs: found before the first step, by a batch that changes nothing."""

from pathlib import Path

import pytest
from conftest import summary_of
from user_runs import BOTH, jobs, train

NEVER = "callbacks.checkpoint.monitor=null"


def test_a_monitor_that_validation_does_not_log_is_refused_before_the_first_step(project: Path, tmp_path: Path) -> None:
    stopping = ("+callbacks.stopping._target_=lightning.pytorch.callbacks.EarlyStopping", "callbacks.checkpoint=null")
    message = [
        "callbacks.checkpoint.monitor=val/acc: nothing logs it; logged: val_acc, val_loss; give "
        "callbacks.checkpoint.monitor=val_acc",
        "configure_optimizers: the monitor of its lr_scheduler=val/loss: nothing logs it; logged: val_acc, val_loss",
        "callbacks.stopping.monitor=val/loss: nothing logs it; logged: val_acc, val_loss; give "
        "callbacks.stopping.monitor=val_loss",
    ]
    runs = [
        train(project, tmp_path / "one", "Underscores", "num_workers=2", ok=False),
        train(project, tmp_path / "two", "Follows", NEVER, *BOTH, "-m", ok=False),
        train(project, tmp_path / "three", "Underscores", *stopping, "+callbacks.stopping.monitor=val/loss", ok=False),
    ]
    assert message[0] in runs[0].stderr
    assert [summary_of(job)["error"].startswith(message[1]) for job in runs[1].jobs] == [True, True]
    assert message[2] in runs[2].stderr
    assert [run.returncode for run in runs] == [2, 1, 2]
    assert not runs[0].folders


@pytest.mark.parametrize("layout", [pytest.param((), marks=pytest.mark.nightly), ("strategy=ddp", "devices=2")])
def test_the_batch_before_the_first_step_changes_nothing(
    project: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    task = ("callbacks.checkpoint.monitor=null,val/acc", "num_workers=1", *layout)
    without, checked = (run.summary for run in jobs(project, tmp_path, "Remembers", *task))
    assert checked["weights_sha256"] == without["weights_sha256"]
    assert checked["metrics"] == without["metrics"]
    assert checked["metrics"]["val/best"] == 1.0
    assert checked["best_checkpoint"], "the control: it is followed"


def test_what_may_be_missing_is_not_refused(project: Path, tmp_path: Path) -> None:
    """Nor is a module without validation: tests/step/test_user_modules.py::test_a_module_without_a_test."""
    run = train(project, tmp_path / "unfollowed", "Underscores", NEVER, "max_steps=1", ok=False)
    assert "no step is made" in run.stderr, "it came to its first step"
    train(project, tmp_path / "in earnest only", "Shy", "max_epochs=1")
