"""What older versions of torch call by another name, or leave out (tests/launch/test_torch_versions.py)."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def set_group_timeout(timeout: timedelta) -> None:
    """Set the time that a collective of the default process group waits for the other ranks."""
    public: Any = getattr(dist, "set_timeout", None)  # since torch 2.14
    (public or dist.distributed_c10d._set_pg_timeout)(timeout)


def forget_failed_group() -> None:
    """Let the next default process group have the name of a first one, also after the start of a group has failed.

    torch counts a group's name up before it starts the group, and counts anew when a group is destroyed. A rank whose
    last start has failed would look for the others under another name than they have, until a timeout.
    """
    dist.distributed_c10d._world.group_count = 0


def end_wait_for_lost_agents(store: dist.Store, run_id: str, lost: int) -> None:
    """Let torchrun's agents end without so many others, which are lost. Otherwise they wait for those for 300 s.

    Args:
        store: of the agents, which have a static rendezvous. That of c10d can't be reached.
        run_id: their `--rdzv-id`.
    """
    from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
    from torch.distributed.elastic.utils.store import _NUM_MEMBERS

    dist.PrefixStore(run_id, store).add(_TERMINAL_STATE_SYNC_ID + _NUM_MEMBERS, lost)


def compile_network(network: nn.Module, **options: Any) -> None:
    """Compile a network in place.

    Before torch 2.15, `Module.compile` runs a network of torch's own classes (`nn.Sequential`) uncompiled, without a
    word: it does not look into calls of its own code. A function of ours is looked into.
    """
    network.compile(**options)
    of_torch = type(network).forward.__module__.startswith("torch.")
    if of_torch and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):

        def call(*args: Any, **kwargs: Any) -> Any:
            return network._call_impl(*args, **kwargs)

        network._compiled_call_impl = torch.compile(call, **options)
