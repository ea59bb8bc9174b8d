"""The start of the default process group: where its store is, who serves it, and how the ranks of a run join it."""

import fcntl
import os
import platform
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from lockstep.errors import UserError
from lockstep.launch.environment import LAUNCHER_VARIABLE, environment, export, external_workers

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # get the address of an interface; from Linux's sockios.h
CONNECT_TIMEOUT = timedelta(seconds=30)  # between workers of one machine that are all there
STORE_TIMEOUT = timedelta(seconds=2)  # of one attempt to reach the store of such a group
JOIN_TIMEOUT = timedelta(minutes=10)  # until all workers that torchrun, SLURM or MPI has started have joined
_group_store: "Store | None" = None  # torch has no public getter
_group_timeout = JOIN_TIMEOUT  # likewise
_agent_store: "Store | None" = None  # of torchrun's agents


def open_store_socket() -> socket.socket:
    """Return a listening socket for the store of one machine's workers. The parent calls it before it forks.

    Raises:
        UserError: the socket can't be reached. Without this check torch would try for an hour.
    """
    listener = bind_socket(LOOPBACK)
    try:
        socket.create_connection(listener.getsockname()[:2], timeout=10).close()
    except OSError as error:
        raise UserError(
            f"workers can't connect to {LOOPBACK} ({error.strerror}): the loopback interface must be up"
        ) from None
    return listener


def join_group(gpu: bool, listener: socket.socket, timeout: float) -> None:
    """Start the default process group in a worker that our parent has forked. Rank zero serves the store.

    Args:
        gpu: whether the workers compute on GPUs.
        listener: the socket from `open_store_socket`, the same in all workers.
        timeout: seconds that a collective waits for all ranks to join; then it fails.
    """
    import torch
    from torch.distributed import TCPStore

    if gpu:
        torch.cuda.set_device(environment().local_rank)
    wait = timedelta(seconds=timeout)
    if environment().rank == 0:
        store = _serve_store(listener, wait)
    else:
        port = listener.getsockname()[1]
        listener.close()
        store = TCPStore(LOOPBACK, port, environment().world_size, False, timeout=wait, wait_for_workers=False)
    _use_interface(LOOPBACK)
    _init_process_group(gpu, store, wait)


def serve_new_store(address: str) -> "TCPStore":
    """Return a new store for a group of workers; its rank zero calls this. Its `port` is a free one.

    Args:
        address: this machine's own.
    """
    return _serve_store(bind_socket(address), CONNECT_TIMEOUT)


def connect_new_store(address: str, port: int) -> "TCPStore":
    """Return the store that rank zero serves for a new group.

    Raises:
        OSError, RuntimeError: rank zero has died, or does not answer within STORE_TIMEOUT.
    """
    from torch.distributed import TCPStore

    # if nobody listens, torch would try again and again
    socket.create_connection((address, port), STORE_TIMEOUT.total_seconds()).close()
    store = TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False)
    store.set_timeout(CONNECT_TIMEOUT)
    return store


def join_new_group(store: "TCPStore", address: str, timeout: float) -> None:
    """Start the default process group in a worker whose run survives the loss of workers. All are about to call this.

    Args:
        store: from `serve_new_store` on rank zero, from `connect_new_store` on the others.
        address: where rank zero serves it.
        timeout: seconds that a collective waits for all ranks to join; then it fails.
    """
    from lockstep.launch.torch_versions import set_group_timeout

    _use_interface(address)
    export(LOCAL_WORLD_SIZE="0")  # the engine's number is that of its first workers: count those that are left
    os.environ.pop("GROUP_RANK", None)
    _exchange_hosts(store, address, store.port)
    _init_process_group(False, store, CONNECT_TIMEOUT)
    set_group_timeout(timedelta(seconds=timeout))


