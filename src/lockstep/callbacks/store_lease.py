"""End a part of a cut network that has lost torchrun's store, before another part continues the run."""

import time
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from lightning.pytorch import Callback
from torch.distributed import DistError, TCPStore

from lockstep.errors import WorkerFailed
from lockstep.launch.environment import environment

LEASE_SECONDS = 3.0  # after this time without a heartbeat, torchrun's agents replace a machine (`lockstep torchrun`)
ASK_SECONDS = 0.5


class StoreLease(Callback):
    """Rank zero takes a step only if torchrun's store has answered within `seconds`.

    Only the part of a cut network that has the store can start new workers. But the old workers of another part go on
    if all of them are in it: their agents notice only after torchrun's `read_timeout`, a minute. So the run would go on
    twice. A thread asks the store, and each step is checked before the optimizer applies it.

    Args:
        store: host and port, `10.0.0.1:29500`.
        seconds: time without an answer after which no step is taken.
    """

    changes_weights = False

    def __init__(self, store: str, seconds: float = LEASE_SECONDS) -> None:
        self._store, self._seconds = store, seconds
        self._answered = 0.0  # when the last question that was answered was asked
        self._ended = Event()

    def on_train_start(self, *_: Any) -> None:
        if environment().rank != 0:
            return
        self._answered = time.monotonic()
        host, _colon, port = self._store.rpartition(":")
        try:
            timeout = timedelta(seconds=self._seconds)
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        except DistError:
            raise self._lost() from None
        Thread(target=self._ask, args=(store,), daemon=True).start()

    def on_before_optimizer_step(self, *_: Any) -> None:
        if environment().rank == 0 and time.monotonic() > self._answered + self._seconds:
            raise self._lost()

    def on_train_end(self, *_: Any) -> None:
        self._ended.set()

    def _ask(self, store: TCPStore) -> None:
        """Ask the store again and again, until it is gone. Over a link that is cut, a question waits for its answer."""
        while not self._ended.wait(ASK_SECONDS):
            sent = time.monotonic()
            try:
                store.check(["lockstep"])
            except DistError:
                return
            self._answered = sent

    def _lost(self) -> WorkerFailed:
        return WorkerFailed(
            f"torchrun's store at {self._store} has not answered for {self._seconds:g} s: where the network is cut, "
            "the part with the store continues this run"
        )


def store_leases() -> list[Callback]:
    """Return the callback of a run that `lockstep torchrun` started and fewer machines may continue; none otherwise."""
    here = environment()
    return [StoreLease(here.rdzv_store)] if here.rdzv_store and here.launcher == "torchrun" else []
