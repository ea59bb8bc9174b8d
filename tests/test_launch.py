"""lockstep.launch where nobody trains: workers that end in odd ways."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from multiprocessing import resource_tracker

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
