"""The default process group of a run's workers."""

import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.launch.environment import SLURM_NAMES, SLURM_TASK, environment, export, external_workers
from lockstep.launch.network import bound, interface_towards, resolved

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

T = TypeVar("T")
GROUP_TIMEOUT = timedelta(hours=1)  # of a collective; lockstep.launch.watchdog notices a silent rank earlier
EXTERNAL_TIMEOUT = timedelta(minutes=10)  # where no parent of ours watches; NCCL's own default
_stores: "list[Store]" = []  # the default group's, of which torch tells no one


def has_group(layout: Layout) -> bool:
    """Whether workers of a layout have a process group; ddp's single worker has one, too."""
    return layout.strategy in ("ddp", "pipeline")


def join_group(layout: Layout) -> None:
    """Starts the default process group of workers that the parent has launched, on the store that it serves."""
    import torch
    from torch.distributed import TCPStore

    gpu = layout.accelerator == "gpu"
    if gpu:
        torch.cuda.set_device(environment().local_rank)
    address, port = environment().master_addr, environment().master_port
    store = TCPStore(address, port, environment().world_size, False, timeout=GROUP_TIMEOUT, wait_for_workers=False)
    _use_interface(address, several=layout.num_nodes > 1)
    _start(gpu, store, GROUP_TIMEOUT)


def join_external() -> None:
    """Starts the default process group of workers that exist already, unless it runs: several of them are ranks from
    here on, until they leave. Lightning would make it without gloo on GPUs, and numbers on the CPU are summed too.

    torchrun's store remembers the ranks of a group that died, and a restarted gloo group that meets it hangs in about
    half of the trials. So rank zero opens a fresh one, and tells the others its port through torchrun's.
    """
    import torch
    from torch.distributed import TCPStore, is_initialized

    if external_workers() <= 1 or is_initialized():
        return
    if environment().launcher == "slurm":
        alone = {"LOCAL_RANK": "0", "GROUP_RANK": os.environ["SLURM_PROCID"]} if environment().own_gpu else {}
        named = {ours: os.environ[theirs] for ours, theirs in SLURM_NAMES.items()}
        export(**{SLURM_TASK: "true"}, **named | alone)
    here, world = environment(), environment().world_size
    gpu = torch.cuda.is_available()
    if gpu and here.local_rank < torch.cuda.device_count():  # who has none is refused later
        torch.cuda.set_device(here.local_rank)
    address, port = resolved(here.master_addr, here.master_port), here.master_port
    _use_interface(address, several=here.local_world_size < world)
    agent = _agents_store()
    if here.rank == 0:
        store = serve(bound(address, 0 if agent else port))
        if agent:
            agent.set("port", str(store.port))
    else:
        port = _port(agent, address) if agent else port
        store = TCPStore(address, port, world, timeout=EXTERNAL_TIMEOUT, wait_for_workers=False)
    _start(gpu, store, EXTERNAL_TIMEOUT)


def _start(gpu: bool, store: "Store", timeout: timedelta) -> None:
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    rank, world = environment().rank, environment().world_size
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    _stores[:] = [store]


def _use_interface(address: str, several: bool) -> None:
    """Makes gloo, and NCCL between machines, talk on the interface that leads to rank zero and on no other. Else gloo
    takes what this machine's own name stands for, which may be a loopback address."""
    if device := interface_towards(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
        if several:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={device}")


def _port(agent: "Store", address: str) -> int:
    """That of rank zero's store, as soon as somebody listens: what is told first may be a port of a group that died."""
    deadline = time.monotonic() + EXTERNAL_TIMEOUT.total_seconds()
    while True:
        port = int(agent.get("port"))
        try:
            socket.create_connection((address, port), timeout=10).close()
            return port
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _agents_store() -> "Store | None":
    """Its workers' part of the store of the agent that started this one, which outlives a group; None where rank zero
    must keep a store."""
    from torch.distributed import PrefixStore, TCPStore

    here = environment()
    if not here.agent_store:
        return None
    store = TCPStore(here.master_addr, here.master_port, is_master=False, timeout=EXTERNAL_TIMEOUT)
    return PrefixStore(f"lockstep/{here.run_id}", store)


def serve(listener: socket.socket) -> "TCPStore":
    """A store on this socket only, where torch would listen on all addresses that the machine has. A Refusal where
    nobody can reach it: torch would try for an hour."""
    from torch.distributed import TCPStore

    address, port, *_ = listener.getsockname()
    try:
        socket.create_connection((address, port), timeout=10).close()
    except OSError as error:
        raise Refusal(f"workers can't meet at {address}: {error.strerror}; is that network interface up?") from None
    return TCPStore(
        address, port, is_master=True, timeout=GROUP_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def leave_group() -> None:
    """Ends the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def first_life(what: str, value: str) -> str:
    """Asked by rank zero of external workers: its value; where torchrun has started them again, that of their first
    start."""
    if agent := _agents_store():
        return agent.compare_set(what, "", value).decode()
    return value


def all_come(what: str, seconds: float) -> bool:
    """Whether all ranks call this with the same words within so many seconds. Those that don't are not held up."""
    from torch.distributed import DistError

    if not _stores:  # the group was there before us
        return False
    names = [f"{what} {rank}" for rank in range(environment().world_size)]
    try:
        _stores[0].set(names[environment().rank], "")
        _stores[0].wait(names, timedelta(seconds=seconds))
    except DistError:
        return False
    return True


def of_rank_zero(value: T) -> T:
    """Rank zero's value, in a worker; of a process that is no worker, its own."""
    return of_ranks(value)[0]


def of_ranks(value: T) -> list[T]:
    """All ranks' values, by rank, in a worker; of a process that is no worker, its own."""
    import torch.distributed as dist

    join_external()
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
