"""The machine that keeps a run: it says who takes part and how the run goes on, see lockstep.launch.meeting."""

import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from lockstep.arithmetic.layout import Layout, Refusal, counted, listed
from lockstep.launch.endings import Outcome
from lockstep.launch.group import serve
from lockstep.launch.network import LOOPBACK, bound
from lockstep.launch.signals import ending_at_once
from lockstep.launch.wire import JOINING, PATIENCE, PROTOCOL, Message, Place, Wire, difference, outcome_told, waiting


@dataclass(eq=False)
class OtherMachine:
    """Another machine, as the keeper knows it."""

    wire: Wire
    name: str
    address: str
    card: dict[str, str] | None = None  # what it is ready to begin with; None: it isn't
    outcome: Outcome | None = None  # how its workers ended


class Keeper:
    """The machine that keeps the run: its folder, checkpoints and dashboards.

    Args:
        listener: where guests connect; None: there are none.
        endpoint: its address as it was given, for messages.
    """

    def __init__(self, listener: socket.socket | None = None, endpoint: str = "") -> None:
        self._listener, self._endpoint = listener, endpoint
        self._noted = threading.Condition(threading.RLock())
        self._said: dict[str, Any] = {}
        self._guests: list[OtherMachine] = []  # that are here, in the order in which they came
        self._taking_part: list[OtherMachine] = []  # in the life that runs, or was the last one
        self._wanted = 0  # machines that would take part in it if they were here
        self._card: Mapping[str, str] = {}
        self._timeout = JOINING
        self._run = 0  # runs that have ended, of a sweep
        self._cause: Outcome | None = None  # why it failed
        if listener:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    # --- before the run ---

    def decide(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, for all machines; with a Refusal of its they all end."""
        if what not in self._said:
            try:
                value = make()
            except Refusal as refusal:
                self.end(Outcome("refused", str(refusal)))
                raise
            with self._noted:
                self._said[what] = value
                for guest in self._guests:
                    guest.wire.send(said={what: value})
        return self._said[what]

    def begin(
        self, card: Mapping[str, str], layout: Layout, restarts: int = 0, timeout: float = JOINING, fewer: bool = False
    ) -> Place:
        """Waits for `layout.num_nodes` machines; then all begin a life of the run.

        Args:
            card: what must be the same on all machines, see lockstep.run.provenance.
            timeout: seconds of silence after which a machine counts as lost.
            fewer: those that are here are enough.

        Raises:
            Refusal: a machine differs.
        """
        with waiting(self._noted) as a_moment:
            self._card, self._timeout, self._wanted = dict(card), timeout, 0
            for guest in self._guests:
                guest.wire.send(decided=True)
            while True:
                self._guests = [guest for guest in self._guests if not guest.wire.lost(timeout)]
                for guest in self._guests:
                    if guest.card is not None and (odd := difference(card, guest.card, guest.name)):
                        if not restarts:
                            raise Refusal(odd)
                        self._refuse(guest, odd)
                ready = [guest for guest in self._guests if guest.card is not None]
                everybody = not any(guest.card is None for guest in self._taking_part if guest in self._guests)
                if len(ready) + 1 >= layout.num_nodes or (fewer and everybody):
                    break
                missing = counted(layout.num_nodes - 1 - len(ready), "more machine")
                here = f"; here: {listed(guest.name for guest in self._guests)}" * bool(self._guests)
                a_moment(f"waiting for {missing} at {self._endpoint}{here}")
            self._taking_part, self._wanted = ready[: layout.num_nodes - 1], layout.num_nodes
            for guest in ready[layout.num_nodes - 1 :]:
                self._answer(guest)
            address = self._listener.getsockname()[0] if self._listener else LOOPBACK
            self._cause = None
            self._at = bound(address)  # of a fresh store: what a life leaves in it can hang the next one
            machines, workers = len(self._taking_part) + 1, layout.world_size // layout.num_nodes
            place = Place(0, machines, workers, restarts, address, self._at.getsockname()[1])
            for number, guest in enumerate(self._taking_part, 1):
                guest.card = guest.outcome = None
                guest.wire.send(begins=asdict(place) | {"machine": number})
            return place

    # --- while workers run: asked by the thread that watches them ---

    def serve(self) -> None:
        """Opens the store where workers meet. Not before all of this machine run: its thread looks up the name of who
        connects, and a worker forked in that moment inherits glibc's resolver locked, for ever. Who comes earlier
        waits."""
        self._store = serve(self._at)

    def trouble(self) -> str:
        """Why this machine's workers can't go on; empty where they can."""
        with self._noted:
            for guest in self._taking_part:
                if guest.outcome is None and (how := guest.wire.lost(self._timeout)):
                    self._blame(Outcome("failed", f"machine {guest.name} ({guest.address}) was lost: {how}"))
                elif guest.outcome is not None:
                    self._blame(guest.outcome)
            return self._cause.text if self._cause else ""

    def returning(self) -> str:
        """The name of a machine that came while fewer run than were asked for; the workers are to save and end."""
        with self._noted:
            if len(self._taking_part) + 1 >= self._wanted:
                return ""
            fits = (g for g in self._guests if g.card is not None and not difference(self._card, g.card, g.name))
            return next((guest.name for guest in fits if guest not in self._taking_part), "")

    # --- after it ---

    def settle(self, own: Outcome) -> Outcome:
        """How the life ended for all machines, when all have told how it did for them or are lost."""
        if own.kind == "completed":  # what rank zero has tested and written, nobody can take back
            return own
        until = time.monotonic() + self._timeout + PATIENCE
        with ending_at_once(), self._noted:
            self._blame(own)
            while not all(guest.outcome or guest.wire.lost(self._timeout) for guest in self._taking_part):
                if time.monotonic() > until:
                    break
                self._noted.wait(0.2)
            self.trouble()
            told = [own, *(guest.outcome for guest in self._taking_part if guest.outcome)]
            interrupted = next((outcome for outcome in told if outcome.kind == "interrupted"), own)
            return replace(self._cause or interrupted, steps=own.steps)

    def lost(self) -> int:
        """How many machines the life that has ended has lost."""
        with self._noted:
            return sum(guest.wire.closed for guest in self._taking_part)

    def end(self, outcome: Outcome) -> None:
        """Tells the guests how the run ended. Another one may follow, of a sweep."""
        with self._noted:
            self._run += 1
            for guest in self._guests:
                guest.card = guest.outcome = None
                guest.wire.send(ended=asdict(outcome), run=self._run)
            self._card, self._taking_part, self._wanted = {}, [], 0

    def _blame(self, outcome: Outcome) -> None:
        """Takes note of the first that fails by itself, and tells all: their workers wait for its."""
        if self._cause is None and outcome.kind in ("failed", "refused"):
            self._cause = outcome
            for guest in self._taking_part:
                guest.wire.send(trouble=outcome.text)

    def _answer(self, guest: OtherMachine) -> None:
        """Refuses who comes while others run, and is not needed, or differs."""
        if not self._wanted or guest in self._taking_part:
            return
        odd = difference(self._card, guest.card or {}, guest.name)
        here = all(other.wire.silent_for() < 2.5 for other in self._taking_part)  # one that was cut off may come back
        if len(self._taking_part) + 1 == self._wanted and here:
            odd = f"the run at {self._endpoint} has its {self._wanted} machines"
        if odd:
            self._refuse(guest, odd)

    def _refuse(self, guest: OtherMachine, why: str) -> None:
        guest.card = None
        guest.wire.send(ended=asdict(Outcome("refused", why)), run=self._run)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            with suppress(OSError):
                connection, (address, *_) = listener.accept()
                Wire(connection, self._noted, partial(self._hear, address))

    def _hear(self, address: str, wire: Wire, message: Message) -> None:
        guest = next((guest for guest in self._guests if guest.wire is wire), None)
        if guest is None:
            if message.get("hello") != PROTOCOL:
                wire.close()
                return
            self._guests.append(OtherMachine(wire, str(message.get("name", "?"))[:64], address))
            state = {"said": self._said, "decided": bool(self._card), "run": self._run}
            wire.send(hello=PROTOCOL, name=platform.node(), **state)
        elif isinstance(card := message.get("card"), dict) and message.get("run") == self._run:  # not of the run before
            guest.card = {str(key): str(value) for key, value in card.items()}
            self._answer(guest)
        elif isinstance(told := message.get("outcome"), dict):
            guest.outcome = outcome_told(told)
