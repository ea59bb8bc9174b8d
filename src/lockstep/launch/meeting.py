"""How the machines of a run meet, agree, and hear of each other's end.

On each machine a parent process launches that machine's workers. The one whose address `rdzv_endpoint` is keeps the
run: it listens there, and the guests, which are the parents on all other machines, hold a connection to it. It says who
takes part and where the workers meet, hears from each guest how its workers ended, and says how the run goes on. Who is
silent for `timeout` seconds is lost; so is who closes its connection.

Messages are lines of JSON, read as data and as nothing else. The threads that read them only take note; whoever waits
looks at what was noted.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from lockstep.arithmetic.layout import Layout, Refusal, counted, listed
from lockstep.launch.endings import Outcome
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.group import first_life, of_rank_zero, serve
from lockstep.launch.network import endpoint_of, listening, resolved
from lockstep.launch.signals import ending_at_once

PROTOCOL = "lockstep 1"
PATIENCE = 5.0  # seconds of waiting after which it is said for whom
LONGEST = 1 << 20  # bytes of a message
JOINING = 3600.0  # seconds that machines wait for each other before a run
Message = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A machine's part in a life of the run, from its start to the end of its workers.

    Attributes:
        life: counts these.
        machine, machines: this one's number, and how many there are; 0 keeps the run.
        devices: workers on each machine.
        restarts: lives before this one that failed.
        address, port: of the store at which the workers of all machines meet.
    """

    life: int
    machine: int
    machines: int
    devices: int
    restarts: int
    address: str
    port: int


