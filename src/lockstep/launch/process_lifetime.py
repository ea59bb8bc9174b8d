"""What surrounds a run's processes: a fast start, forks that cannot hang, a temporary folder, and a fast end.

Garbage collection during imports and the teardown at exit are left out. Measured on a run of one step, in seconds of
CPU time, on a busy machine: 7.1 with Python's defaults, 6.6 without garbage collection during the imports of torch and
Lightning, 4.2 if the process also exits without teardown.
"""

import atexit
import gc
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import NoReturn, ParamSpec, TypeVar

from lockstep.errors import UserError
from lockstep.files import try_lock
from lockstep.launch.environment import external_workers
from lockstep.launch.rendezvous import leave_group

SCRATCH_PREFIX = "lockstep_"
# A socket's path has at most 107 bytes, and data loaders put sockets into subfolders.
MAX_PATH_BYTES = 107 - len("/lockstep_12345678/pymp-12345678/listener-12345678")
EXIT_SECONDS = 60.0  # for functions of `atexit`, and for a profiler to write its files
P = ParamSpec("P")
T = TypeVar("T")


def disable_garbage_collector() -> None:
    """Turn the garbage collector off until `freeze_imports`. Call it only in the command's own process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler warns about missing GPUs
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's stores warn about each peer name they can't resolve
    gc.disable()


def freeze_imports() -> None:
    """Prepare the garbage collector for forks. Call it before this process forks.

    The first call after `disable_garbage_collector` exempts all present objects from collection, here and in the forks,
    so that they share the memory of these objects (see Python's `gc.freeze`). Later calls collect what earlier workers
    left: a fork that collects torch's store would wait for a thread that it does not have.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    else:
        gc.collect()


def in_new_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls `function` in a new thread and waits for its end.

    It raises what `function` raises. A signal interrupts the wait. Use it for user code that may compute in parallel,
    in a process that forks later.

    The worker threads of an OpenMP runtime belong to the thread that started them, and end with it. A forked process
    has only the thread that forked. If that thread has computed in parallel, the fork waits for worker threads that it
    does not have. So the parent calls user code in a separate thread, and forks from its main thread, which has
    computed nothing. This works for torch, numpy and scikit-learn, and for any number of threads that user code sets.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        outcome: Future[T] = Future()

        def work() -> None:
            try:
                outcome.set_result(function(*args, **kwargs))
            except BaseException as error:  # also SystemExit, which would end the thread without a message
                outcome.set_exception(error)

        thread = threading.Thread(target=work, name=function.__name__, daemon=True)
        thread.start()
        thread.join()
        return outcome.result()

    return call


def refuse_daemon(what: str, right: str) -> None:
    """Refuse what starts processes if this process is a daemon, which must not have children.

    Args:
        what: what starts them, for the message.
        right: what to do instead.

    Raises:
        UserError: this process is a daemon.
    """
    if multiprocessing.current_process().daemon:
        raise UserError(
            f"{what} can't start processes in a daemonic process, such as one of multiprocessing.Pool: {right}, or use "
            "concurrent.futures.ProcessPoolExecutor"
        )


@contextmanager
def scratch_folder() -> Iterator[str]:
    """Create a temporary folder, yield its path, and remove it afterwards.

    It lies in the default folder for temporary files; in /tmp if that path is too long for the sockets of data loaders,
    which would hang.

    This process and its forks hold a lock on the folder. A folder without a lock was left by processes that were
    killed. The next run on the machine removes it: at its start, or at its end if the processes still existed then.
    """
    try:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > MAX_PATH_BYTES:
            parent = "/tmp"
        _remove_abandoned(parent)
        folder = tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(
            f"{where}no folder for temporary files ({error.strerror}): let TMPDIR name one that can be written"
        ) from error
    with open(Path(folder, "lock"), "wb") as lock_file:
        try:
            try_lock(lock_file.fileno())
        except OSError as error:  # a file system without locks, where later runs remove no folder
            why = f"can't be locked ({error.strerror})"
            print(f"{folder}: {why}: a killed run leaves it behind; TMPDIR may name another folder", file=sys.stderr)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_abandoned(parent)


def _remove_abandoned(parent: str) -> None:
    """Remove the folders in `parent` that killed processes left behind."""
    for lock in Path(parent).glob(f"{SCRATCH_PREFIX}*/lock"):
        with suppress(OSError), open(lock, "rb") as file:  # it may be removed by now, or belong to another user
            young = time.time() - os.fstat(file.fileno()).st_mtime < 1  # its owner may not have locked it yet
            if not young and try_lock(file.fileno()):
                shutil.rmtree(lock.parent, ignore_errors=True)


def exit_process(code: int) -> NoReturn:
    """Flush all output and exit with `code`, without Python's teardown.

    Functions of `atexit` are called. If another program runs this one (a profiler, coverage), it gets a SystemExit, so
    that it writes its files, and Python calls `_end` after it. Neither may hang the exit.

    An external worker leaves the process group first, unless it failed: otherwise other workers would report a lost
    connection before this one has reported its reason.
    """
    if external_workers() and not code:
        leave_group()
    for child in multiprocessing.active_children():  # the pool of a launcher (joblib), which would wait for more jobs
        child.terminate()
    watchdog = threading.Timer(EXIT_SECONDS, _leave, [code])
    watchdog.daemon = True
    watchdog.start()
    if _runs_in_another_program():
        atexit.register(_end, code)
        sys.exit(code)
    _end(code)


def _end(code: int) -> NoReturn:
    """Call the functions of `atexit` and exit with `code`, which a profiler would replace by 0."""
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    _leave(code)


def _leave(code: int) -> NoReturn:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the reader has exited, or the stream is closed or None
            stream.flush()
    os._exit(code)


def _runs_in_another_program() -> bool:
    """Check whether another program runs this one, as `python -m cProfile` and `coverage run` do, or observes it."""
    frame: FrameType | None = sys._getframe()
    programs = 0
    while frame is not None:
        programs += frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
        frame = frame.f_back
    return programs > 1 or sys.getprofile() is not None or sys.gettrace() is not None
