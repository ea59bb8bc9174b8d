"""Exit with one line when a signal arrives during the imports.

The imports take a second or more. Without these handlers, Python would print a traceback on Ctrl-C. A signal that is
ignored when the program starts stays ignored: SIGHUP under nohup, SIGINT in background jobs of a shell.
"""

import os
import signal
from types import FrameType

from lockstep import standard_streams

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def install() -> None:
    """Install the handlers, and make the standard streams safe. A command calls this before its imports."""
    standard_streams.protect()
    for number in NUMBERS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_now)


def exit_now(signum: int, frame: FrameType | None) -> None:
    """Handle a signal: exit at once with 130 (SIGINT) or 143. There is nothing to save yet."""
    try:
        os.write(2, f"interrupted by {signal.Signals(signum).name}\n".encode())
    finally:
        os._exit(130 if signum == signal.SIGINT else 143)


def restore() -> None:
    """Let signals do what they do in any other Python program: SIGINT raises KeyboardInterrupt, the others end it."""
    for number in NUMBERS:
        if signal.getsignal(number) is exit_now:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
