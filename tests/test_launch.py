"""lockstep.launch where nobody trains: workers that end in odd ways."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep import heartbeat
from lockstep.launch import WorkerFailed, launch
from lockstep.layout import resolve

ALONE = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=8)


def killed_when_done(seconds: float) -> str:
    """Returns, and is killed before the agent has told it that its result has arrived."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return "done"


def test_a_worker_that_is_killed_when_it_is_done_does_not_hang_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing's Event waits for ever for a waiter that was killed: seen in one of about ten of these."""
    monkeypatch.setattr(heartbeat, "ORPHANED", 1.0)
    resource_tracker.ensure_running()  # a child of ours that is no worker, nor is this one
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            _killed_when_done()
        finally:
            other.kill()


def _killed_when_done() -> None:
    for milliseconds in range(10, 60, 2):
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match="killed"):
            launch(killed_when_done, milliseconds / 1000, layout=ALONE)
        assert time.monotonic() - began < 30


def test_what_stood_still_together_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, or a machine that sleeps: the parent, too, was away. A worker that is silent by itself is ended."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    away = 0.0
    clock = SimpleNamespace(time=lambda: time.time() + away, monotonic=time.monotonic)  # a shift that comes at once
    monkeypatch.setattr(heartbeat, "time", clock)
    try:
        with heartbeat.watching(str(tmp_path), 1, timeout=1.0) as silent:
            heartbeat.join(0)
            heartbeat.beat(7)
            assert heartbeat._beats is not None
            heartbeat._beats[3] = worker.pid
            away = 1000.0
            time.sleep(0.6)
            assert worker.poll() is None
            assert worker.wait(timeout=10) == -signal.SIGKILL
        assert "silent for 1 s in step 8" in silent[worker.pid]
    finally:
        heartbeat.leave()
        worker.kill()
        worker.wait()
