"""lockstep.launch.parent where nobody trains: workers that end in odd ways."""

import logging
import operator
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from torch.utils.data import DataLoader, Dataset

from lockstep.arithmetic.layout import resolve
from lockstep.commands.api import compose
from lockstep.commands.cli import error_line, print_traceback
from lockstep.commands.sweeps import Slot, SweepJob, run_jobs
from lockstep.config.check import check
from lockstep.config.instantiate import instantiate
from lockstep.errors import LostRank, UserError, WorkerFailed
from lockstep.job.supervisor import run_in_workers
from lockstep.launch import logs, parent
from lockstep.launch.environment import ends_survivors
from lockstep.launch.failures import user_code_location
from lockstep.launch.parent import launch
from lockstep.launch.signals import Interrupted
from lockstep.launch.workers import Worker

ALONE = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=8)


def fails_in_a_loader(where: str) -> None:
    logs.configure_logging(Path(where), 0)
    list(DataLoader(Torn(), num_workers=1))


class Torn(Dataset[int]):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or OSError("cannot identify\nx.jpg")

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise self.error


def refused_in_a_loader() -> None:
    list(DataLoader(Torn(UserError("x.jpg can't be decoded")), num_workers=1))


@pytest.mark.usefixtures("processes")
def test_a_failure_reports_where_in_the_users_code(tmp_path: Path) -> None:
    """The message of a loader process's own failure is torch's, over its traceback."""
    with pytest.raises(WorkerFailed) as failed:
        launch(fails_in_a_loader, str(tmp_path), layout=ALONE)
    at, last = os.path.relpath(__file__), Torn.__getitem__.__code__.co_firstlineno + 1
    assert str(failed.value) == (
        f"rank 0 failed: OSError: cannot identify ({at}:{last} in __getitem__; traceback in {tmp_path}/train.log)"
    )
    assert f"line {last}, in __getitem__" in (tmp_path / "train.log").read_text()
    with pytest.raises(UserError, match=r"^x\.jpg can't be decoded$"):
        launch(refused_in_a_loader, layout=ALONE)


def killed(seconds: float, number: int = signal.SIGKILL) -> str:
    """Kill this process `seconds` after its result is sent."""
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
    if not seconds:
        time.sleep(60)
    return "done"


