"""How the workers of one machine find each other: through a store that nobody beyond this machine can reach.

torch's own rendezvous opens a port to all the world (its TCPStore listens on every address), and waits up to 0.3 s so
that not all machines ask at once. Between machines, lockstep.launch.meeting does what it would.
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

from lockstep.launch.group import serve
from lockstep.launch.network import LOOPBACK

NAME = "one_machine"  # for LaunchConfig.rdzv_backend


class OneMachine(RendezvousHandler):
    """The rendezvous of a single agent, which is always there."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.store = serve(LOOPBACK)

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self.run_id, self.store)
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
