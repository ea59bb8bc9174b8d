"""What the machines of a run say to each other: lines of JSON over a connection, read as data and as nothing else."""

import json
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.endings import Outcome
from lockstep.launch.signals import ending_at_once

PROTOCOL = "lockstep 1"
PATIENCE = 5.0  # seconds of waiting after which it is said for whom
LONGEST = 1 << 20  # bytes of a message
JOINING = 3600.0  # seconds that machines wait for each other before a run
Message = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A machine's part in a life of the run, from its start to the end of its workers."""

    machine: int  # this one's number; 0 keeps the run
    machines: int
    workers: int  # on each machine
    restarts: int  # lives before this one that failed
    address: str  # of the store at which the workers of all machines meet
    port: int


class Wire:
    """A connection to another machine's parent. `heard` is when it last said something, `closed` whether it has ended.

    Args:
        hear: called with each message while `noted` is held, which is then notified.
    """

    def __init__(
        self, connection: socket.socket, noted: threading.Condition, hear: Callable[["Wire", Message], None]
    ) -> None:
        self.heard = time.monotonic()
        self.closed = False
        self._connection, self._noted, self._hear = connection, noted, hear
        self._sending = threading.Lock()
        for task in (self._listen, self._beat):
            threading.Thread(target=task, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Nothing is raised: who can't be reached is noticed by its silence."""
        with self._sending, suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self.closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # a forked worker has the connection open, too

    def silent_for(self) -> float:
        return time.monotonic() - self.heard

    def lost(self, timeout: float) -> str:
        """How the other machine was lost, which is silent for `timeout` seconds at most; empty: it is here."""
        if self.closed:
            return "it closed the connection"
        if self.silent_for() > timeout:
            self.close()
            return f"not a word of it for {timeout:g} s"
        return ""

    def _listen(self) -> None:
        broken = (OSError, ValueError, TypeError, KeyError)  # the last three: what was sent is no message of ours
        with suppress(*broken), self._connection.makefile("rb") as lines:
            while line := lines.readline(LONGEST):
                message = json.loads(line)
                if not isinstance(message, dict):
                    break
                with self._noted:
                    self.heard = time.monotonic()
                    if message:
                        self._hear(self, message)
                        self._noted.notify_all()
        self.close()
        with self._noted:
            self._noted.notify_all()

    def _beat(self) -> None:
        while not self.closed:
            self.send()
            time.sleep(1)


@contextmanager
def waiting(noted: threading.Condition) -> Iterator[Callable[[str], None]]:
    """Holds `noted`, and hears signals at once. Yields what waits for a moment: after a while it says for whom, and
    after all of `JOINING` it is a Refusal."""
    began, said = time.monotonic(), ""

    def a_moment(text: str) -> None:
        nonlocal said
        waited = time.monotonic() - began
        if waited > PATIENCE and text != said:
            print(text, file=sys.stderr, flush=True)
            said = text
        if waited > JOINING:
            raise Refusal(f"{text}, for {JOINING / 60:g} minutes in vain")
        noted.wait(0.2)

    with ending_at_once(), noted:
        yield a_moment


def outcome_told(told: Mapping[str, Any]) -> Outcome:
    """An outcome that came over a wire."""
    signum, steps, right = (int(told[name]) for name in ("signum", "steps", "right"))
    return Outcome(str(told["kind"]), str(told["text"]), signum, steps, tuple(map(int, told["without"])), right)


def difference(own: Mapping[str, str], other: Mapping[str, str], name: str, here: str = "") -> str:
    """What two machines don't have alike, as a line; empty: nothing. `name` is the other's, `here` this one's."""
    for key in sorted(own.keys() | other.keys()):
        mine, theirs = own.get(key, "missing"), other.get(key, "missing")
        if mine != theirs:
            return f"machines differ: {key} is {theirs} on {name}, {mine} on {here or platform.node()}"
    return ""
