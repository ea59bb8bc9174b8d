"""A project's training as a program of its own. This module imports no torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.launch.environment import PARENT
from lockstep.project import Project


@contextmanager
def started(of: Project, arguments: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start `src/train.py`. At the end, kill the process and its workers if they still run; also if we are killed.

    It can import what this process can. It has a session of its own, so Ctrl-C reaches this process only.

    Args:
        of: the project.
        arguments: those of the program.
        options: further ones of `Popen`.
    """
    path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, str(of.train_program), *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, PARENT: str(os.getpid())},
        start_new_session=True,
        **options,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
