"""What a program imports first: until it runs, a signal ends it at once, in one line, whatever it is importing.

The imports take a second or more, in which Python would answer Ctrl-C with a traceback. SIGHUP stays ignored where it
was when the program started (nohup), as SIGINT does in a shell's background jobs.
"""

import os
import signal
from types import FrameType


def exit_now(signum: int, frame: FrameType | None) -> None:
    """End this process as its exit codes say. A signal's handler: nothing is worth saving yet."""
    try:
        os.write(2, f"interrupted by {signal.Signals(signum).name}\n".encode())
    finally:
        os._exit(130 if signum == signal.SIGINT else 143)


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(number, exit_now)
