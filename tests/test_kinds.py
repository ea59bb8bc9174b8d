"""The kind of a test follows from what it uses, and one test does not change the next."""

import logging
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kinds
import numpy as np
import pytest
import torch
from conftest import Program

STARTS = {
    "subprocess": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "os.fork": lambda: os.fork() or os._exit(0),
    "os.posix_spawn": lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}),
    "os.system": lambda: os.system("true"),
    "multiprocessing fork": lambda: multiprocessing.get_context("fork").Process(target=print).start(),
    "multiprocessing spawn": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "a fork of the server": lambda: Program(Path("outputs")).start(),
    "a server": lambda: socket.create_server(("127.0.0.1", 0)),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_unit_that_starts_a_process_or_a_server_fails(start: Callable[[], object]) -> None:
    fixture = "servers" if start is STARTS["a server"] else "processes"
    with pytest.raises(kinds.NotQuick, match=f"must use the fixture `{fixture}`"):
        start()
    assert len(kinds._refused or ()) == 1, "this test would fail, had it caught the exception"
    kinds._refused = []


@pytest.mark.parametrize(
    ("fixtures", "fails"), [((), True), (("ranks",), True), (("processes",), False), (("servers",), False)]
)
def test_a_unit_that_hides_the_refusal_fails_too(fixtures: tuple[str, ...], fails: bool) -> None:
    item: Any = SimpleNamespace(path=Path(__file__), fixturenames=fixtures)
    before = kinds._refused
    try:
        refused = pytest.raises(kinds.NotQuick) if fails else nullcontext()
        with refused, kinds.no_process(item), suppress(kinds.NotQuick):
            sys.audit("lockstep.start")
    finally:
        kinds._refused = before


@pytest.mark.parametrize(
    ("path", "fixtures", "kind"),
    [
        ("step/test_loop.py", ["tmp_path"], "unit"),
        ("step/test_loop.py", ["ranks", "tmp_path"], "ranks"),
        ("step/test_loop.py", ["tmp_path", "processes"], "run"),
        ("step/test_loop.py", ["ranks", "processes"], "run"),
        ("step/test_loop.py", ["servers"], "run"),
        ("launch/test_slurm.py", ["processes", "engine"], "engine"),
        ("engines/test_mpi.py", [], "engine"),
        ("lab/test_storm.py", ["processes"], "lab"),
    ],
)
def test_the_kind_follows_from_folder_and_fixtures(path: str, fixtures: list[str], kind: str) -> None:
    item: Any = SimpleNamespace(path=kinds.TESTS / path, fixturenames=fixtures)
    assert kinds.kind_of(item) == kind


def test_each_test_has_one_kind(request: pytest.FixtureRequest) -> None:
    named = {"unit", "ranks", "run", "engine", "lab"}
    assert [mark.name for mark in request.node.iter_markers() if mark.name in named] == ["unit"]


def measured() -> dict[str, Any]:
    """Return what tests have been seen to change of their process."""
    subnormal = float(torch.tensor([1e-39]).mul(1.0)[0])
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "folder": os.getcwd(),
        "arguments": sys.argv,
        "threads": torch.get_num_threads(),
        "subnormal": subnormal,
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
        "warnings": list(warnings.filters),
        "level": logging.getLogger("lockstep").level,
    }


def test_what_a_test_changes_is_put_back(tmp_path: Path) -> None:
    before = measured()
    put_back = [*kinds._states()]
    os.environ["LEFT"] = "1"
    os.chdir(tmp_path)
    sys.argv = ["other"]
    torch.set_num_threads(3)
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
    torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
    warnings.simplefilter("ignore", ResourceWarning)
    logging.getLogger("lockstep").setLevel(7)
    after = measured()
    assert [name for name in before if before[name] == after[name]] == []
    for restore in reversed(put_back):
        restore()
    assert [name for name, value in measured().items() if before[name] != value] == []
