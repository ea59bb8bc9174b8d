"""The plain loop's step, made by Lightning's Trainer without callbacks and loggers, or by a loop of Fabric:

    python scripts/lab/bench/opponents/lightning_loop.py --task task.pt [--fabric]

The task is that of bare_loop.py. Nothing is logged or measured, and nothing is saved.
"""

import argparse
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from bare_loop import NETWORKS, sgd
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.functional import cross_entropy
from turns import Turns


class Module(pl.LightningModule):
    """The network with the plain loop's loss and optimizer."""

    def __init__(self, task: dict[str, Any], turns: Turns) -> None:
        super().__init__()
        self.net, self.lr, self.turns = network(task), task["lr"], turns

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.net, self.lr)

    def on_train_start(self) -> None:
        self.turns.begin()

    def on_train_batch_end(self, *_: Any) -> None:
        self.turns.step(self.net.parameters())


class Batches:
    """A loader that yields the task's batches."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task

    def __len__(self) -> int:
        return len(self.task["order"])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.task["order"]:
            yield self.task["images"][index], self.task["labels"][index]


def network(task: dict[str, Any]) -> torch.nn.Module:
    """Return the task's network with its initial weights."""
    images = task["images"]
    net = NETWORKS[task["model"]](images.shape[1], images.shape[2], task["classes"])
    for parameter, initial in zip(net.parameters(), task["weights"], strict=True):
        parameter.data.copy_(initial)
    return net


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    parser.add_argument("--fabric", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    task, turns = torch.load(options.task), Turns()
    if options.fabric:
        by_fabric(task, turns)
        return
    off: dict[str, Any] = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, **off).fit(Module(task, turns), Batches(task))


def by_fabric(task: dict[str, Any], turns: Turns) -> None:
    """Train with Fabric, as its documentation shows."""
    fabric = Fabric(accelerator="cpu", devices=1)
    net: Any = network(task)
    net, optimizer = fabric.setup(net, sgd(net, task["lr"]))
    turns.begin()
    for x, y in Batches(task):
        optimizer.zero_grad()
        fabric.backward(cross_entropy(net(x), y))
        optimizer.step()
        turns.step(net.parameters())


if __name__ == "__main__":
    main()
