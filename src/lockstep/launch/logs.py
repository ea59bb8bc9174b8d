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
# Messages that are not logged: the library, and a text that no other message has. Lockstep does on purpose what they
# warn about, or a user can't change it.
HARMLESS = (
    ("lightning", "The `srun` command is available on your system but is not used."),
    ("lightning", "`isinstance(treespec, LeafSpec)` is deprecated"),
    ("lightning", "is smaller than the logging interval Trainer(log_every_n_steps="),  # Meter logs at each epoch's end
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
    if environment().scratch:  # the parent finds the log by this link, see `read_stack`
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
    threading.excepthook = _log_thread_failure
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


def _log_thread_failure(args: threading.ExceptHookArgs) -> None:
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
    """On SIGQUIT inside the `with` block, write the stacks of all threads to a file. `read_stack` reads it."""
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
        seconds: the time to wait. Return "" if there is no stack then.
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
    the line of the traceback that names the exception.
    """
    if "\nOriginal Traceback (most recent call last):" in message:
        after_last_frame = message.rpartition('\n  File "')[2].splitlines()[1:]
        raised_line = next((line for line in after_last_frame if line and not line.startswith(" ")), message)
        message = re.sub(r"^[\w.]+\.(?=\w+: )", "", raised_line)
    return (message.strip().splitlines() or ["no reason given"])[0]


def user_code_location(trace: str) -> str:
    """Return the last frame of a traceback in the user's own code as `<file>:<line> in <function>; `, or ""."""
    frames = re.findall(r'^ *(?:\| +)?File "(.+)", line (\d+), in (.+)$', trace, re.MULTILINE)
    user_frames = [frame for frame in frames if _is_user_code(frame[0])]
    return f"{_format_frame(*user_frames[-1])}; " if user_frames else ""


def last_frame(stack: str) -> str:
    """Return the innermost frame of a stack as `at <file>:<line> in <function>`. Return "" if there is no stack.

    Prefer the innermost frame of the user's own code. Of each thread, leave out launch/parent.py and what called it:
    that is the worker's start, where the user's program appears too.

    Args:
        stack: the text that faulthandler wrote. In it the innermost frame of a thread comes first, and the main thread
            comes last.
    """
    threads = re.split(r"^.*\(most recent call first\):$", stack, flags=re.MULTILINE)[1:]
    without_start = [re.split(r'^ *File ".+/launch/parent.py"', thread, flags=re.MULTILINE)[0] for thread in threads]
    frames = [re.findall(r'^ *File "(.+)", line (\d+) in (.+)$', thread, re.MULTILINE) for thread in without_start]
    user_frames = [frame for thread in frames for frame in thread if _is_user_code(frame[0])]
    candidates = user_frames or (frames[-1] if frames else [])
    return f"at {_format_frame(*candidates[0])}" if candidates else ""


def _is_user_code(file: str) -> bool:
    """Check whether a file is neither Lockstep's, nor Python's, nor an installed package's."""
    other_code = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")  # `<string>` is no file
    return not file.startswith(other_code) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _format_frame(file: str, line: str, function: str) -> str:
    """Return a frame as text. The path is relative to the working folder if the file lies in it."""
    relative = os.path.relpath(file)
    return f"{file if relative.startswith('..') else relative}:{line} in {function}"
