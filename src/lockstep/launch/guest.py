"""Any machine but the one that keeps the run: it does what that one says, see lockstep.launch.meeting."""

import platform
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.endings import Outcome
from lockstep.launch.wire import JOINING, PROTOCOL, Message, Place, Wire, outcome_told, waiting


class KeeperLost(Exception):
    """The machine that keeps the run can't be reached any more. The message names it."""


class Guest:
    """Any other machine: it keeps its log only, and does what the keeper says.

    Args:
        address, port: of the keeper.
        endpoint: the same as it was given, for messages.
    """

    def __init__(self, address: str, port: int, endpoint: str) -> None:
        self._noted = threading.Condition(threading.RLock())
        self._endpoint, self.keeper = endpoint, endpoint
        self._said: dict[str, Any] | None = None
        self._place: Place | None = None
        self._run = 0  # which one of a sweep
        self._decided = False  # whether the keeper has begun, and decides nothing more
        self._ended: Outcome | None = None
        self._trouble = ""
        self._gone = ""
        self._timeout = JOINING
        with waiting(self._noted) as a_moment:
            while True:
                with suppress(OSError):
                    connection = socket.create_connection((address, port), timeout=2)
                    break
                a_moment(f"waiting for {endpoint}")
            connection.settimeout(None)
            self._wire = Wire(connection, self._noted, self._hear)
            self._wire.send(hello=PROTOCOL, name=platform.node())
            while self._said is None:
                if self._wire.closed:
                    raise Refusal(f"rdzv_endpoint={endpoint}: what listens there is no run of this version of Lockstep")
                a_moment(f"waiting for {endpoint}")

    def decide(self, what: str, make: Callable[[], Any]) -> Any:
        """What the keeper decides; `make` is not called. A Refusal where that was refused, or not started alike."""
        with waiting(self._noted) as a_moment:
            while what not in (self._said or {}):
                self._must_go_on()
                if self._decided:
                    raise Refusal(f"machine {self.keeper} was started otherwise: it goes on with a run, or does not")
                a_moment(f"waiting for {self.keeper}")
            return (self._said or {})[what]

    def begin(self, card: Mapping[str, str], timeout: float) -> Place | None:
        """Waits for the next life of the run; None: it is completed.

        Raises:
            Refusal, WorkerFailed, Interrupted: what ended the run.
            KeeperLost: nobody is there to say.
        """
        self._timeout = timeout
        with waiting(self._noted) as a_moment:
            if not self._ended:  # else `_run` is the next one's already, and the card this one's
                self._wire.send(card=dict(card), run=self._run)
            while self._place is None:
                if self._ended and self._ended.kind == "completed":
                    self._ended = None
                    return None
                self._must_go_on()
                a_moment(f"waiting for {self.keeper} to begin")
            place, self._place, self._trouble = self._place, None, ""
            return place

    def serve(self) -> None:
        """The keeper does."""

    def trouble(self) -> str:
        with self._noted:
            return self._trouble or self._lost()

    def returning(self) -> str:
        return ""

    def settle(self, own: Outcome) -> None:
        """Tells the keeper how this machine's workers ended."""
        self._wire.send(outcome=asdict(own))

    def _must_go_on(self) -> None:
        if self._ended:
            outcome, self._ended = self._ended, None
            raise outcome.raised()
        if lost := self._lost():
            raise KeeperLost(lost)

    def _lost(self) -> str:
        """How the keeper was lost, as it was noticed first; empty: it is here."""
        if not self._gone and (how := self._wire.lost(self._timeout)):
            self._gone = f"machine {self.keeper}, which keeps the run, was lost: {how}"
        return self._gone

    def _hear(self, wire: Wire, message: Message) -> None:
        if message.get("hello") == PROTOCOL:
            self.keeper = f"{message['name']} ({self._endpoint})"
            self._said, self._decided = dict(message["said"]), bool(message["decided"])
            self._run = int(message["run"])
        elif self._said is None:
            wire.close()
        elif "said" in message:
            self._said.update(message["said"])
        elif "decided" in message:
            self._decided = True
        elif "begins" in message:
            self._place = Place(**message["begins"])
        elif "trouble" in message:
            self._trouble = str(message["trouble"])
        elif "ended" in message:
            self._ended, self._decided, self._run = outcome_told(message["ended"]), False, int(message["run"])