def join_external(timeout: timedelta | None = None) -> None:
    """Start the default process group in a worker of an engine (torchrun, SLURM, MPI). Do nothing if the group exists.

    Args:
        timeout: how long a collective waits for all ranks; None: `JOIN_TIMEOUT`.

    On GPUs, Lightning would start the group with NCCL only; gloo is needed too, because values on the CPU are reduced.
    Afterwards torchrun's variables are set, whichever engine started the worker, because Lightning and other libraries
    read them.

    torchrun's own store outlives a group, so after a restart it still has the keys that the ranks of the dead group
    wrote. A new gloo group on this store hangs in about half of the trials. So rank zero opens a new store and
    publishes its port in torchrun's store.
    """
    if external_workers() <= 1:
        return
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore

    if dist.is_initialized():
        if LAUNCHER_VARIABLE not in os.environ:  # we did not export our variable, so another program started the group
            hosts = [""] * dist.get_world_size()
            dist.all_gather_object(hosts, platform.node())
            _export_rank_variables(hosts, environment().master_addr or LOOPBACK, environment().master_port)
        return
    here, world = environment(), environment().world_size
    address, port = here.master_addr or _address_of_rank_zero(), here.master_port
    address = resolve_address(address, port)
    _use_interface(address)
    agent_store = _connect_to_agent_store()
    if here.rank == 0:
        store = _serve_store(_open_store_listener(address, 0 if agent_store else port), JOIN_TIMEOUT)
        port = store.port
        if agent_store:
            agent_store.set("port", str(port))
    else:
        port = _wait_for_store_port(agent_store, address) if agent_store else port
        store = TCPStore(address, port, world, timeout=JOIN_TIMEOUT, wait_for_workers=False)
    _exchange_hosts(store, address, port)
    gpu = torch.cuda.is_available()
    if gpu and environment().local_rank < torch.cuda.device_count():  # a rank without a GPU is refused later
        torch.cuda.set_device(environment().local_rank)
    _init_process_group(gpu, store, timeout or JOIN_TIMEOUT)


def _address_of_rank_zero() -> str:
    """Return rank zero's address if MASTER_ADDR is not set.

    Under SLURM it is the first host of the job step, as Lightning resolves it. MPI on one machine uses the loopback.
    """
    if nodes := environment().slurm_nodes:
        from lightning.fabric.plugins.environments import SLURMEnvironment

        return SLURMEnvironment.resolve_root_node_address(nodes)
    return LOOPBACK


def _open_store_listener(address: str, port: int) -> socket.socket:
    """Return a listening socket for rank zero's store at one address; torch itself would listen at all addresses."""
    try:
        return bind_socket(address, port)
    except OSError as error:
        raise UserError(
            f"rank zero can't listen at {address}:{port} ({error.strerror}): MASTER_ADDR must be an address of its "
            "machine, and MASTER_PORT a free port there"
        ) from None


def _serve_store(listener: socket.socket, timeout: timedelta) -> "TCPStore":
    from torch.distributed import TCPStore

    address, port, *_ = listener.getsockname()
    return TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _exchange_hosts(store: "Store", address: str, port: int) -> None:
    """Set torchrun's variables in a worker, when all workers of its group have called this."""
    here = environment()
    store.set(f"host/{here.rank}", platform.node())
    hosts = [store.get(f"host/{rank}").decode() for rank in range(here.world_size)]
    _export_rank_variables(hosts, address, port)


def _export_rank_variables(hosts: Sequence[str], address: str, port: int) -> None:
    """Set the variables that torchrun would set: this worker's rank, local rank and machine, and the store's address.

    Args:
        hosts: the host name of each rank. They give the local ranks if the engine does not.
        address: the address of rank zero's store.
        port: the port of rank zero's store.
    """
    here = environment()
    same = [rank for rank, host in enumerate(hosts) if host == platform.node()]
    counted_by_engine = here.local_world_size > 0
    one_gpu = here.dedicated_gpu  # the worker sees one GPU only: its local rank is 0, as on a machine of its own
    machine = here.rank if one_gpu else list(dict.fromkeys(hosts)).index(platform.node())
    export(
        RANK=str(here.rank),
        WORLD_SIZE=str(here.world_size),
        LOCAL_RANK=str(0 if one_gpu else here.local_rank if counted_by_engine else same.index(here.rank)),
        LOCAL_WORLD_SIZE=str(here.local_world_size if counted_by_engine else len(same)),
        GROUP_RANK=os.environ.get("GROUP_RANK", str(machine)),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=here.run_id or here.slurm_job or str(here.launcher),
        **{LAUNCHER_VARIABLE: str(here.launcher)},
    )


