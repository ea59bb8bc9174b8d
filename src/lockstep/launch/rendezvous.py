"""How the workers of one machine find each other: through a store that nobody beyond this machine can reach.

torch's own rendezvous is for several machines. On one it opens a port to all the world (its TCPStore listens on every
address), and waits up to 0.3 s so that not all machines ask at once.
"""

from __future__ import annotations

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from lockstep.launch.group import LOOPBACK, serve

NAME = "one_machine"  # for LaunchConfig.rdzv_backend


class OneMachine(RendezvousHandler):
    """The rendezvous of a single agent, which is always there; a restarted group starts with an empty store."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.store = serve(LOOPBACK)
        self.round = 0

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        store = PrefixStore(f"{self.run_id}/{self.round}", self.store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is nobody to keep out."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneMachine(parameters.run_id)


rendezvous_handler_registry.register(NAME, _make)
