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