@pytest.mark.usefixtures("processes")
def test_a_worker_that_is_killed_is_reported_as_such_unless_it_was_done() -> None:
    with pytest.raises(WorkerFailed, match=r"^rank 0 was killed by SIGKILL \(out of memory\?\)$"):
        launch(killed, 0, layout=ALONE)
    with pytest.raises(WorkerFailed, match=r"^rank 0 was killed by signal 40$"):  # a real-time signal
        launch(killed, 0, 40, layout=ALONE)
    for milliseconds in range(100, 150, 10):
        assert launch(killed, milliseconds / 1000, layout=ALONE) == "done"


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ((-signal.SIGABRT, -signal.SIGKILL), "rank 1 was killed by SIGKILL (out of memory?)"),
        ((-signal.SIGABRT, None), "rank 0 was killed by SIGABRT (NCCL does so if another rank is lost or does not"),
        ((None, -signal.SIGABRT), "rank 1 was killed by SIGABRT (NCCL does so if another rank is lost or does not"),
    ],
)
def test_a_worker_that_nccl_aborts_is_not_the_one_that_failed(
    codes: tuple[int | None, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the worker is alive and sends nothing."""
    monkeypatch.setattr(parent, "ANSWER_SECONDS", 0.1)

    def result(uses_nccl: bool) -> str:
        pipes = [Pipe(duplex=False) for _ in codes]
        processes = [
            SimpleNamespace(is_alive=partial(operator.is_, code, None), exitcode=code, sentinel=Pipe()[0])
            for code in codes
        ]
        rows = zip(processes, pipes, strict=True)
        workers = [Worker(rank, process, pipe[0], uses_nccl) for rank, (process, pipe) in enumerate(rows)]
        aborted = next(each for each in workers if each.process.exitcode == -signal.SIGABRT)
        aborted.receive_answer()  # the first to be seen
        with pytest.raises(WorkerFailed) as failed:
            parent._result(workers, (), 5.0, "")
        assert isinstance(failed.value, LostRank) == (uses_nccl and "NCCL" in str(failed.value))
        return str(failed.value)

    assert result(True).startswith(message)
    assert (
        result(False) == f"rank {codes.index(-signal.SIGABRT)} was killed by SIGABRT"
    )  # the control: gloo aborts none


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("what", ["worker", "job"])
def test_a_signal_that_comes_while_a_process_is_started_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It comes by another thread, before multiprocessing takes note of the fork."""
    fork = os.fork
    errors: list[str] = []

    def interrupted() -> int:
        if pid := fork():
            handler: Any = signal.getsignal(signal.SIGTERM)
            handler(signal.SIGTERM, None)
        return pid

    def job(start: Callable[[float], Any], seconds: float, **_: object) -> None:
        jobs = [SweepJob(0, tmp_path, [])]
        run_jobs(jobs, lambda _: start(seconds), lambda _, outcome: errors.append(outcome["error"]), [Slot()])

    monkeypatch.setattr(os, "fork", interrupted)
    starts: dict[str, Callable[..., Any]] = {"worker": launch, "job": job}
    with pytest.raises(Interrupted, match="SIGTERM"):
        starts[what](time.sleep, 20, layout=ALONE)
    assert errors == ["the job was killed by SIGTERM"] * (what == "job")


def test_more_devices_than_workers_that_exist_are_refused(set_environment: Callable[..., None]) -> None:
    set_environment(TORCHELASTIC_RUN_ID="theirs", WORLD_SIZE="2")
    four = resolve(strategy="ddp", accelerator="cpu", devices=4, num_nodes=1, batch_size=8)
    with pytest.raises(UserError, match=r"torchrun has started 2 workers, but the layout needs 4: give strategy=ddp"):
        launch(print, layout=four)


@pytest.mark.parametrize("restarts", ["max_restarts=2", "elastic=true"])
def test_workers_of_others_are_started_again_by_them(
    tmp_path: Path, set_environment: Callable[..., None], restarts: str
) -> None:
    config = check(dict(compose("strategy=ddp", "devices=2", "exact=true", restarts)))
    set_environment(TORCHELASTIC_RUN_ID="theirs", WORLD_SIZE="2")
    with pytest.raises(UserError, match=rf"^{restarts}: torchrun, SLURM or MPI restarts its own workers"):
        run_in_workers(print, config, SimpleNamespace(train=range(640)), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"TORCHELASTIC_RUN_ID": "theirs", "WORLD_SIZE": "2"}, ""),
        ({"TORCHELASTIC_RUN_ID": "theirs", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "0"}, ""),
        (
            {"TORCHELASTIC_RUN_ID": "theirs", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"},
            "torchrun would start a dead worker again, which the others do not wait for: leave out --max-restarts",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_enable_recovery": "1"}, ""),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "mpirun would end all ranks when one dies: give mpirun --enable-recovery, which Open MPI has",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ""),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, ""),
    ],
)
def test_an_engine_that_would_end_survivors_is_refused(
    engine: dict[str, str], message: str, set_environment: Callable[..., None]
) -> None:
    set_environment(**engine)
    assert ends_survivors() == message


def test_the_programs_themselves_are_no_code_of_a_user() -> None:
    """Every error passes through src/train.py, so its line would tell nothing."""
    frames = [
        f'  File "{ROOT / path}", line 7, in train\n' for path in ("src/train.py", "src/lockstep/commands/cli.py")
    ]
    assert user_code_location("".join(frames)) == ""
    trace = "".join([*frames, '  File "/project/nets.py", line 3, in net\n'])
    assert user_code_location(trace) == "/project/nets.py:3 in net; "
    beside = f'  File "{ROOT / "src/nets.py"}", line 5, in net\n'  # a user's module beside train.py
    assert user_code_location("".join([*frames, beside])) == f"{os.path.relpath(ROOT / 'src/nets.py')}:5 in net; "


@pytest.mark.usefixtures("processes")
def test_a_failure_before_the_run_has_a_log_reports_how_to_see_the_traceback() -> None:
    with pytest.raises(WorkerFailed) as failed:
        launch(forked_without_log, layout=ALONE)
    assert str(failed.value).endswith(" in forked_without_log; HYDRA_FULL_ERROR=1 shows the traceback)")


def forked_without_log() -> None:
    logging.root.handlers = []  # pytest's own
    raise KeyError("x")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("def make(\n", r"SyntaxError: .* \(.*broken_module\.py:1; HYDRA_FULL_ERROR=1 shows the traceback\)"),
        ("\nnames\n", r"NameError: .* \(.*broken_module\.py:2 in <module>; HYDRA_FULL.*"),
        ("def make():\n    {}['key']", r"KeyError: 'key' \(.*broken_module\.py:2 in make; HYDRA_FULL.*"),
        ("def make():\n    int('seven')", r"x: invalid literal for int.* \(.*broken_module\.py:2 in make\)"),
        (
            "def make():\n    len(7)",
            r"x: make\(\): object of type 'int' has no len\(\) \(.*broken_module\.py:2 in make\)",
        ),
        ("def make():\n    open('nothing')", r"nothing: No such file or directory \(.*broken_module\.py:2 in make\)"),
    ],
)
def test_an_error_in_a_users_code_before_the_run_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, line: str
) -> None:
    (tmp_path / "broken_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_module", raising=False)
    monkeypatch.setattr(logging.root, "handlers", [])
    with pytest.raises(Exception) as error:  # noqa: PT011  of any kind
        instantiate("x", {"_target_": "broken_module.make"})
    assert re.fullmatch(line, error_line(error.value)), error_line(error.value)


def test_a_traceback_is_that_of_the_worker_alone(capsys: pytest.CaptureFixture[str]) -> None:
    failed = WorkerFailed("rank 0 failed")
    failed.add_note("to continue: ...")
    print_traceback(failed)
    assert "WorkerFailed: rank 0 failed" in capsys.readouterr().err, "without a worker's, the error's"
    failed.add_note("Traceback (most recent call last):\n  in training_step\nValueError: wrong\n")
    print_traceback(failed)
    assert capsys.readouterr().err == "Traceback (most recent call last):\n  in training_step\nValueError: wrong\n"
