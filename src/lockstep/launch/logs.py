"""Logging: rank zero writes to the console and to `train.log`, every other rank to `rank_<n>.log`.

Functions at the end find the reason of a failure, in one line, in tracebacks and stacks.
"""

import faulthandler
import logging
import os
import re
import signal
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep.launch.signals import Interrupted

LOG = logging.getLogger("lockstep")
# Library and unique text of messages that are not logged, because Lockstep does on purpose what they warn about, or
# because a user can't change it. All other messages are logged.
HARMLESS = (
    ("lightning", "The `srun` command is available on your system but is not used."),
    ("lightning", "`isinstance(treespec, LeafSpec)` is deprecated"),
    ("lightning", "is smaller than the logging interval Trainer(log_every_n_steps="),  # Meter logs each epoch's end
    ("lightning", "does not have many workers which may be a bottleneck"),  # data sets in memory need no loader process
    ("lightning", "The following callbacks returned in `LightningModule.configure_callbacks` will override"),
    ("lightning", "TPU available: False, using: 0 TPU cores"),
    ("lightning", "For seamless cloud logging and experiment tracking, try installing [litlogger]"),
    ("torch", "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead"),
    ("torch", "torch.distributed.nn.functional.all_gather is deprecated"),
)


def log_file_name(rank: int) -> str:
    """Return the name of a rank's log in the run folder."""
    return f"rank_{rank}.log" if rank else "train.log"


def configure_logging(folder: Path, rank: int) -> None:
    """Send this process's messages to its log in the run folder, and Lockstep's own on rank zero to the console too.

    Warnings and Lightning's messages go to the file only, without those in HARMLESS. Lockstep itself prints what a user
    must read.
    """
    path = (folder / log_file_name(rank)).absolute()
    if environment().scratch:  # the parent opens the log through this link
        with suppress(FileExistsError):
            Path(environment().scratch, f"log_{rank}").symlink_to(path)
    file = logging.FileHandler(path, encoding="utf-8", delay=rank > 0)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    file.addFilter(lambda record: record.name.startswith("lockstep") or not _is_harmless(record.getMessage()))
    logging.root.handlers = [file]
    logging.root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is reported once, by the write that fails the run
    warnings.simplefilter("default")
    threading.excepthook = _thread_failed
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "pytorch_lightning"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter("%(message)s"))
    LOG.handlers = [console] if rank == 0 else []
    LOG.setLevel(logging.INFO)


def hide_harmless_warnings() -> None:
    """Hide the warnings in HARMLESS. Use it in a program that has no log."""
    for _, text in HARMLESS:
        warnings.filterwarnings("ignore", message=f".*{re.escape(text)}")


def _is_harmless(message: str) -> bool:
    return any(text in message for _, text in HARMLESS)


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    """Log the error of a thread; print it to the console too unless it is an OSError.

    TensorBoard's writer thread raises an OSError on a full disk. The next call of the writer raises it again.
    """
    if isinstance(args.exc_value, OSError):
        logging.root.error("a thread failed", exc_info=args.exc_value)
    else:
        threading.__excepthook__(args)


@contextmanager
def log_failure() -> Iterator[None]:
    """Write an unexpected error with its traceback to the log, then raise it again."""
    try:
        yield
    except (UserError, Interrupted):
        raise
    except BaseException as error:
        if logging.root.handlers:  # `configure_logging` was called
            logging.root.error("the run failed", exc_info=error)
        raise


# --- the stack of a worker that hangs ---


@contextmanager
def stack_on_demand(rank: int) -> Iterator[None]:
    """On SIGQUIT inside the `with` block, write the stacks of all threads to a file that the parent reads."""
    with open(Path(environment().scratch, f"stack_{rank}"), "w") as file:
        faulthandler.register(signal.SIGQUIT, file)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGQUIT)


def read_stack(scratch: str, rank: int, seconds: float) -> str:
    """Wait for the stack that a worker writes on SIGQUIT. Append it to the worker's log and return it.

    Args:
        scratch: the run's folder for temporary files.
        rank: the worker's rank.
        seconds: the time to wait; then return "".
    """
    file, until = Path(scratch, f"stack_{rank}"), time.monotonic() + seconds
    stack = ""
    with suppress(OSError):
        while not (stack := file.read_text(errors="replace")) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2)  # wait until the file is complete
        stack = file.read_text(errors="replace")
        with open(Path(scratch, f"log_{rank}"), "a", encoding="utf-8") as log:
            log.write(f"the worker hung and was killed; its stack:\n{stack}\n")
    return stack


# --- the reason of a failure in one line ---


def first_line(message: str) -> str:
    """Return the first line of a message.

    If torch has re-raised an error of another process or thread, the message contains a whole traceback. Then return
    the traceback's line with the exception.
    """
    if "\nOriginal Traceback (most recent call last):" in message:
        end = message.rpartition('\n  File "')[2].splitlines()[1:]
        raised_line = next((line for line in end if line and not line.startswith(" ")), message)
        message = re.sub(r"^[\w.]+\.(?=\w+: )", "", raised_line)
    return (message.strip().splitlines() or ["no reason given"])[0]


def user_code_location(trace: str) -> str:
    """Return the last frame of a traceback in the user's own code as `<file>:<line> in <function>; `, or ""."""
    frames = re.findall(r'^ *(?:\| +)?File "(.+)", line (\d+), in (.+)$', trace, re.MULTILINE)
    mine = [frame for frame in frames if _is_user_code(frame[0])]
    return f"{_format_frame(*mine[-1])}; " if mine else ""


def last_frame(stack: str) -> str:
    """Return the innermost frame of a stack that faulthandler wrote as `at <file>:<line> in <function>`.

    Prefer frames of the user's own code. Return "" if there is no stack.
    """
    threads = re.split(r"^.*\(most recent call first\):$", stack, flags=re.MULTILINE)[1:]  # the main thread is last
    trimmed = [re.split(r'^ *File ".+/launch/parent.py"', thread, flags=re.MULTILINE)[0] for thread in threads]
    calls = [re.findall(r'^ *File "(.+)", line (\d+) in (.+)$', thread, re.MULTILINE) for thread in trimmed]
    mine = [call for thread in calls for call in thread if _is_user_code(call[0])]
    latest = mine or (calls[-1] if calls else [])
    return f"at {_format_frame(*latest[0])}" if latest else ""


def _is_user_code(file: str) -> bool:
    """Check whether a file is neither Lockstep's, nor Python's, nor an installed package's."""
    others = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")
    return not file.startswith(others) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _format_frame(file: str, line: str, function: str) -> str:
    relative = os.path.relpath(file)
    return f"{file if relative.startswith('..') else relative}:{line} in {function}"
