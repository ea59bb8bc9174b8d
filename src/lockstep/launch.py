"""Runs a function in the worker processes that a layout needs, under torch's elastic agent.

Every run happens in workers, the one-device run too: the parent only composes, checks and launches, so it never runs
a parallel operation or touches CUDA, and may fork. A forked worker starts in a fraction of a second with everything
imported. The agent lives in the parent, kills the group when one worker dies, restarts it while `max_restarts` lasts,
and brings the workers' results back. Under `torchrun` (or several SLURM tasks) the workers exist already: the function
then runs in place.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from lockstep import heartbeat
from lockstep.family import die_with, end_children
from lockstep.heartbeat import watching
from lockstep.interpreter import imported
from lockstep.layout import Layout, Refusal
from lockstep.scratch import can_write, scratch_folder

VICTIM_SECONDS = 1  # that a worker which lost another one waits before it fails too
GRACE_SECONDS = 5  # between telling the workers to end and killing them, when the parent itself can't go on
GROUP_TIMEOUT = timedelta(hours=1)  # of a collective; a silent rank is noticed earlier, and named (lockstep.heartbeat)

RESTARTS = "LOCKSTEP_RESTARTS"  # what a worker is told by its environment
STARTED = "LOCKSTEP_STARTED"  # `time.time()` when the command, or a sweep's job, began


class WorkerFailed(Exception):
    """A worker died. The message names the rank and the reason in one line; `steps` as in `Interrupted`."""

    steps = 0


class Interrupted(BaseException):
    """The run was asked to end by a signal, and did. Not an `Exception`: it ends a sweep, not only its job.

    Attributes:
        steps: optimizer steps that the workers had made, where there were any.
    """

    steps = 0

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.code = 128 + signum


def external_workers() -> int:
    """World size where workers exist already (torchrun, several SLURM tasks), else 0."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        return int(os.environ["SLURM_NTASKS"])
    return 0


