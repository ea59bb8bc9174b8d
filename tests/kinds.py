"""The kind of each test, by what it uses, and what keeps one test from changing another.

| kind     | what its tests do                                                       | how it is recognised        |
|----------|-------------------------------------------------------------------------|-----------------------------|
| `unit`   | neither a process nor a process group nor a server                      | none of the below           |
| `ranks`  | several ranks as threads of this process                                | the fixture `ranks`         |
| `run`    | start processes or servers, or compute for seconds in this process      | see `FIXTURES`              |
| `engine` | start ranks as torchrun, SLURM, MPI or Ray do                           | `tests/engines/`, `engine`  |
| `lab`    | measure                                                                 | the folder `tests/lab/`     |

Whoever starts a process asks for the fixture `processes`, by way of `run_train` say, and whoever listens on a port for
`servers`. A unit that does either fails.
"""

import atexit
import gc
import logging
import multiprocessing.util
import os
import random
import signal
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import once
import pytest
from hydra.core.global_hydra import GlobalHydra

from lockstep.launch.environment import environment
from lockstep.project import VARIABLE, project

TESTS = Path(__file__).resolve().parent
FOLDERS = {"engines": "engine", "lab": "lab"}
FIXTURES = {"engine": "engine", "processes": "run", "servers": "run", "whole_run": "run", "ranks": "ranks"}
QUICK = ("unit", "ranks")
STARTS = {
    *("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "os.spawn"),
    "lockstep.start",  # of ours, for what raises none of these: see `forks.Fork` and below
}
LISTENS = "lockstep.listen"  # of ours: to bind is not enough, urllib3 does so to see whether there is IPv6


class NotQuick(AssertionError):
    """A test of kind unit or ranks starts a process or a server."""


def kind_of(item: pytest.Item) -> str:
    """Return the kind of a test, from its folder and its fixtures."""
    folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    fixtures = getattr(item, "fixturenames", ())
    if folder in FOLDERS:
        return FOLDERS[folder]
    return next((kind for name, kind in FIXTURES.items() if name in fixtures), "unit")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with its kind, before `-m` selects."""
    item.add_marker(kind_of(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Put files with whole runs first, so that at the end no worker waits for another's.

    They keep the order of their files, since tests of one file share runs. Only units are put in a random order.
    """
    runs = [item for item in items if kind_of(item) not in QUICK]
    yield
    units = [item for item in items if kind_of(item) in QUICK]
    left = {*items}
    items[:] = [*(item for item in runs if item in left), *units]


def pytest_collection_finish() -> None:
    """Let tests compute with one thread: they share the cores, and small tensors gain nothing from threads.

    The process that only distributes tests does not get here, so it need not import torch. Importing it in a test would
    look like a process that the test starts: it asks the system for its libraries.
    """
    import torch

    torch.set_num_threads(1)
    os.environ.pop(VARIABLE, None)  # programs that tests import set it for their own processes
    gc.collect()
    gc.freeze()  # what has been imported stays: it need not be searched for garbage again and again


# --- what takes long, and is the same each time, is done once or not at all ---


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main() -> Generator[None, Any, Any]:
    """End pytest's own process when all is done: an interpreter with all that was imported takes seconds to end.

    The function is registered before the first test, so it is called after whatever a test registers.
    """
    codes: list[int] = []
    if "PYTEST_XDIST_WORKER" in os.environ or "pytest" in Path(sys.argv[0]).parts[-2:]:  # else a program has called it
        atexit.register(end_at_once, codes)
    codes.append(code := (yield))
    return code


def end_at_once(codes: list[int]) -> None:
    """End with the code that pytest has returned; without one, it has failed, and the interpreter says so."""
    if codes:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined] # it was registered before
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(codes[0])


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Let a worker send the text of a warning, not its class.

    The process that distributes tests would import the class, and with one of Lightning's all of Lightning and torch.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        has_these = ("builtins", "pytest", "_pytest.warning_types")
        known = (kind for kind in warning_message.category.__mro__ if kind.__module__ in has_these)
        warning_message.message, warning_message.category = str(warning_message.message), next(known)


gc.set_threshold(1_000, 50, 50)  # else the search for garbage among all that is kept takes a twentieth of the time
# torchmetrics imports it, a second long, only to give it this name. Nobody here uses either.
sys.modules.setdefault("scipy.signal", types.ModuleType("scipy.signal")).__dict__.setdefault("hamming", None)
once.remember()


# --- no unit starts a process or a server ---

