"""A command imports what its run needs, ends without losing anything, and its workers share the data in memory."""

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Program, python, workers_of

import lockstep
from lockstep.errors import UserError
from lockstep.files import replacing
from lockstep.launch import process_lifetime

pytestmark = pytest.mark.usefixtures("processes")

# train.py, whose worker then tells of itself
COMMAND = """
import gc, sys
from lockstep import command
from lockstep.commands import project_programs
from train import train

in_workers = project_programs.run_in_workers

def work(*args):
    from lockstep.job.training import fit_and_test as fit

    result = fit(*args)
    print("\\nCOLLECTS", gc.isenabled(), gc.get_freeze_count() > 100_000)
    print("IMPORTED", *sys.modules, flush=True)
    return result

print("COLLECTS", gc.isenabled())
project_programs.run_in_workers = lambda _, *args: in_workers(work, *args)
command(train, "src/train.py")
"""


def test_a_worker_imports_nothing_that_it_does_not_need_and_collects_no_garbage_of_others(tmp_path: Path) -> None:
    done = python(COMMAND, "max_steps=2", "batch_size=8", f"outputs={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "COLLECTS True True\n" in done.stdout
    imported = set(next(line for line in done.stdout.splitlines() if line.startswith("IMPORTED")).split())
    assert {"torch", "lightning", "torchmetrics", "lockstep.job.training"} <= imported  # the control
    needless = {"sklearn", "pandas", "optuna", "onnx", "onnxruntime"}
    assert not imported & needless, imported & needless


def test_leaving_loses_nothing(tmp_path: Path) -> None:
    program = f"""
import logging, logging.handlers
from lockstep.launch.process_lifetime import exit_process
kept = logging.handlers.MemoryHandler(100, target=logging.FileHandler({str(tmp_path / "log")!r}))
kept.emit(logging.LogRecord("x", 20, "x", 1, "logged", (), None))
print("written", end=" ")
exit_process(7)
"""
    done = python(program)
    assert (done.returncode, done.stdout, done.stderr) == (7, "written ", "")
    assert (tmp_path / "log").read_text().strip() == "logged"


PROFILED = """
import atexit, sys
from lockstep.launch.process_lifetime import exit_process
atexit.register(print, "at exit")
print("written", end=" ")
exit_process(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 2])
@pytest.mark.parametrize("tool", ["-m cProfile -o", "-m coverage run --data-file", "-m trace -c -C", "-W ignore"])
def test_a_program_that_runs_this_one_writes_its_files(tmp_path: Path, tool: str, code: int) -> None:
    if "coverage" in tool:
        pytest.importorskip("coverage")
    program, written = tmp_path / "program.py", tmp_path / "written"
    program.write_text(PROFILED)
    command = [sys.executable, *tool.split(), *[str(written)] * (tool[1] == "m"), str(program), str(code)]
    paths = {**os.environ, "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split("\n")[0]) == (code, "written at exit"), done.stderr
    assert written.exists() == (tool[1] == "m")


def test_functions_of_atexit_may_not_hang_the_exit() -> None:
    done = python(
        "import atexit, time, lockstep.launch.process_lifetime as lifetime\n"
        "lifetime.EXIT_SECONDS = 0.1\n"
        "atexit.register(time.sleep, 1000)\n"
        "lifetime.exit_process(3)"
    )
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_run_goes_on_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def no_locks(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with process_lifetime.scratch_folder() as other:
        os.utime(Path(other, "lock"), (0, 0))  # not young
        monkeypatch.setattr(fcntl, "flock", no_locks)
        with process_lifetime.scratch_folder() as folder:
            line = capsys.readouterr().err
            assert line.startswith(f"{folder}: can't be locked ({os.strerror(number)}): ")
            assert line.count("\n") == 1
        assert Path(other).exists(), "nobody knows whether its run has ended"
        monkeypatch.undo()
    with replacing(tmp_path / "file") as file:
        file.write(b"x")
    assert (tmp_path / "file").read_bytes() == b"x"


def test_no_folder_for_temporary_files_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/missing")
    right = "let TMPDIR name one that can be written"
    with (
        pytest.raises(UserError, match=rf"^.*missing/\w+: no folder for temporary files \(No such.*: {right}$"),
        process_lifetime.scratch_folder(),
    ):
        raise AssertionError


def in_a_daemon(what: Callable[[], Any]) -> str:
    """Return the error of a call in a daemonic process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)

    def work() -> None:
        try:
            what()
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")
        else:
            sender.send("none")

    process = context.Process(target=work, daemon=True)
    process.start()
    error = str(receiver.recv())
    process.join()
    return error


def test_a_daemonic_process_starts_no_workers() -> None:
    error = in_a_daemon(lambda: lockstep.launch(print, devices=2))
    assert error.startswith("UserError: Lockstep can't start processes in a daemonic process, such as"), error
    error = in_a_daemon(lambda: process_lifetime.refuse_daemon("num_workers=2", "give num_workers=0"))
    assert error.startswith("UserError: num_workers=2 can't start processes in a daemonic process, such as"), error
    process_lifetime.refuse_daemon("num_workers=2", "the control")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells what processes share")
@pytest.mark.nightly
def test_workers_share_the_data_in_memory(tmp_path: Path) -> None:
    samples, size = 60_000, 64
    data = samples * size**2 >> 10  # KiB
    train = Program(tmp_path, fresh=True)
    task = ("data=synthetic", f"data.samples={samples}", f"data.image_size={size}", "batch_size=8")
    process = train.start(*task, "checkpoint_every=20", "strategy=ddp", "devices=2")
    try:
        train.wait_for_checkpoint(process)
        workers = [memory(pid) for pid in workers_of(process)]
    finally:
        train.kill(process)
    assert len(workers) == 2
    for remaining in workers:
        assert remaining["Rss"] > data  # the control: this worker has the data
        assert remaining["Private_Dirty"] < data / 2


def memory(pid: int) -> dict[str, int]:
    """Return the KiB of a process by kind, see proc(5), smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