def launch(
    work: Callable[..., Any],
    *args: Any,
    layout: Layout,
    rdzv_endpoint: str | None = None,
    min_nodes: int | None = None,
    max_restarts: int = 0,
    restarts: int = 0,
    hang_timeout: float = 300.0,
) -> Any:
    """Calls `work(*args)` in every worker and returns what rank zero's call returned.

    Args:
        work: a function that a worker can import; its result must be picklable.
        layout: how many workers, on how many machines.
        rdzv_endpoint: `<host>:<port>` of one of the machines where there are several.
        min_nodes: machines that are enough to go on with; None: all of them.
        max_restarts: times that a group which lost a worker is started again.
        restarts: times that it was before this call.
        hang_timeout: seconds after which a silent worker is killed.

    Raises:
        Refusal: a worker refused its input, or the workers that exist don't match the layout.
        WorkerFailed: a worker died and no restart was left.
        Interrupted: SIGTERM or SIGINT ended the run; its checkpoint is saved.
    """
    imported()
    if found := external_workers():
        if found != layout.processes:
            raise Refusal(
                f"{found} workers exist, the layout needs {layout.processes}: give ddp, devices x num_nodes = {found}"
            )
        try:
            return work(*args)
        finally:
            end_children()
            leave_group()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from lockstep import rendezvous

    for name in ("torch.distributed", "torch.distributed.elastic.agent.server.api", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they have to say, the messages below say
    workers = layout.processes // layout.num_nodes if layout.strategy == "ddp" else 1  # of this machine
    with (
        environment_kept(),
        forwarding() as received,
        scratch_folder() as scratch,
        watching(scratch, workers, hang_timeout, alone=rdzv_endpoint is None) as silent,
        _steps_told(),
    ):
        config = LaunchConfig(
            min_nodes=min_nodes or layout.num_nodes,
            max_nodes=layout.num_nodes,
            nproc_per_node=workers,
            run_id=str(uuid.uuid5(uuid.NAMESPACE_DNS, rdzv_endpoint)) if rdzv_endpoint else uuid.uuid4().hex,
            rdzv_backend="c10d" if rdzv_endpoint else rendezvous.NAME,
            rdzv_endpoint=rdzv_endpoint or rendezvous.LOOPBACK,
            max_restarts=max_restarts,
            monitor_interval=0.05,
            start_method=start_method(),
            signals_to_handle="SIGQUIT",  # the others are ours: see forwarding()
            shutdown_timeout=GRACE_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        os.environ[RESTARTS] = str(restarts)
        try:
            results = elastic_launch(config, _worker)(work, layout, args, os.getpid())
            interrupted = next((r.signum for r in results.values() if isinstance(r, _Ended)), None)
            if interrupted is not None:
                raise Interrupted(received[0] if received else interrupted)
            return results[min(results)]
        except SignalException:
            raise (
                Interrupted(received[0]) if received else WorkerFailed("a worker was killed when it was done")
            ) from None
        except ChildFailedError as error:
            if received:
                raise Interrupted(received[0]) from None
            rank, failure = error.get_first_failure()
            if failure.pid in silent:
                raise WorkerFailed(silent[failure.pid]) from None
            if failure.exitcode == -signal.SIGTERM:
                raise Interrupted(signal.SIGTERM) from None
            raise _explain(rank, failure) from None


@contextmanager
def _steps_told() -> Iterator[None]:
    """Workers that are killed write no summary: who hears of it hears too how far they were."""
    try:
        yield
    except (Interrupted, WorkerFailed) as ended:
        ended.steps = heartbeat.steps()
        raise


def restart_count() -> int:
    """Times that this worker's group was started again: by the agent, and before that by the parent."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(os.environ.get(RESTARTS, "0"))


def ask_to_end() -> None:
    """Asks the workers to save and end, as SIGTERM does."""
    _tell_workers(signal.SIGTERM)


_computed = False  # whether this process may have run a parallel operation: see has_computed


@contextmanager
def has_computed() -> Iterator[None]:
    """For a parent that is the user's own, a notebook say: it may have computed, so workers are spawned; they don't run
    its `__main__` again, which may have no file, or no `if __name__ == "__main__"`."""
    global _computed
    before = _computed, sys.modules["__main__"]
    _computed, sys.modules["__main__"] = True, ModuleType("__main__")
    try:
        yield
    finally:
        _computed, sys.modules["__main__"] = before


def start_method() -> str:
    """`fork` where it is safe and exists, else `spawn`."""
    import torch

    computed = _computed or torch.cuda.is_initialized() or "ipykernel" in sys.modules
    return "fork" if sys.platform == "linux" and not computed else "spawn"


@contextmanager
def environment_kept() -> Iterator[None]:
    """The agent leaves variables and signal handlers behind; a sweep's next job must not see them."""
    variables = dict(os.environ)
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def forwarding() -> Iterator[list[int]]:
    """While workers run, the parent passes signals on: SIGTERM and the first Ctrl-C ask them to save and end, SIGUSR1
    to save and go on; a second Ctrl-C kills them. Yields the list of the ending signals received so far."""
    received: list[int] = []
    asked.clear()
    parent = os.getpid()

    def handler(signum: int, frame: FrameType | None) -> None:
        # Remembered here too, for workers that are forked later, and in a fork that has not yet set its own handlers.
        remember(signal.SIGUSR1 if signum == signal.SIGUSR1 else signal.SIGTERM, frame)
        if os.getpid() != parent:
            return
        if signum != signal.SIGUSR1:
            if signal.SIGINT in received and signum == signal.SIGINT:
                _tell_workers(signal.SIGKILL)
                raise Interrupted(signum)
            received.append(signum)
            if signum == signal.SIGINT:
                say_ending()
        _tell_workers(signal.SIGUSR1 if signum == signal.SIGUSR1 else signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, handler)
    yield received


def say_ending() -> None:
    """Answers the first Ctrl-C. Past Python's streams: a signal handler may interrupt them."""
    with suppress(OSError):
        newline = "\n" * os.isatty(2)  # after the ^C
        os.write(2, f"{newline}SIGINT: saving and ending; once more ends at once\n".encode())


def _tell_workers(signum: int) -> None:
    for child in multiprocessing.active_children():
        if child.pid:
            os.kill(child.pid, signum)


asked: list[int] = []  # the signals that this worker was sent so far


def remember(signum: int, frame: FrameType | None) -> None:
    """A worker's signal handler. It only remembers: a collective in a handler would meet other ranks in another one."""
    asked.append(signum)


class _Ended:
    """What a worker returns when a signal ended its run."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def _worker(work: Callable[..., Any], layout: Layout, args: tuple[Any, ...], parent: int) -> Any:
    """The first function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent passes it on
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, remember)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until there is something to save: see callbacks.Preemption
    if signal.SIGTERM in asked:  # before this line
        signal.raise_signal(signal.SIGTERM)
    die_with(parent)
    heartbeat.join(int(os.environ["LOCAL_RANK"]))
    try:
        if int(os.environ["WORLD_SIZE"]) > 1:
            _all_forked()
            join_group(layout)
        try:
            result = work(*args)
        except Interrupted as interrupted:
            result = _Ended(interrupted.code - 128)
        signal.signal(signal.SIGTERM, _leave_soon)
        # Not when it fails: the others' lost connections would be reported before the reason is.
        leave_group()
        return result
    except SystemExit as left:  # with code 0 and no result, the agent would wait for ever
        raise RuntimeError(f"the worker left with exit code {left.code}") from left
    except Refusal as refusal:
        raise Refusal(str(refusal)) from None  # one class name for all kinds: it travels as text
    except Exception as error:
        if not can_write():  # the message would travel in a file
            print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        if _lost_another(error):
            time.sleep(VICTIM_SECONDS)  # the agent names the first that it sees: let that be the one that was lost
        raise
    finally:
        heartbeat.leave()
        end_children()


def _leave_soon(signum: int, frame: FrameType | None) -> None:
    """The handler of a worker that is done: it ends as soon as the agent has taken its result; or in a moment, if the
    agent asks because another worker was lost meanwhile."""
    timer = threading.Timer(VICTIM_SECONDS, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _lost_another(error: Exception) -> bool:
    """Whether a worker failed only because it lost the connection to another one."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "onnection" in str(error))


def _all_forked() -> None:
    """Waits until all workers of this machine run. Until then the parent forks, and none may connect to its store: the
    store's thread looks up the name of who connects, and a worker forked in that moment inherits glibc's resolver
    locked, for ever (loops of 80 to 150 starts of 8 workers hung, 3 of 3; with this, none in 200 starts)."""
    gate = Path(os.environ[heartbeat.VARIABLE]).with_name(f"forked{restart_count()}")
    gate.mkdir(exist_ok=True)
    (gate / os.environ["LOCAL_RANK"]).touch()
    deadline = time.monotonic() + GROUP_TIMEOUT.total_seconds()
    while len(os.listdir(gate)) < int(os.environ["LOCAL_WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(0.005)


def join_group(layout: Layout) -> None:
    """Starts the default process group, on a store of its own.

    The agent's store remembers the ranks of a group that died, and a restarted gloo group that meets it hangs in about
    half of the trials. So rank zero opens a fresh one, and tells the others its port through the agent's.
    """
    import torch.distributed as dist

    from lockstep.rendezvous import LOOPBACK, serve

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent = dist.TCPStore(address, port, is_master=False, timeout=GROUP_TIMEOUT)
    key = f"lockstep/{os.environ['TORCHELASTIC_RUN_ID']}/{attempt}/port"
    if rank == 0:
        store = serve(address)
        agent.set(key, str(store.port))
    else:
        store = dist.TCPStore(
            address, int(agent.get(key)), world, is_master=False, timeout=GROUP_TIMEOUT, wait_for_workers=False
        )
    if layout.accelerator == "gpu":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if layout.accelerator == "gpu" else "gloo"
    if address == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def agree(value: str, num_nodes: int, rdzv_endpoint: str | None) -> str:
    """One process's value for all that start a run together: rank zero's among external workers, the first to ask
    among the parents of several machines."""
    if external_workers() > 1:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            _slurm_as_torchrun()
            gpu = torch.cuda.is_available()
            if gpu:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=GROUP_TIMEOUT)
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]
    if num_nodes > 1 and rdzv_endpoint:
        return _first(value, rdzv_endpoint)
    return value


_stores: list[Any] = []  # the agreement's store lives as long as this process: other machines may come later


def _first(value: str, endpoint: str) -> str:
    from torch.distributed import TCPStore

    host, _, port = endpoint.rpartition(":")
    try:  # whoever can open the port serves; the agent's rendezvous then shares it
        store = TCPStore(
            host, int(port), is_master=True, multi_tenant=True, wait_for_workers=False, timeout=GROUP_TIMEOUT
        )
    except (RuntimeError, OSError):
        store = TCPStore(host, int(port), is_master=False, timeout=GROUP_TIMEOUT)
    _stores.append(store)
    return store.compare_set("lockstep/stamp", "", value).decode()


def _slurm_as_torchrun() -> None:
    """SLURM's names for ranks, as torchrun's; MASTER_ADDR and MASTER_PORT are the job script's to set."""
    if "RANK" in os.environ:
        return
    names = {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_NTASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
        "TORCHELASTIC_RUN_ID": "SLURM_JOB_ID",
    }
    os.environ.update({ours: os.environ[theirs] for ours, theirs in names.items()})


def leave_group() -> None:
    """Ends the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _explain(rank: int, failure: Any) -> Exception:
    message, trace = failure.message, ""
    if isinstance(message, Mapping):
        trace = message.get("extraInfo", {}).get("py_callstack", "")
        message = message.get("message", "")
    message = str(message).strip()
    if message.startswith("Refusal: "):
        return Refusal(message.removeprefix("Refusal: ").splitlines()[0])
    if failure.exitcode < 0:
        return WorkerFailed(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}")
    if message.startswith("To enable traceback"):  # the agent's words where a worker left without a message
        message = f"exit code {failure.exitcode}"
    lines = message.splitlines() or ["no reason given"]
    failed = WorkerFailed(f"rank {rank} failed: {lines[0]}")
    failed.add_note(trace)
    return failed
