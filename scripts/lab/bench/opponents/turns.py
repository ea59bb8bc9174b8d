"""Let programs that are compared take turns: one block of steps at a time.

A player is any training program that calls `begin()` before its loop and `step(parameters)` after each optimizer step.
It reads TURNS, `<fd of a connection>,<steps of a block>,<first that don't count>`. Each message starts a block. The
player answers with the seconds of the block's steps, and sleeps until the next message. Without TURNS both calls do
nothing. The clock waits for the GPU where the counted steps begin and end. WEIGHTS, `<step>,<path>`, is the path for
the parameters after that many steps, which benchmark.py compares. CLOCK is the function of `time` that measures:
`perf_counter` by default; `process_time` is the processor time of the process alone.
"""

import os
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any


class Turns:
    """A player's end of the connection."""

    def __init__(self) -> None:
        self.number, self.steps, self.skip = map(int, os.environ.get("TURNS", "0,0,0").split(","))
        self.connection: Connection[Any, Any] | None = None
        at, _, self.path = os.environ.get("WEIGHTS", "0,").partition(",")
        self.save_at, self.made = int(at), 0
        self.clock = getattr(time, os.environ.get("CLOCK", "perf_counter"))
        self.seconds: list[float] = []
        self.started = 0.0

    def begin(self) -> None:
        """Report that the player is ready, and wait for the first turn."""
        if self.steps:
            self.connection = Connection(self.number)
            self._answer_and_wait(self.connection)

    def step(self, parameters: Iterable[Any]) -> None:
        """Count a step. At the end of a block, answer and wait for the next turn."""
        if not self.connection:
            return
        if len(self.seconds) + 1 in (self.skip, self.steps):
            wait_for_gpu()
        self.seconds.append(self.clock() - self.started)
        self.made += 1
        if self.made == self.save_at:
            import torch

            torch.save([parameter.detach().cpu() for parameter in parameters], self.path)
        if len(self.seconds) == self.steps:
            self._answer_and_wait(self.connection)
        self.started = self.clock()

    def _answer_and_wait(self, connection: "Connection[Any, Any]") -> None:
        connection.send(self.seconds)
        self.seconds = []
        try:
            connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # benchmark.py closed the connection
        self.started = self.clock()


def wait_for_gpu() -> None:
    """Wait until the GPU has completed this process's work. Do nothing if the process uses no GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def callback(meets: bool = False) -> Any:
    """Return a callback that makes a Lightning run a player. Rank zero waits for turns, the others for rank zero.

    Args:
        meets: add a barrier after each step.
    """
    from lightning.pytorch.callbacks import LambdaCallback

    turns = Turns()

    def end_step(trainer: Any, module: Any, *_: Any) -> None:
        if meets:
            trainer.strategy.barrier()
        if trainer.is_global_zero:
            turns.step(module.parameters())

    return LambdaCallback(
        on_train_start=lambda trainer, module: turns.begin() if trainer.is_global_zero else None,
        on_train_batch_end=end_step,
    )
