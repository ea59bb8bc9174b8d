"""How programs that are compared take turns: one machine, one minute, one block of steps at a time.

A player is any training program that calls `begin()` before its loop and `step(parameters)` after each optimizer step.
It reads TURNS, `<fd of a connection>,<steps of a block>,<first that don't count>`: a message allows it a block, and it
answers with the seconds of that block's steps. Between its turns it sleeps. Without TURNS both calls do nothing. A GPU
is waited for where the counted steps begin and where they end. WEIGHTS, `<step>,<path>`, says where the parameters
after that many steps are saved, to be compared.
"""

import os
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any


class Turns:
    """A player's side."""

    def __init__(self) -> None:
        self.number, self.steps, self.skip = map(int, os.environ.get("TURNS", "0,0,0").split(","))
        self.connection: Connection[Any, Any] | None = None
        at, _, self.path = os.environ.get("WEIGHTS", "0,").partition(",")
        self.save_at, self.made = int(at), 0
        self.seconds: list[float] = []
        self.started = 0.0

    def begin(self) -> None:
        """Ready: waits for the first turn."""
        if self.steps:
            self.connection = Connection(self.number)
            self._answer_and_wait(self.connection)

    def step(self, parameters: Iterable[Any]) -> None:
        """A step has been made; at the block's end the others have their turn."""
        if not self.connection:
            return
        if len(self.seconds) + 1 in (self.skip, self.steps):
            wait_for_gpu()
        self.seconds.append(time.perf_counter() - self.started)
        self.made += 1
        if self.made == self.save_at:
            import torch

            torch.save([parameter.detach().cpu() for parameter in parameters], self.path)
        if len(self.seconds) == self.steps:
            self._answer_and_wait(self.connection)
        self.started = time.perf_counter()

    def _answer_and_wait(self, connection: "Connection[Any, Any]") -> None:
        connection.send(self.seconds)
        self.seconds = []
        try:
            connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # the game is over
        self.started = time.perf_counter()


def wait_for_gpu() -> None:
    """Until all that this process has asked of a GPU is done; nothing where it uses none."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def callback(meets: bool = False) -> Any:
    """A training loop of Lightning's as a player; its rank zero waits for turns, the other ranks for it.

    Args:
        meets: ranks wait for each other after each step, whatever they send.
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
