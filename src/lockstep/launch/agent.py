"""Runs a function in the worker processes that a layout needs, under torch's elastic agent.

Every run happens in workers, the one-device run too: the parent only composes, checks and launches, so it never runs
a parallel operation or touches CUDA, and may fork. A forked worker starts in a fraction of a second with everything
imported. The agent lives in the parent, kills the machine's workers when one dies, and brings their results back. Each
machine has an agent of its own; launch/meeting.py says which ranks are its. Under `torchrun` (or several SLURM tasks)
the workers exist already: the function then runs in place.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import signal
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.launch import logs, watchdog, worker
from lockstep.launch.endings import PeerLost, WorkerFailed
from lockstep.launch.environment import RESTARTS, environment_kept, export, external_workers
from lockstep.launch.group import join_external
from lockstep.launch.interpreter import imported
from lockstep.launch.meeting import Meeting
from lockstep.launch.network import LOOPBACK
from lockstep.launch.processes import end_children
from lockstep.launch.scratch import scratch_folder
from lockstep.launch.signals import Interrupted, forwarding
from lockstep.launch.watchdog import watching
from lockstep.launch.wire import Place

GRACE_SECONDS = 5  # between telling the workers to end and killing them, when the parent itself can't go on


def launch(
    work: Callable[..., Any],
    *args: Any,
    layout: Layout,
    restarts: int = 0,
    hang_timeout: float = 300.0,
    meeting: Meeting | None = None,
    place: Place | None = None,
) -> Any:
    """Calls `work(*args)` in every worker of this machine and returns what the first one's call returned.

    Args:
        work: a function that a worker can import; its result must be picklable.
        layout: how many workers, on how many machines.
        restarts: times that this run's workers were started before.
        hang_timeout: seconds after which a silent worker is killed.
        meeting, place: where there are several machines, the meeting that tells of the others, and this one's part.

    Raises:
        Refusal: a worker refused its input, or the workers that exist don't match the layout.
        WorkerFailed: a worker died and no restart was left.
        Interrupted: SIGTERM or SIGINT ended the run; its checkpoint is saved.
    """
    imported()
    if found := external_workers():
        if found != layout.world_size:
            raise Refusal(
                f"{found} workers exist, the layout needs {layout.world_size}: give ddp (or pipeline), devices x "
                f"num_nodes = {found}"
            )
        join_external()
        try:
            with logs.failure_told():
                return work(*args)
        finally:
            end_children()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from lockstep.launch import rendezvous

    for name in ("torch.distributed", "torch.distributed.elastic.agent.server.api", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they have to say, the messages below say
    workers = layout.world_size // layout.num_nodes
    first, here = (place.machine * workers, f" on {platform.node()}") if place else (0, "")
    names = [f"rank {rank}{here}" for rank in range(first, first + workers)]
    with (
        environment_kept(),
        forwarding() as received,
        scratch_folder() as scratch,
        watching(scratch, names, hang_timeout, meeting) as silent,
        _told_of_killed(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.NAME,
            rdzv_endpoint=LOOPBACK,
            max_restarts=0,  # lockstep.run.supervisor starts them again
            monitor_interval=0.05,
            start_method=start_method(),
            signals_to_handle="SIGQUIT",  # the others are ours: see forwarding()
            shutdown_timeout=GRACE_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        export(**{RESTARTS: str(restarts)})
        try:
            results = elastic_launch(config, worker.run)(work, layout, args, os.getpid(), place)
            interrupted = next((r.signum for r in results.values() if isinstance(r, worker.Ended)), None)
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
                failed = WorkerFailed(silent[failure.pid])
                failed.victim = meeting is not None and bool(meeting.trouble())
                raise failed from None
            if failure.exitcode == -signal.SIGTERM:
                raise Interrupted(signal.SIGTERM) from None
            raise _explain(names[rank], logs.file_of(first + rank), failure) from None


@contextmanager
def _told_of_killed() -> Iterator[None]:
    """What killed workers left undone: they write no summary, so who hears of it hears too how far they were; and one
    that drew a bar has hidden the terminal's cursor."""
    try:
        yield
    except (Interrupted, WorkerFailed) as ended:
        ended.steps = watchdog.steps()
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")
        raise


def _explain(who: str, log: str, failure: Any) -> Exception:
    message, trace = failure.message, ""
    if isinstance(message, Mapping):
        trace = message.get("extraInfo", {}).get("py_callstack", "")
        message = message.get("message", "")
    message = _original(str(message).strip())
    if message.startswith("Refusal: "):
        return Refusal(message.removeprefix("Refusal: ").splitlines()[0])
    if message.startswith(f"{PeerLost.__name__}: "):
        failed = WorkerFailed(f"{who} {message.removeprefix(f'{PeerLost.__name__}: ').splitlines()[0]}")
        failed.victim = True
        return failed
    if failure.exitcode < 0:
        return WorkerFailed(f"{who} was killed by {signal.Signals(-failure.exitcode).name}")
    if message.startswith("To enable traceback"):  # the agent's words where a worker left without a message
        message = f"exit code {failure.exitcode}"
    lines = message.splitlines() or ["no reason given"]
    where = f" ({place(trace)}traceback in {log})" if trace else ""
    failed = WorkerFailed(f"{who} failed: {lines[0]}{where}")
    failed.add_note(trace)
    return failed


def _original(message: str) -> str:
    """What was raised in another process or thread, of which torch's message holds the whole traceback."""
    if "\nOriginal Traceback (most recent call last):" not in message:
        return message
    end = message.rpartition('\n  File "')[2].splitlines()[1:]
    found = next((line for line in end if line and not line.startswith(" ")), message)
    return re.sub(r"^[\w.]+\.(?=\w+: )", "", found)


def place(trace: str) -> str:
    """Where in the user's own code a traceback ends: `<file>:<line> in <function>; `, or nothing."""
    others = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")
    found = [
        (file, line, function)
        for file, line, function in re.findall(r'^ *(?:\| +)?File "(.+)", line (\d+), in (.+)$', trace, re.MULTILINE)
        if not file.startswith(others) and not {"site-packages", "dist-packages"} & set(Path(file).parts)
    ]
    if not found:
        return ""
    file, line, function = found[-1]
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}:{line} in {function}; "


def start_method() -> str:
    """`fork` where it is safe and exists, else `spawn`."""
    import torch

    computed = torch.cuda.is_initialized() or "ipykernel" in sys.modules
    return "fork" if sys.platform == "linux" and not computed else "spawn"
