"""What a Python process does beside the work, and need not: collect garbage among what it imports, and take itself
apart at its end.

Measured beside `import torch, lightning`, of 4.9 s in all: the collector walks through a million objects again and
again while they are being imported, and finds nothing (0.8 s), and once more when the interpreter ends (1.2 s).
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
from typing import NoReturn


def import_quickly() -> None:
    """Switches the collector off, until `imported`. For a process that is the command's own."""
    gc.disable()


def imported() -> None:
    """After `import_quickly`: what exists by now stays. The collector leaves it alone here and in the processes forked
    from here, so that they go on sharing its memory (the recipe of Python's `gc.freeze`)."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """Ends this process with `code`: threads are waited for, exit handlers run and what was written goes out, but the
    modules are not taken apart; the kernel takes everything back at once. Ctrl-C ends it earlier only where a thread
    keeps it waiting."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Private, as is the next: nothing public ends the idle threads of executors, as the interpreter does here.
    threading._shutdown()  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler of our own would have to be registered before all others to be the last one called.
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # whoever read it is gone, or it is closed
            code = code or 120  # Python's own code for that
    os._exit(code)
