"""Where messages go: rank zero to the console and `train.log`, every other rank to `rank_<n>.log`."""

import faulthandler
import logging
import re
import signal
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
# Messages of libraries about what Lockstep does on purpose, or what nobody here can change: the library, and a part of
# the text that nothing else has. They are written nowhere; everything else is.
HARMLESS = (
    ("lightning", "The `srun` command is available on your system but is not used."),
    ("lightning", "`isinstance(treespec, LeafSpec)` is deprecated"),
    ("lightning", "is smaller than the logging interval Trainer(log_every_n_steps="),  # Meter measures an epoch's end
    ("lightning", "does not have many workers which may be a bottleneck"),  # sets in memory need none
    ("lightning", "The following callbacks returned in `LightningModule.configure_callbacks` will override"),
    ("lightning", "TPU available: False, using: 0 TPU cores"),
    ("lightning", "For seamless cloud logging and experiment tracking, try installing [litlogger]"),
    ("torch", "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead"),
    ("torch", "torch.distributed.nn.functional.all_gather is deprecated"),
)


def log_file_name(rank: int) -> str:
    """The name of a rank's log in the run folder."""
    return f"rank_{rank}.log" if rank else "train.log"


def configure_logging(folder: Path, rank: int) -> None:
    """Sends this process's messages to its file in the run folder, and rank zero's own to the console too.

    Warnings and Lightning's notices go to the file only, without HARMLESS: what a user must know, Lockstep says itself.
    """
    path = (folder / log_file_name(rank)).absolute()
    if environment().scratch:  # the parent finds the log there
        with suppress(FileExistsError):
            Path(environment().scratch, f"log_{rank}").symlink_to(path)
    file = logging.FileHandler(path, encoding="utf-8", delay=rank > 0)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    file.addFilter(lambda record: record.name.startswith("lockstep") or not _is_harmless(record.getMessage()))
    logging.root.handlers = [file]
    logging.root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is told once, by who can't go on, not by each message
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
    """Keeps the warnings of HARMLESS off the console of a program that has no log."""
    for _, text in HARMLESS:
        warnings.filterwarnings("ignore", message=f".*{re.escape(text)}")


def _is_harmless(message: str) -> bool:
    return any(text in message for _, text in HARMLESS)


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer raises again where it is called next: its thread need not say so on the console."""
    if isinstance(args.exc_value, OSError):
        logging.root.error("a thread failed", exc_info=args.exc_value)
    else:
        threading.__excepthook__(args)


@contextmanager
def log_failure() -> Iterator[None]:
    """What ends a run by surprise stands in its log, with the whole traceback."""
    try:
        yield
    except (UserError, Interrupted):
        raise
    except BaseException as error:
        if logging.root.handlers:  # see configure_logging
            logging.root.error("the run failed", exc_info=error)
        raise


# --- the stack of a worker that hangs ---


@contextmanager
def stack_on_demand(rank: int) -> Iterator[None]:
    """While it lasts, SIGQUIT makes this worker write where all its threads are into a file that its parent reads."""
    with open(Path(environment().scratch, f"stack_{rank}"), "w") as file:
        faulthandler.register(signal.SIGQUIT, file)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGQUIT)


def read_stack(scratch: str, rank: int, seconds: float) -> str:
    """Return the stack that a worker writes on demand, as soon as it is there, and append it to the worker's log.

    Args:
        scratch: the folder of what the run's processes keep for a moment.
        seconds: how long to wait.
    """
    file, until = Path(scratch, f"stack_{rank}"), time.monotonic() + seconds
    stack = ""
    with suppress(OSError):
        while not (stack := file.read_text(errors="replace")) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2)  # until all of it is there
        stack = file.read_text(errors="replace")
        with open(Path(scratch, f"log_{rank}"), "a", encoding="utf-8") as log:
            log.write(f"the worker hung, and was ended; its stack:\n{stack}\n")
    return stack
