"""Signals that come before a run's workers exist, or when they are done: nothing is lost, and nothing is said of it."""

import multiprocessing
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import forked, summary_of

from lockstep.callbacks import preemption
from lockstep.config.check import check
from lockstep.launch.signals import forward_signals
from lockstep.run import supervisor as runs
from lockstep.run.api import compose

SAVE = """
import os, signal, sys
sys.path.insert(0, "src")
from lockstep.run import cli
from train import train

def job(raw, folder):
    os.kill(os.getpid(), signal.SIGUSR1)
    result = train(raw, folder)
    os.kill(os.getpid(), signal.SIGUSR1)
    return result

cli.command(job, "train")
"""


@pytest.mark.parametrize("mode", [(), ("-m",)], ids=["run", "sweep"])
def test_asked_to_save_when_there_is_nothing_to_save(tmp_path: Path, mode: tuple[str, ...]) -> None:
    (tmp_path / "save.py").write_text(SAVE)
    done = forked(tmp_path / "save.py", *mode, "max_steps=2", "batch_size=8", "logger=none", f"outputs={tmp_path}")
    assert done.returncode == 0, done.stderr
    (found,) = tmp_path.rglob("summary.json")
    assert summary_of(found.parent)["status"] == "completed"


def test_ctrl_c_before_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs.run_in_workers(interrupted, check(dict(compose())), SimpleNamespace(train=range(640)), tmp_path)
    assert (summary_of(tmp_path)["status"], summary_of(tmp_path)["error"]) == ("interrupted", "interrupted by SIGINT")


def test_asked_to_end_while_the_ranks_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending_signals: list[int] = [signal.SIGUSR1]
    monkeypatch.setattr(preemption, "pending_signals", pending_signals)
    monkeypatch.setattr(preemption.dist, "all_reduce", lambda *args: pending_signals.append(signal.SIGTERM))
    trainer: Any = SimpleNamespace(world_size=2, global_step=1, is_last_batch=True)
    module: Any = None
    preemption.Preemption(tmp_path).on_train_batch_end(trainer, module, None, None, 0)
    assert pending_signals == [signal.SIGTERM]


def test_asked_to_end_at_the_moment_when_a_worker_has(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [SimpleNamespace(pid=gone.pid)])
    with forward_signals() as received:
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]
