"""Who watches the workers that an engine (torchrun, SLURM, MPI) has started, in a run that survives their loss.

No parent of ours sees all of them. So the first rank zero starts a keeper, a process of its own, and each worker keeps
a connection to it. The kernel closes that of a worker that dies, wherever it runs. The keeper then does what a parent
does (launch/survival.py), but it starts no worker. It outlives rank zero, and ends when no worker is left. If the
keeper is lost, with its machine, the next death ends the run.

A worker that does not answer within `hang_timeout` is left out. If it is on the keeper's machine, it is killed;
elsewhere, it ends itself as soon as it reads that. A part of a cut network that has no keeper gets no new group.
"""

import hmac
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

from lockstep.errors import WorkerFailed
from lockstep.launch.environment import environment
from lockstep.launch.failures import missing_ranks_message
from lockstep.launch.process_group import broadcast_from_rank_zero, gather_objects
from lockstep.launch.rendezvous import CONNECT_TIMEOUT, agent_store, bind_socket, leave_group
from lockstep.launch.survival import Survival, survive
from lockstep.launch.survivor import Group, Survivor, become_survivor
from lockstep.launch.workers import Worker

KEY_BYTES = 32
HELLO_SECONDS = 10.0  # for a worker's first message


# --- in a worker ---


def call_with_keeper(work: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]], hang_timeout: float) -> Any:
    """Call `work` in this worker of an engine until it has returned on all workers that are left. Return its result.

    Args:
        arguments: returns the arguments of `work` for a number of workers.
        hang_timeout: see `launch`.
    """
    from lockstep.launch.torch_versions import end_wait_for_lost_agents

    here = environment()
    keeper = _start_keeper(here.master_addr, here.world_size, hang_timeout) if here.rank == 0 else None
    address, port, key = cast(tuple[str, int, bytes], broadcast_from_rank_zero(keeper))
    link = socket.create_connection((address, port))
    own_address = link.getsockname()[0]
    connection = _connection(link, hang_timeout)
    os.register_at_fork(after_in_child=connection.close)  # else a loader process would keep it open after a death
    connection.send_bytes(key)
    connection.send((here.rank, os.getpid(), _machine()))
    leave_group()
    group = Group(0, here.rank, here.world_size)
    worker = become_survivor(Survivor(group, connection, connection, hang_timeout, here.restarts, own_address))
    answer: tuple[BaseException | None, Any] = (WorkerFailed("ended"), None)  # the engine shows its error
    agents = 0

    def work_and_count(*args: Any) -> Any:
        nonlocal agents
        result = work(*args)
        agents = len({*gather_objects((_machine(), os.getppid()))})
        return result

    try:
        result = worker.call(work_and_count, arguments)
        answer = (None, None)
    finally:
        with suppress(OSError):  # the keeper has ended
            connection.send(answer)
    if environment().rank == 0 and (store := agent_store()):
        lost = int(os.environ.get("GROUP_WORLD_SIZE", agents)) - agents
        with suppress(RuntimeError, ImportError):  # the store's host is lost; another torch, whose agents end later
            end_wait_for_lost_agents(store, environment().run_id, lost)
    return result


def _start_keeper(address: str, world_size: int, hang_timeout: float) -> tuple[str, int, bytes]:
    """Start a keeper on this machine. Return its address, its port, and the key that it wants to get first."""
    key = secrets.token_bytes(KEY_BYTES)
    command = [sys.executable, "-m", __name__, address, str(world_size), str(hang_timeout)]
    # In a session of its own: an engine ends what is left of a dead worker's.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin
    assert process.stdout
    with process.stdin, process.stdout:
        process.stdin.write(key)
        process.stdin.close()
        return address, int(process.stdout.readline()), key


def _connection(link: socket.socket, seconds: float) -> Connection:
    """Return the connection of a socket. It ends when the other machine does not answer for so many seconds."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        link.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds / 4)))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    return Connection(link.detach())


def _machine() -> str:
    """Return what is the same in two processes if one may send the other a signal."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read() + os.readlink("/proc/self/ns/pid")


# --- in the keeper ---


@dataclass
class EngineWorker(Worker):
    """The record of a worker that an engine has started. The end of its connection is its death."""

    pid: int = 0
    machine: str = ""

    def sources(self) -> list[Any]:
        return [self.receiver]

    def is_alive(self) -> bool:
        return True

    def ended_by_sigterm(self) -> bool:
        return False

    def death(self) -> WorkerFailed:
        return WorkerFailed(f"rank {self.rank} was lost", self.rank)

    def end_hanging(self, scratch: str, hang_timeout: float, steps: int) -> WorkerFailed:
        """Leave the worker out, for which others have waited too long. Kill it if it is on this machine."""
        with suppress(OSError):
            self.announcements.send(None)
        if self.machine == _machine():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        return WorkerFailed(missing_ranks_message([self.rank], hang_timeout), self.rank, steps)


def main() -> None:
    """Watch workers until all have ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # an engine may send it what it sends its workers
        signal.signal(number, signal.SIG_IGN)
    address, world_size, hang_timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    key = sys.stdin.buffer.read()
    workers: list[Worker] = []
    with bind_socket(address) as listener:
        listener.settimeout(CONNECT_TIMEOUT.total_seconds())
        print(listener.getsockname()[1], flush=True)
        while len(workers) < world_size:
            connection = _connection(listener.accept()[0], hang_timeout)
            with suppress(EOFError, OSError):  # another program, or a worker that has died
                if connection.poll(HELLO_SECONDS) and hmac.compare_digest(connection.recv_bytes(KEY_BYTES), key):
                    rank, pid, machine = connection.recv()
                    workers.append(EngineWorker(rank, None, connection, False, connection, pid=pid, machine=machine))
    workers.sort(key=lambda each: each.rank)
    survive(workers, Survival(), None, (), hang_timeout, "")


if __name__ == "__main__":
    main()
