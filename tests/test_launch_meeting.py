"""Two machines' parents, in one process: what one brings belongs to one run of a sweep."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import free_port

from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.launch.endings import Outcome
from lockstep.launch.group import serve
from lockstep.launch.guest import Guest
from lockstep.launch.keeper import Keeper
from lockstep.launch.network import LOOPBACK, bound, endpoint_of, listening


def test_what_comes_after_a_run_has_ended_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest's workers end after the keeper has said that the run is completed; the next run has another seed."""
    monkeypatch.setattr("lockstep.launch.wire.ending_at_once", nullcontext)  # only a main thread can hear signals
    port = free_port()
    keeper = Keeper(cast(Any, listening("127.0.0.1", port)), f"127.0.0.1:{port}")
    guest = Guest("127.0.0.1", port, f"127.0.0.1:{port}")
    layout = cast(Layout, SimpleNamespace(num_nodes=2, world_size=2))
    with ThreadPoolExecutor() as pool:
        for seed in ("0", "1", "2"):
            kept = pool.submit(keeper.begin, {"seed": seed}, layout, 0, 10.0, False)
            time.sleep(0.5)  # the keeper is ready first
            place = guest.begin({"seed": seed}, 10)
            assert place is not None
            assert place.port == kept.result().port
            keeper.end(Outcome("completed"))
            time.sleep(0.5)  # its workers end later than it hears of the end
            guest.settle(Outcome("completed"))
            assert guest.begin({"seed": seed}, 10) is None


def test_a_store_that_nobody_reaches_is_refused() -> None:
    """As where the loopback interface is down; torch would try for an hour."""
    assert serve(bound(LOOPBACK)).num_keys() >= 0
    listener = bound(LOOPBACK)
    listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(Refusal, match=r"^workers can't meet at 127.0.0.1: .*; is that network interface up\?$"):
        serve(listener)


@pytest.mark.parametrize(("text", "found"), [("[::1]:29500", ("::1", 29500)), ("node0:1", ("node0", 1))])
def test_an_ipv6_address_loses_its_brackets(text: str, found: tuple[str, int]) -> None:
    assert endpoint_of(text) == found