def _init_process_group(gpu: bool, store: "Store", timeout: timedelta) -> None:
    global _group_store, _group_timeout
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    rank, world = environment().rank, environment().world_size
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    _group_store, _group_timeout = store, timeout


def group_store() -> "Store | None":
    """Return the default process group's store; None if there is no group or another program started it."""
    return _group_store


def group_timeout() -> timedelta:
    """Return the time that the default process group was started with: a collective waits so long for all ranks."""
    return _group_timeout


def _use_interface(address: str) -> None:
    """Make gloo, and NCCL between machines, use the interface that leads to rank zero.

    Otherwise gloo uses the address of this machine's own name, which may be a loopback address.
    """
    if interface := interface_towards(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if environment().num_nodes > 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": this name, not all that begin with it


def _wait_for_store_port(agent_store: "Store", address: str) -> int:
    """Return the port of rank zero's store as soon as it accepts connections.

    Until rank zero publishes it, the agent's store may hold the port of an earlier group, which has ended.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while True:
        port = int(agent_store.get("port"))
        try:
            socket.create_connection((address, port), timeout=10).close()
            return port
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _connect_to_agent_store() -> "Store | None":
    """Return the torchrun agent's store, in which our keys have a prefix; None without such an agent.

    This store outlives a process group.
    """
    from torch.distributed import PrefixStore, TCPStore

    global _agent_store
    here = environment()
    if not here.agent_store:
        return None
    _agent_store = TCPStore(here.master_addr, here.master_port, is_master=False, timeout=JOIN_TIMEOUT)
    return PrefixStore(f"lockstep/{here.run_id}", _agent_store)


def agent_store() -> "Store | None":
    """Return the store of torchrun's agents, without a prefix; None: there is none, or it can't be reached."""
    return _agent_store


def leave_group() -> None:
    """Destroy the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


# --- network addresses ---


def resolve_address(host: str, port: int) -> str:
    """Return the address of a host that other machines can reach.

    A machine's own name may resolve to a loopback address (Debian's /etc/hosts). Then return the machine's address on
    the network.

    Raises:
        UserError: the name can't be resolved, or resolves to a loopback address and the machine has not exactly one
            other address.
    """
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise UserError(
            f"{host}: this machine can't resolve the name ({error.strerror}): give a name or an address that every "
            "machine can reach"
        ) from None
    intended = host == address or host.startswith("localhost")
    if intended or not ip_address(address).is_loopback:
        return address
    addresses = sorted({candidate for _, candidate in _interfaces() if not ip_address(candidate).is_loopback})
    if len(addresses) != 1:
        remedy = f"give one of {', '.join(addresses)}" if addresses else "connect this machine to a network"
        raise UserError(f"{host}: its address {address} can't be reached from other machines: {remedy}")
    return addresses[0]


def address_towards(address: str) -> str | None:
    """Return this machine's own address on the way to another address; None if there is no way."""
    with suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return None


def interface_towards(address: str) -> str | None:
    """Return the network interface that leads to an IPv4 address; None if it is unknown."""
    local_address = address_towards(address)
    if local_address and ip_address(local_address).is_loopback:
        return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return next((name for name, interface_address in _interfaces() if interface_address == local_address), None)


def _interfaces() -> list[tuple[str, str]]:
    """Return names and IPv4 addresses of this machine's network interfaces. The list is empty except on Linux."""
    if sys.platform != "linux":
        return []
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                interfaces.append((name, socket.inet_ntoa(reply[20:24])))
    return interfaces


def bind_socket(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at one address of this machine, on a port (0: a free one)."""
    return socket.create_server((address, port), family=_family(address))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
