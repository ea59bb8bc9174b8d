"""Logging: rank zero writes to the console and to `train.log`, every other rank to `rank_<n>.log`."""

import logging
import re
import threading
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
    ("lightning", "` across ranks is zero. Please make sure this was your intention."),  # there is no validation set
    ("lightning", "You're resuming from a checkpoint that ended before the epoch ended"),  # the order has no state
    ("torch", "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead"),
    ("torch", "torch.distributed.nn.functional.all_gather is deprecated"),
)


def log_file_name(rank: int) -> str:
    """Return the name of a rank's log in the run folder."""
    return f"rank_{rank}.log" if rank else "train.log"


def log_file() -> Path | None:
    """Return this process's log in the run folder; None before `configure_logging`."""
    files = [handler for handler in logging.root.handlers if isinstance(handler, logging.FileHandler)]
    return Path(files[0].baseFilename) if files else None


def configure_logging(folder: Path, rank: int) -> None:
    """Send this process's messages to its log in the run folder, and Lockstep's own on rank zero to the console too.

    Warnings and Lightning's messages go to the file only, without those in HARMLESS. Lockstep itself prints what a user
    must read.
    """
    path = (folder / log_file_name(rank)).absolute()
    if environment().scratch:  # the parent finds the log by this link, see failures.end_hanging_worker
        with suppress(FileExistsError):
            Path(environment().scratch, f"log_{rank}").symlink_to(path)
    file = logging.FileHandler(path, encoding="utf-8", delay=rank > 0)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    file.addFilter(lambda record: record.name.startswith("lockstep") or not _is_harmless(record.getMessage()))
    for earlier in logging.root.handlers:
        if type(earlier) is logging.FileHandler:  # of this worker in an earlier group of a run that survives
            earlier.close()
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
    """Write the error of a thread to the log, and print it to the console too unless it is an OSError.

    TensorBoard's writer thread raises an OSError on a full disk. The next call of the writer raises it again.
    """
    if args.exc_type is SystemExit:  # the thread has ended on purpose
        return
    logging.root.error("a thread failed", exc_info=args.exc_value)
    if not issubclass(args.exc_type, OSError):
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
