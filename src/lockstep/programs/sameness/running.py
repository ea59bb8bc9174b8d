"""Run a program with the recorder in each of its Python processes, and read what they wrote."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import lockstep
from lockstep.errors import UserError
from lockstep.programs.sameness.recorded import Lines, Written, read_processes
from lockstep.text import plural

PACKAGE = Path(lockstep.__file__).parent
TAIL = 200  # lines of a program's output that are remembered
GRACE = 30.0  # seconds that the other ranks get when the first one has taken the last step
POLL = 0.05


@dataclass(frozen=True)
class Limits:
    """How much of a program is recorded.

    Attributes:
        steps: optimizer steps.
        timeout: seconds in which a program must take its next step.
    """

    steps: int = 20
    timeout: float = 600.0


def record(command: str, limits: Limits, runs: tuple[str, ...] = ("run",)) -> Written:
    """Run a command, once for each of `runs`, and return what it did.

    Args:
        command: a command line for `sh`.
        limits: how much is recorded.
        runs: run, again, flipped (of each weight one bit), flipped 3 (of every third element of each weight).

    Raises:
        UserError: it took no step, failed, or hangs.
    """
    return Written(command, {name: _run(command, limits, flip_of(name)) for name in runs})


def flip_of(name: str) -> int:
    """Return of which elements of each weight a run flips a bit: of every so manyth; 0: of none."""
    return int(name.partition(" ")[2] or 1) if name.startswith("flipped") else 0


def _run(command: str, limits: Limits, flip: int) -> list[Lines]:
    folder = Path(tempfile.mkdtemp(prefix="lockstep_same_"))
    try:
        return _lines(command, folder, _watch(command, limits, flip, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: by itself with a code, or by us. `late`: it took no step for too long."""

    code: int | None
    late: bool
    output: list[str]


def _watch(command: str, limits: Limits, flip: int, folder: Path) -> Outcome:
    """Run a command until all ranks have taken the last step, or it ends, or nothing happens for too long."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE / "enter"), os.environ.get("PYTHONPATH")])),
        "LOCKSTEP_TRACE": str(folder),
        "LOCKSTEP_TRACE_STEPS": str(limits.steps),
        "LOCKSTEP_TRACE_WAIT": str(limits.timeout + 60),
        "LOCKSTEP_TRACE_FLIP": str(flip),
        "PYTHONUNBUFFERED": "1",
    }
    supervisor = [
        sys.executable,
        "-I",
        str(PACKAGE / "programs" / "sameness" / "supervise.py"),
        str(os.getpid()),
        command,
    ]
    process = subprocess.Popen(
        supervisor, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    tail: deque[str] = deque(maxlen=TAIL)
    assert process.stdout is not None
    reader = threading.Thread(target=_drain, args=(process.stdout, tail), daemon=True)
    reader.start()
    try:
        late = False
        seen, since, first_done = 0, time.monotonic(), 0.0
        while process.poll() is None:
            now, size = time.monotonic(), sum(path.stat().st_size for path in folder.iterdir())
            if size != seen:
                seen, since = size, now
            done = len(list(folder.glob("*.done")))
            first_done = first_done or (now if done else 0.0)
            if done and (done >= _world(folder) or now > first_done + GRACE):
                break
            if now > since + limits.timeout:
                late = True
                break
            time.sleep(POLL)
        code = process.poll()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
        process.wait()
        reader.join(5)
    return Outcome(code, late, list(tail))


def _drain(stream: IO[bytes], tail: "deque[str]") -> None:
    """Read what a program prints, however much it is, and remember the end."""
    with suppress(ValueError, OSError):
        while block := stream.readline(1 << 16):
            if text := block.decode(errors="replace").strip():
                tail.append(text[-500:])


def _world(folder: Path) -> int:
    for path in folder.glob("*.jsonl"):
        with suppress(ValueError, OSError, KeyError), path.open() as file:
            return int(json.loads(file.readline())["world"])
    return 1


def _lines(command: str, folder: Path, outcome: Outcome) -> list[Lines]:
    """Return the lines of each process that took a step.

    Raises:
        UserError: none did, or the program failed.
    """
    processes, taken = [], []
    for lines in read_processes(folder):
        steps = sum("step" in line for line in lines)
        if steps:
            processes.append(lines)
            taken.append(steps)
        elif error := next((line["error"] for line in lines if "error" in line), None):
            raise UserError(f"{command}: can't be recorded: {' '.join(str(error).split())[-300:]}")
    last = _last_line(outcome.output)
    steps = min(taken, default=0)
    if outcome.late and not steps:
        raise UserError(f"{command}: it took no optimizer step in time: wait longer with --timeout{_quote(last)}")
    if outcome.code:
        when = f"after {plural(steps, 'optimizer step')}" if steps else "before its first optimizer step"
        raise UserError(f"{command}: it failed {when} (exit {outcome.code}): mend it first{_quote(last)}")
    if not steps:
        raise UserError(
            f"{command}: it took no optimizer step that torch.optim shows: name the command that trains{_quote(last)}"
        )
    if outcome.late:
        raise UserError(f"{command}: it hangs after {plural(steps, 'optimizer step')}: mend it, or raise --timeout")
    return processes


def _quote(line: str) -> str:
    return f"; its last line: {line}" if line else ""


def _last_line(output: list[str]) -> str:
    """Return the line of the output that says most about an error: the last one that names an exception.

    torchrun prefixes the ranks' lines, and ends with an exception of its own, which says nothing.
    """
    lines = [re.sub(r"^\[(rank|default)?\d+\]: *", "", line) for line in output]
    errors = [line for line in lines if line.partition(":")[0].rpartition(".")[2].endswith(("Error", "Exception"))]
    return ([line for line in errors if "ChildFailedError" not in line] or lines or [""])[-1][:200]
