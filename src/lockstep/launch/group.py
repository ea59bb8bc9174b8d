"""The default process group of a run's workers, and what processes agree on before there are any."""

from __future__ import annotations

import atexit
import os
import socket
import time
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from lockstep.arithmetic.layout import Layout
from lockstep.launch.environment import environment, export, external_workers, slurm_as_torchrun

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
T = TypeVar("T")
GROUP_TIMEOUT = timedelta(hours=1)  # of a collective; lockstep.launch.watchdog notices a silent rank earlier


def join_group(layout: Layout) -> None:
    """Starts the default process group of workers that the parent has launched."""
    import torch

    gpu = layout.accelerator == "gpu"
    if gpu:
        torch.cuda.set_device(environment().local_rank)
    _join(gpu)


def join_external() -> None:
    """Starts the default process group of workers that exist already, unless it runs: several of them are ranks from
    here on. Lightning would make it without gloo on GPUs, and numbers on the CPU are summed too."""
    import torch
    import torch.distributed as dist

    if external_workers() == 1 or dist.is_initialized():
        return
    slurm_as_torchrun()
    gpu = torch.cuda.is_available()
    if gpu and (number := environment().local_rank) < torch.cuda.device_count():  # who has none is refused later
        torch.cuda.set_device(number)
    _join(gpu)
    atexit.register(leave_group)  # not after a run: a second group on the same store meets what is left of the first


def _join(gpu: bool) -> None:
    """The default process group, on a store of its own.

    An agent's store remembers the ranks of a group that died, and a restarted gloo group that meets it hangs in about
    half of the trials. So rank zero opens a fresh one, tells the others its port through the agent's, and counts: an
    agent that starts its workers again because another machine's did counts nothing, and all must know that they go on.
    """
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    agent = _agents_store()
    if agent is None:
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT)
        return
    rank, world, address = environment().rank, environment().world_size, environment().master_addr
    if rank == 0:
        store = serve(address)
        store.set("groups", str(agent.add(f"{_run()}/groups", 1)))
        agent.set(f"{_run()}/port", str(store.port))
    else:
        store = dist.TCPStore(
            address, _port(agent, address), world, is_master=False, timeout=GROUP_TIMEOUT, wait_for_workers=False
        )
    export(TORCHELASTIC_RESTART_COUNT=str(int(store.get("groups")) - 1))
    if address == LOOPBACK:
        device = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)


def _port(agent: TCPStore, address: str) -> int:
    """That of rank zero's store, as soon as somebody listens: what is told first may be a port of a group that died."""
    deadline = time.monotonic() + GROUP_TIMEOUT.total_seconds()
    while True:
        port = int(agent.get(f"{_run()}/port"))
        try:
            socket.create_connection((address, port), timeout=10).close()
            return port
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _agents_store() -> TCPStore | None:
    """The store of the agent that started this worker, which outlives a group; None where rank zero must keep one."""
    from torch.distributed import TCPStore

    if not environment().agent_store:
        return None
    return TCPStore(environment().master_addr, environment().master_port, is_master=False, timeout=GROUP_TIMEOUT)


def _run() -> str:
    """Where in an agent's store its workers' keys are."""
    return f"lockstep/{environment().run_id}"


def serve(address: str) -> TCPStore:
    """A store on a free port: of the loopback device where that is the address, where torch would open all of them."""
    from torch.distributed import TCPStore

    if address != LOOPBACK:
        return TCPStore(address, 0, is_master=True, timeout=GROUP_TIMEOUT, wait_for_workers=False)
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, timeout=GROUP_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def leave_group() -> None:
    """Ends the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def agree(what: str, value: str, num_nodes: int, rdzv_endpoint: str | None) -> str:
    """One process's value of `what` for all that start a run together: rank zero's among external workers, and that of
    their first start when torchrun starts them again; the first to ask among the parents of several machines."""
    if external_workers():
        join_external()
        if environment().rank == 0 and (agent := _agents_store()):
            value = agent.compare_set(f"{_run()}/{what}", "", value).decode()
        return of_rank_zero(value)
    if num_nodes > 1 and rdzv_endpoint:
        return _shared_store(rdzv_endpoint).compare_set(f"lockstep/{what}", "", value).decode()
    return value


def of_rank_zero(value: T) -> T:
    """Rank zero's value, where several workers exist already; else the value."""
    if external_workers() <= 1:
        return value
    import torch.distributed as dist

    join_external()
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


@cache
def _shared_store(endpoint: str) -> TCPStore:
    """Lives as long as this process: others may come later."""
    from torch.distributed import TCPStore

    host, _, port = endpoint.rpartition(":")
    try:  # whoever can open the port serves; the agent's rendezvous then shares it
        return TCPStore(
            host, int(port), is_master=True, multi_tenant=True, wait_for_workers=False, timeout=GROUP_TIMEOUT
        )
    except (RuntimeError, OSError):
        return TCPStore(host, int(port), is_master=False, timeout=GROUP_TIMEOUT)