_refused: list[str] | None = None  # why the unit that runs now must fail; None: it is no unit


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _refused is not None and (event in STARTS or event == LISTENS):
        what, fixture = ("listens on a port", "servers") if event == LISTENS else ("starts a process", "processes")
        _refused.append(f"this test {what} ({event} {arguments[:2]!r:.200}): it must use the fixture `{fixture}`")
        raise NotQuick(_refused[-1])


def _spawn(*arguments: Any) -> int:
    sys.audit("lockstep.start", *arguments[:2])
    return SPAWN(*arguments)


def _listen(self: socket.socket, *arguments: Any) -> None:
    sys.audit(LISTENS, self)
    LISTEN(self, *arguments)


sys.addaudithook(_audit)
LISTEN = socket.socket.listen
socket.socket.listen = _listen  # type: ignore[assignment,method-assign]
SPAWN = multiprocessing.util.spawnv_passfds
multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[assignment] # it raises no event


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Fail a test of kind unit or ranks whose fixtures start a process or a server."""
    with no_process(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test of kind unit or ranks that starts a process or a server."""
    with no_process(item):
        yield


@contextmanager
def no_process(item: pytest.Item) -> Iterator[None]:
    """Refuse both, if the kind of a test is unit or ranks. It fails though it may have caught the exception."""
    global _refused
    _refused = [] if kind_of(item) in QUICK else None  # `_audit` appends
    try:
        yield
        if _refused:
            raise NotQuick(_refused[0])
    finally:
        _refused = None


@pytest.fixture(scope="session")
def engine() -> None:
    """Make a test one of kind `engine`."""


@pytest.fixture(scope="session")
def processes() -> None:
    """Make a test one of kind `run`: it may start processes."""


@pytest.fixture(scope="session")
def servers() -> None:
    """Make a test one of kind `run`: it may listen on a port."""


@pytest.fixture(scope="session")
def whole_run() -> None:
    """Make a test one of kind `run`: it takes seconds, though it starts no process."""


# --- what a test changes of this process is put back ---


@pytest.fixture(autouse=True)
def custom_process_state() -> Iterator[None]:
    """Put back what a test changes of this process: environment, folder, threads, numbers, random state, messages."""
    environment.cache_clear()  # what a test sets in the environment is read in that test
    project.cache_clear()
    put_back = [*_states()]
    yield
    for restore in reversed(put_back):
        restore()
    environment.cache_clear()
    project.cache_clear()


def _states() -> Iterator[Callable[[], object]]:
    """Yield functions, each of which puts one thing back to what it is now."""
    import numpy as np
    import torch

    variables, folder, arguments, path = dict(os.environ), os.getcwd(), sys.argv, list(sys.path)

    def restore_environment() -> None:
        wanted = variables | {"PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", "")}
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        os.environ.update(wanted)

    yield restore_environment
    yield lambda: os.chdir(folder)
    yield lambda: setattr(sys, "argv", arguments)
    yield lambda: sys.path.__setitem__(slice(None), path)
    yield GlobalHydra.instance().clear

    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    mode, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    precision, gradients = torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    cudnn, generator = torch.backends.cudnn, torch.get_rng_state()
    flags = (cudnn.benchmark, cudnn.deterministic)
    yield lambda: torch.set_num_threads(threads)
    yield lambda: torch.set_flush_denormal(False)
    yield lambda: torch.set_default_dtype(dtype)
    yield lambda: torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    yield lambda: torch.set_float32_matmul_precision(precision)
    yield lambda: torch.set_grad_enabled(gradients)
    yield lambda: setattr(cudnn, "benchmark", flags[0])
    yield lambda: setattr(cudnn, "deterministic", flags[1])
    yield lambda: torch.set_rng_state(generator)

    numbers, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    yield lambda: random.setstate(numbers)
    yield lambda: np.random.set_state(legacy)  # noqa: NPY002

    filters, hook, thread_hook = list(warnings.filters), sys.excepthook, threading.excepthook
    yield lambda: warnings.filters.__setitem__(slice(None), filters)  # type: ignore[index]
    yield lambda: setattr(sys, "excepthook", hook)
    yield lambda: setattr(threading, "excepthook", thread_hook)
    loggers = [logging.getLogger(), *(x for x in logging.root.manager.loggerDict.values() if type(x) is logging.Logger)]
    levels = [(x, x.level, x.propagate, x.disabled, list(x.handlers)) for x in loggers]
    disabled = logging.root.manager.disable

    def restore_logging() -> None:
        if logging.root.manager.disable != disabled:
            logging.disable(disabled)
        for logger, level, propagate, off, handlers in levels:
            if logger.level != level:
                logger.setLevel(level)
            logger.propagate, logger.disabled = propagate, off
            logger.handlers[:] = handlers

    yield restore_logging
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }

    def restore_signals() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)

    yield restore_signals
