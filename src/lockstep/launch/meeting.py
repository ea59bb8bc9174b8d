"""How the machines of a run meet, agree, and hear of each other's end.

On each machine a parent process launches that machine's workers. The one whose address `rdzv_endpoint` is keeps the
run: it listens there, and the guests, which are the parents on all other machines, hold a connection to it. It says who
takes part and where the workers meet, hears from each guest how its workers ended, and says how the run goes on. Who is
silent for `timeout` seconds is lost; so is who closes its connection.

Messages are lines of JSON, read as data and as nothing else. The threads that read them only take note; whoever waits
looks at what was noted.
"""

import json
from collections.abc import Callable
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.group import first_life, of_rank_zero
from lockstep.launch.guest import Guest
from lockstep.launch.keeper import Keeper
from lockstep.launch.network import endpoint_of, listening, resolved

Meeting = Keeper | Guest  # a machine's part in it

_met: dict[str, Meeting] = {}  # by endpoint: one outlasts a run, for the next one of a sweep


def meet(endpoint: str, again: bool = False) -> Meeting:
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


def meeting_of(num_nodes: int, endpoint: str | None) -> Meeting | None:
    """As `meet`; None on one machine, and where others have started the workers."""
    return meet(endpoint) if num_nodes > 1 and endpoint and not external_workers() else None


def decide(what: str, make: Callable[[], Any], num_nodes: int = 1, endpoint: str | None = None) -> Any:
    """What one process decides for all that start a run together: rank zero of workers that exist already, also for
    those that torchrun starts again; of several machines' parents the one that keeps the run.

    Args:
        make: called there only; its result is plain data.

    Raises:
        Refusal: `make`'s, everywhere.
    """
    if external_workers():
        answer = ("", "")
        if environment().rank == 0:
            try:
                answer = ("", first_life(what, json.dumps(make())))
            except Refusal as refusal:
                answer = (str(refusal), "")
        refused, value = of_rank_zero(answer)
        if refused:
            raise Refusal(refused)
        return json.loads(value)
    meeting = meeting_of(num_nodes, endpoint)
    return make() if meeting is None else meeting.decide(what, make)


def keeps_run(num_nodes: int = 1, endpoint: str | None = None) -> bool:
    """Whether this process is the one that keeps the run's folder."""
    if external_workers():
        return environment().rank == 0
    return not isinstance(meeting_of(num_nodes, endpoint), Guest)
