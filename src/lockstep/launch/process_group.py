"""The default process group of a run's workers: its start, messages about lost ranks, and small collectives."""

import os
import platform
import re
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError
from lockstep.launch.environment import LAUNCHER_VARIABLE, environment, export, external_workers
from lockstep.launch.network import LOOPBACK, bind_socket, interface_towards, resolve_address
from lockstep.text import join_names

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

T = TypeVar("T")
JOIN_TIMEOUT = timedelta(minutes=10)  # until all workers that torchrun, SLURM or MPI has started have joined
STORE_SECONDS = 3.0  # how long ranks that are still alive have to exchange keys through the store after a failure
_stores: "list[Store]" = []  # the default group's store; torch has no public getter


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


def join_group(layout: Layout, listener: socket.socket, timeout: float) -> None:
    """Start the default process group in a worker that our parent has forked. Rank zero serves the store.

    Args:
        layout: only its accelerator is used.
        listener: the socket from `open_store_socket`, the same in all workers.
        timeout: seconds that a collective waits for all ranks to join; then it fails.
    """
    import torch
    from torch.distributed import TCPStore

    gpu = layout.accelerator == "gpu"
    if gpu:
        torch.cuda.set_device(environment().local_rank)
    wait = timedelta(seconds=timeout)
    if environment().rank == 0:
        store = _serve_store(listener, wait)
    else:
        port = listener.getsockname()[1]
        listener.close()
        store = TCPStore(LOOPBACK, port, environment().world_size, False, timeout=wait, wait_for_workers=False)
    _use_interface(LOOPBACK, several_machines=False)
    _init_process_group(gpu, store, wait)


def join_external() -> None:
    """Start the default process group in a worker of an engine (torchrun, SLURM, MPI). Do nothing if the group exists.

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
    _use_interface(address, several_machines=here.num_nodes > 1)
    agent_store = _connect_to_agent_store()
    if here.rank == 0:
        store = _serve_store(_open_store_listener(address, 0 if agent_store else port), JOIN_TIMEOUT)
        port = store.port
        if agent_store:
            agent_store.set("port", str(port))
    else:
        port = _wait_for_store_port(agent_store, address) if agent_store else port
        store = TCPStore(address, port, world, timeout=JOIN_TIMEOUT, wait_for_workers=False)
    store.set(f"host/{here.rank}", platform.node())
    hosts = [store.get(f"host/{rank}").decode() for rank in range(world)]
    _export_rank_variables(hosts, address, port)
    gpu = torch.cuda.is_available()
    if gpu and environment().local_rank < torch.cuda.device_count():  # a rank without a GPU is refused later
        torch.cuda.set_device(environment().local_rank)
    _init_process_group(gpu, store, JOIN_TIMEOUT)


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
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    rank, world = environment().rank, environment().world_size
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    _stores[:] = [store]


def _use_interface(address: str, several_machines: bool) -> None:
    """Make gloo, and NCCL between machines, use the interface that leads to rank zero.

    Otherwise gloo uses the address of this machine's own name, which may be a loopback address.
    """
    if interface := interface_towards(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if several_machines:
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

    here = environment()
    if not here.agent_store:
        return None
    store = TCPStore(here.master_addr, here.master_port, is_master=False, timeout=JOIN_TIMEOUT)
    return PrefixStore(f"lockstep/{here.run_id}", store)


def leave_group() -> None:
    """Destroy the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


# --- ranks that are lost ---


