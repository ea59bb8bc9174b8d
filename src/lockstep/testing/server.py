"""A process that makes runs for pytest's process, one after another: it imports once, and forks a worker per device.

It computes nothing itself, so it may fork, whatever pytest's process has computed. Texts have other hashes in it
(PYTHONHASHSEED), so a set of them has another order than in pytest's process.
"""

import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UserError, WorkerFailed
from lockstep.launch.process_lifetime import disable_garbage_collector
from lockstep.launch.signals import set_parent_death_signal

HANGING = 600  # seconds until a request counts as hanging
LINES = 20  # of the output, shown if the process ends
_server: "Server | None" = None


class Server:
    """Starts the process, and sends it requests."""

    def __init__(self) -> None:
        self.output = Path(tempfile.mkstemp(prefix="lockstep_testing_", suffix=".txt")[1])
        other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from lockstep.testing.server import serve; serve()", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": other},
                start_new_session=True,  # Ctrl-C reaches pytest only, which ends this process
            )

    def call(self, function: str, **arguments: Any) -> Any:
        """Call a function in the process.

        Args:
            function: its dotted path.
            arguments: plain data.

        Returns:
            What it returns, plain data.

        Raises:
            UserError: it raised an error about its input, or a run failed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = json.dumps({"function": function, "arguments": arguments, "path": sys.path})
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], HANGING)
            answer = self.process.stdout.readline() if ready else ""
        except BrokenPipeError:
            answer, ready = "", [self.process.stdout]
        if not answer:
            how = "has ended" if ready else f"has not answered for {HANGING} s"
            close()
            lines = self.output.read_text(errors="replace").strip().splitlines()[-LINES:]
            pytest.fail("\n".join([f"the tests' process {how}; its last lines:", *lines]), pytrace=False)
        outcome = json.loads(answer)
        if "error" in outcome:
            raise UserError(outcome["error"])
        return outcome["result"]


def server(session: pytest.Session) -> Server:
    """Return the process of a pytest session; start it at the first call."""
    global _server
    if _server is None:
        _server = Server()
        session.addfinalizer(close)
    return _server


def close() -> None:
    """End the process, if there is one."""
    global _server
    ending, _server = _server, None
    if ending is not None:
        ending.process.kill()  # its workers end with it
        ending.process.communicate()
        ending.output.unlink()


def serve() -> None:
    """Answer requests from stdin until it is closed. What else is printed goes to stderr."""
    set_parent_death_signal(int(sys.argv[1]))
    disable_garbage_collector()  # until the first fork, which then exempts all that was imported
    sys.argv = ["src/train.py"]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.set_inheritable(answers.fileno(), False)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request = json.loads(line)
        sys.path += [folder for folder in request["path"] if folder not in sys.path]
        home, _, name = request["function"].rpartition(".")
        try:
            outcome = {"result": getattr(importlib.import_module(home), name)(**request["arguments"])}
        except (UserError, WorkerFailed) as error:
            outcome = {"error": str(error)}
        print(json.dumps(outcome), file=answers, flush=True)