class _Wire:
    """A connection to another machine's parent. `heard` is when it last said something, `closed` whether it has ended.

    Args:
        hear: called with each message while `noted` is held, which is then notified.
    """

    def __init__(
        self, connection: socket.socket, noted: threading.Condition, hear: Callable[[_Wire, Message], None]
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


class _Wait:
    """A wait that says for whom after a while, and hears signals at once.

    Raises:
        Refusal: it was in vain.
    """

    def __init__(self, noted: threading.Condition, limit: float = JOINING) -> None:
        self.noted, self.began, self.limit, self.said = noted, time.monotonic(), limit, ""

    def a_moment(self, text: str) -> None:
        """`noted` is held."""
        waited = time.monotonic() - self.began
        if waited > PATIENCE and text != self.said:
            print(text, file=sys.stderr, flush=True)
            self.said = text
        if waited > self.limit:
            raise Refusal(f"{text}, for {self.limit / 60:g} minutes in vain")
        self.noted.wait(0.2)


class Keeper:
    """The machine that keeps the run: its folder, checkpoints and dashboards.

    Args:
        listener: where guests connect.
        endpoint: its address as it was given, for messages.
    """

    def __init__(self, listener: socket.socket, endpoint: str) -> None:
        self._listener, self._endpoint = listener, endpoint
        self._noted = threading.Condition(threading.RLock())
        self._said: dict[str, Any] = {}
        self._guests: list[_Guest] = []  # that are here, in the order in which they came
        self._taking_part: list[_Guest] = []  # in the life that runs, or was the last one
        self._wanted = 0  # machines that would take part in it if they were here
        self._card: Mapping[str, str] = {}
        self._timeout = JOINING
        self._life = 0
        self._cause: Outcome | None = None  # why it failed
        threading.Thread(target=self._accept, daemon=True).start()

    # --- before the run ---

    def decide(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, for all machines.

        Raises:
            Refusal: `make`'s; all end with it.
        """
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

    def begin(self, card: Mapping[str, str], layout: Layout, restarts: int, timeout: float, fewer: bool) -> Place:
        """Waits for `layout.num_nodes` machines; then all begin a life of the run.

        Args:
            card: what must be the same on all machines, see lockstep.run.card.
            timeout: seconds of silence after which a machine counts as lost.
            fewer: those that are here are enough.

        Raises:
            Refusal: a machine differs.
        """
        waits = _Wait(self._noted)
        with ending_at_once(), self._noted:
            self._card, self._timeout, self._wanted = dict(card), timeout, layout.num_nodes
            while True:
                self._guests = [guest for guest in self._guests if not guest.lost(timeout)]
                ready = [guest for guest in self._guests if guest.card is not None]
                for guest in ready:
                    if odd := difference(card, guest.card or {}, guest.name):
                        raise Refusal(odd)
                everybody = len(ready) == len(self._guests)
                if len(ready) + 1 >= layout.num_nodes or (fewer and everybody):
                    break
                missing = counted(layout.num_nodes - 1 - len(ready), "more machine")
                here = f"; here: {listed(guest.name for guest in self._guests)}" * bool(self._guests)
                waits.a_moment(f"waiting for {missing} at {self._endpoint}{here}")
            self._taking_part = ready[: layout.num_nodes - 1]
            for guest in ready[layout.num_nodes - 1 :]:
                guest.wire.send(
                    ended=asdict(Outcome("refused", f"the run has its {layout.num_nodes} machines already"))
                )
            address = self._listener.getsockname()[0]
            self._cause = None
            self._store = serve(address)  # a fresh one: what a life leaves in it can hang the next one
            self._life += 1
            machines = len(self._taking_part) + 1
            place = Place(self._life, 0, machines, layout.devices, restarts, address, self._store.port)
            for number, guest in enumerate(self._taking_part, 1):
                guest.card = guest.outcome = None
                guest.wire.send(begins=asdict(place) | {"machine": number})
            return place

    # --- while workers run: asked by the thread that watches them ---

    def may_connect(self, forked: bool) -> bool:
        """Whether workers may connect to the store; `forked`: all of this machine run."""
        with self._noted:
            for guest in self._taking_part if forked else ():
                guest.wire.send(serves=self._life)
        return forked

    def trouble(self) -> str:
        """Why this machine's workers can't go on; empty where they can."""
        with self._noted:
            for guest in self._taking_part:
                if guest.outcome is None and (how := guest.lost(self._timeout)):
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
            while not all(guest.outcome or guest.lost(self._timeout) for guest in self._taking_part):
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
            for guest in self._guests:
                guest.card = guest.outcome = None
                guest.wire.send(ended=asdict(outcome))
            self._taking_part, self._wanted = [], 0

    def _blame(self, outcome: Outcome) -> None:
        """Takes note of the first that fails by itself, and tells all: their workers wait for its."""
        if self._cause is None and outcome.kind in ("failed", "refused"):
            self._cause = outcome
            for guest in self._taking_part:
                guest.wire.send(trouble=outcome.text)

    def _answer(self, guest: _Guest) -> None:
        """Refuses who comes while others run, and is not needed, or differs."""
        if not self._wanted or guest in self._taking_part:
            return
        odd = difference(self._card, guest.card or {}, guest.name)
        here = all(other.wire.silent_for() < 2.5 for other in self._taking_part)  # one that was cut off may come back
        if len(self._taking_part) + 1 == self._wanted and here:
            odd = f"the run at {self._endpoint} has its {self._wanted} machines"
        if odd:
            guest.card = None
            guest.wire.send(ended=asdict(Outcome("refused", odd)))

    def _accept(self) -> None:
        while True:
            with suppress(OSError):
                connection, (address, *_) = self._listener.accept()
                _Wire(connection, self._noted, partial(self._hear, address))

    def _hear(self, address: str, wire: _Wire, message: Message) -> None:
        guest = next((guest for guest in self._guests if guest.wire is wire), None)
        if guest is None:
            if message.get("hello") != PROTOCOL:
                wire.close()
                return
            self._guests.append(_Guest(wire, str(message.get("name", "?"))[:64], address))
            wire.send(hello=PROTOCOL, name=platform.node(), said=self._said)
        elif isinstance(card := message.get("card"), dict):
            guest.card = {str(key): str(value) for key, value in card.items()}
            self._answer(guest)
        elif isinstance(told := message.get("outcome"), dict):
            guest.outcome = _outcome(told)


@dataclass(eq=False)
class _Guest:
    """Another machine, as the keeper knows it.

    Attributes:
        card: what it is ready to begin with; None: it isn't.
        outcome: how its workers ended.
    """

    wire: _Wire
    name: str
    address: str
    card: dict[str, str] | None = None
    outcome: Outcome | None = None

    def lost(self, timeout: float) -> str:
        """How it was lost; empty: it is here."""
        if self.wire.closed:
            return "it closed the connection"
        if self.wire.silent_for() > timeout:
            self.wire.close()
            return f"not a word of it for {timeout:g} s"
        return ""


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
        self._serves = False  # whether workers may connect to the keeper's store
        self._ended: Outcome | None = None
        self._trouble = ""
        self._timeout = JOINING
        waits = _Wait(self._noted)
        with ending_at_once(), self._noted:
            while True:
                with suppress(OSError):
                    connection = socket.create_connection((address, port), timeout=2)
                    break
                waits.a_moment(f"waiting for {endpoint}")
            connection.settimeout(None)
            self._wire = _Wire(connection, self._noted, self._hear)
            self._wire.send(hello=PROTOCOL, name=platform.node())
            while self._said is None:
                if self._wire.closed:
                    raise Refusal(f"rdzv_endpoint={endpoint}: what listens there is no run of this version of Lockstep")
                waits.a_moment(f"waiting for {endpoint}")

    def decide(self, what: str, make: Callable[[], Any]) -> Any:
        """What the keeper decides; `make` is not called.

        Raises:
            Refusal: the keeper was refused, or was not started alike.
        """
        waits = _Wait(self._noted)
        with ending_at_once(), self._noted:
            while what not in (self._said or {}):
                self._must_go_on()
                waits.a_moment(f"waiting for {self.keeper}")
            return (self._said or {})[what]

    def begin(self, card: Mapping[str, str], timeout: float) -> Place | None:
        """Waits for the next life of the run; None: it is completed.

        Raises:
            Refusal, WorkerFailed, Interrupted: what ended the run.
            KeeperLost: nobody is there to say.
        """
        self._timeout = timeout
        self._wire.send(card=dict(card))
        waits = _Wait(self._noted)
        with ending_at_once(), self._noted:
            while self._place is None:
                if self._ended and self._ended.kind == "completed":
                    self._ended = None
                    return None
                self._must_go_on()
                waits.a_moment(f"waiting for {self.keeper} to begin")
            place, self._place, self._trouble = self._place, None, ""
            return place

    def may_connect(self, forked: bool) -> bool:
        return self._serves

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
        if self._wire.closed:
            return f"machine {self.keeper}, which keeps the run, was lost: it closed the connection"
        if self._wire.silent_for() > self._timeout:
            self._wire.close()
            return f"machine {self.keeper}, which keeps the run, was lost: not a word of it for {self._timeout:g} s"
        return ""

    def _hear(self, wire: _Wire, message: Message) -> None:
        if message.get("hello") == PROTOCOL:
            self.keeper = f"{message['name']} ({self._endpoint})"
            self._said = dict(message["said"])
        elif self._said is None:
            wire.close()
        elif "said" in message:
            self._said.update(message["said"])
        elif "begins" in message:
            self._place, self._serves = Place(**message["begins"]), False
        elif "serves" in message:
            self._serves = True
        elif "trouble" in message:
            self._trouble = str(message["trouble"])
        elif "ended" in message:
            self._ended = _outcome(message["ended"])


def _outcome(told: Mapping[str, Any]) -> Outcome:
    return Outcome(str(told["kind"]), str(told["text"]), int(told["signum"]), int(told["steps"]))


def difference(own: Mapping[str, str], other: Mapping[str, str], name: str, here: str = "") -> str:
    """What two machines don't have alike, as a line; empty: nothing. `name` is the other's, `here` this one's."""
    for key in sorted(own.keys() | other.keys()):
        mine, theirs = own.get(key, "missing"), other.get(key, "missing")
        if mine != theirs:
            return f"machines differ: {key} is {theirs} on {name}, {mine} on {here or platform.node()}"
    return ""


_met: dict[str, Keeper | Guest] = {}  # by endpoint: one outlasts a run, for the next one of a sweep


def meet(endpoint: str, again: bool = False) -> Keeper | Guest:
    """This machine's part in the meeting at `<host>:<port>`: whoever has that address keeps the run.

    Args:
        again: the keeper was lost, and may come back.

    Raises:
        Refusal: there is no such address, or something else listens there.
        Interrupted: while it waited.
    """
    if again or endpoint not in _met:
        host, port = endpoint_of(endpoint)
        address = resolved(host, port)
        listener = listening(address, port)
        _met[endpoint] = Keeper(listener, endpoint) if listener else Guest(address, port, endpoint)
    return _met[endpoint]


def decide(
    what: str, make: Callable[[], Any], num_nodes: int = 1, endpoint: str | None = None, lasts: bool = True
) -> Any:
    """What one process decides for all that start a run together: rank zero of workers that exist already; of several
    machines' parents the one that keeps the run.

    Args:
        make: called there only; its result is plain data.
        lasts: stays what it was when torchrun starts its workers again.

    Raises:
        Refusal: `make`'s, everywhere.
    """
    if external_workers():
        answer = ("", "")
        if environment().rank == 0:
            try:
                made = json.dumps(make())
                answer = ("", first_life(what, made) if lasts else made)
            except Refusal as refusal:
                answer = (str(refusal), "")
        refused, value = of_rank_zero(answer)
        if refused:
            raise Refusal(refused)
        return json.loads(value)
    if num_nodes > 1 and endpoint:
        return meet(endpoint).decide(what, make)
    return make()


def keeps_run(num_nodes: int = 1, endpoint: str | None = None) -> bool:
    """Whether this process is the one that keeps the run's folder."""
    if external_workers():
        return environment().rank == 0
    return not (num_nodes > 1 and endpoint and isinstance(meet(endpoint), Guest))