def is_lost_rank(error: BaseException) -> bool:
    """Check whether an error means that another rank is lost or did not join a collective.

    These are torch's own errors, and those of gloo: RuntimeErrors that contain the path of gloo's source.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def is_timeout(error: BaseException) -> bool:
    """Check whether an error is the timeout of a collective."""
    return re.search(r"[Tt]imed out|[Tt]imeout", str(error)) is not None


def hanging_ranks_message(timeout: float) -> str:
    """Return a line that names the ranks that did not join a collective. Call it after a timeout.

    Each rank that waited in it writes a key into the group's store; ranks without a key did not join.
    """
    missing: list[set[int]] = []
    search = threading.Thread(target=lambda: missing.append(_find_missing_ranks()), daemon=True)
    search.start()
    search.join(2 * STORE_SECONDS)
    # If the search does not end, the store does not answer: rank zero, which serves it, is the missing rank.
    return missing_ranks_message(sorted(missing[0] if missing else {0}), timeout)


def missing_ranks_message(ranks: Sequence[int], timeout: float, where: str = "") -> str:
    """Return a line that names the ranks that hang; `where` is the place where they hang, if it is known."""
    who = f"rank{'s' * (len(ranks) > 1)} {join_names(ranks, 8)}" if ranks else "a rank"
    cause = where or "it hangs or is stopped, or its network connection is cut"
    return f"{who} did not join the other ranks within {timeout:g} s (hang_timeout): {cause}"


def _find_missing_ranks() -> set[int]:
    """Return the ranks that write no key into the group's store within STORE_SECONDS."""
    import torch.distributed as dist

    missing = set(range(dist.get_world_size()))
    if not _stores:  # another program started the group, and its store is not accessible
        return set()
    store, until = _stores[0], time.monotonic() + STORE_SECONDS
    missing.discard(dist.get_rank())
    try:
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        store.set(f"arrived/{dist.get_rank()}", "")
        while missing and time.monotonic() < until:
            missing -= {rank for rank in missing if store.check([f"arrived/{rank}"])}
            time.sleep(0.1)
    except dist.DistError:  # rank zero serves the store
        return {0}
    return missing


def is_printed_by_another_rank(line: str) -> bool:
    """Check whether rank zero prints the same error line, so that this rank need not. On rank zero return False.

    So an error of all ranks is printed once, and an error of one rank is printed by that rank.
    """
    if external_workers() <= 1 or not _stores:
        return False
    from torch.distributed import DistError

    store, this_rank, line = _stores[0], environment().rank, line.partition("\n")[0]
    others = [f"line/{rank}" for rank in range(1, environment().world_size)]
    try:
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        if this_rank:
            same = store.get("line/0").decode() == line
            store.set(f"line/{this_rank}", "read")
            return same
        store.set("line/0", line)
        store.wait(others)  # rank zero serves the store, so it ends last
    except DistError:
        pass
    return False


def barrier_with_timeout(what: str, seconds: float) -> bool:
    """Wait until all ranks have called this with the same name. Return False if that takes longer than `seconds`.

    Args:
        what: the barrier's name.
        seconds: the time to wait.
    """
    from torch.distributed import DistError

    if not _stores:  # another program started the group, and its store is not accessible
        return False
    names = [f"{what} {rank}" for rank in range(environment().world_size)]
    try:
        _stores[0].set(names[environment().rank], "")
        _stores[0].wait(names, timedelta(seconds=seconds))
    except DistError:
        return False
    return True


# --- values of ranks ---


def broadcast_from_rank_zero(value: T) -> T:
    """Return rank zero's value; in a process that is not a worker, its own. All ranks must call it."""
    return gather_objects(value)[0]


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks. All ranks must call it.

    Args:
        value: this rank's value; it must be picklable.

    Returns:
        A list with the value of each rank, in the order of ranks. In a process that is not a worker it has one value.
    """
    import torch.distributed as dist

    join_external()
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_file(path: Path | None, source: int = 0, group: Any = None) -> memoryview | None:
    """Send a file from one rank to all ranks of a group. Return its bytes on all of them; None if there is no file.

    Args:
        path: the file on the rank `source`, or None if it has no file. Other ranks pass None.
        source: the rank that sends.
        group: the process group; None: the default group.
    """
    import torch
    import torch.distributed as dist

    mine = None if path is None else torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    size = torch.tensor(-1 if mine is None else mine.numel())
    dist.broadcast(size, source, group)
    if size < 0:
        return None
    content = torch.empty(int(size), dtype=torch.uint8) if mine is None else mine
    dist.broadcast(content, source, group)
    return content.numpy().data
