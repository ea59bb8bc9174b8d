"""Fits of a small module by our Trainer, on one device or as one rank of a group whose ranks are threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from plain import QUIET
from thread_ranks import Ranks, one_at_a_time
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from lockstep.arithmetic.layout import Layout, resolve
from lockstep.callbacks import DummyBatchOnEmptyRank
from lockstep.checkpoint.io import AtomicCheckpointIO, load
from lockstep.data import Spec, Splits, StepData
from lockstep.lightning.one_process import OneProcess
from lockstep.lightning.process_per_device import ProcessPerDevice
from lockstep.lightning.trainer import StepTrainer
from lockstep.step.batch import MicroBatch
from lockstep.step.gradients import ExactGradientSum, GradientSum
from lockstep.strategies import DP, Strategy
from lockstep.strategies.fsdp.strategy import FullySharded
from lockstep.strategies.fsdp.sums import ShardedExactGradientSum, ShardedGradientSum

FEATURES, CLASSES, SAMPLES = 4, 3, 30


class Net(pl.LightningModule):
    """What differs between layouts unless it is taken care of: BatchNorm and dropout."""

    def __init__(self, norm: bool = True, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(5)] if norm else []
        self.net = nn.Sequential(nn.Linear(FEATURES, 5), *middle, nn.Dropout(dropout), nn.Linear(5, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ThreadPlace(LightningEnvironment):
    """Gives Lightning the place of a rank, which it would read from the environment variables of the process."""

    creates_processes_externally = True

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world

    def world_size(self) -> int:
        return self.world

    def global_rank(self) -> int:
        return self.rank

    local_rank = global_rank

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...


class ThreadDDP(ProcessPerDevice):
    """Our strategy. One rank at a time computes a forward pass, since all of them draw from one random state."""

    def seed_hooks(self, *args: Any) -> None:
        with one_at_a_time:
            super().seed_hooks(*args)

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, seed: int) -> Iterator[None]:
        with one_at_a_time, super().micro_batch(micro_batch, seed):
            yield


class ThreadFSDP(ThreadDDP, FullySharded):
    """The same for fsdp, and for backward passes. Blocks are gathered meanwhile, so a rank takes turns."""

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        with one_at_a_time, super().backward_pass():
            yield


class Numbers(TensorDataset):
    """Samples that are always the same. Else each fetch would seed the random state that all ranks share."""

    uses_random_numbers = False


def splits(train: int = SAMPLES, evaluated: int = SAMPLES) -> Splits:
    """Return data whose samples are the first ones of the same set."""
    numbers = torch.Generator().manual_seed(0)
    dataset = Numbers(torch.randn(SAMPLES, FEATURES, generator=numbers), torch.arange(SAMPLES) % CLASSES)
    validation_part = Subset(dataset, range(evaluated))
    return Splits(Subset(dataset, range(train)), validation_part, validation_part, Spec(1, 2, tuple("abc")), "")


def layout_of(world: int, exact: bool = False, batch_size: int = 12, pieces: int = 6, **options: Any) -> Layout:
    """Return the layout of some ranks, of a single device, or with `strategy="dp"` of a process with some devices."""
    strategy = options.pop("strategy", "ddp" if world > 1 else "single")
    options |= {"weights": "sharded"} if strategy == "fsdp" else {"one_process": strategy == "dp"}
    return resolve(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        num_nodes=1,
        batch_size=batch_size,
        pieces=pieces,
        exact=exact,
        **options,
    )


def trainer_and_data(rank: int, layout: Layout, data: Splits, **options: Any) -> tuple[Any, StepData]:
    """Return the Trainer and the data of a rank. Options beside the Trainer's:

    sum_of: makes the gradient sum; hooks: the step's hooks; hooks_of: makes hooks of this rank from the gradient sum;
    plugins_of, callbacks_of: make plugins and callbacks of this rank; callbacks_for: make some from the gradient sum;
    passes_of: takes the passes and returns those to use; parts: the arguments of the strategy fsdp.
    """
    world = layout.world_size
    kinds: dict[str, Any] = {
        "ddp": ThreadDDP,
        "fsdp": partial(ThreadFSDP, **options.pop("parts", {})),
    }
    schedule = (DP if layout.strategy == "dp" else Strategy)().schedule
    strategy: Any = kinds.get(layout.strategy, OneProcess)(layout, schedule)
    sums: Any = (GradientSum, ExactGradientSum)
    if layout.strategy == "fsdp":
        sums = (ShardedGradientSum, ShardedExactGradientSum)
    gradients = options.pop("sum_of", sums[bool(layout.exact)])(strategy, world)
    hooks = [*options.pop("hooks", []), *options.pop("hooks_of", lambda gradients: [])(gradients)]
    callbacks = [*options.pop("callbacks_for", lambda gradients: [])(gradients), DummyBatchOnEmptyRank()]
    callbacks += [*options.pop("callbacks", []), *options.pop("callbacks_of", list)()]
    passes_of = options.pop("passes_of", lambda passes: passes)
    plugins = [
        *options.pop("plugins", []),
        *options.pop("plugins_of", list)(),
        *([ThreadPlace(rank, world)] if world > 1 else []),
    ]
    options = QUIET | {"devices": world, "callbacks": callbacks, "plugins": plugins, "max_epochs": 1} | options
    trainer: Any = StepTrainer(gradients, hooks, 0, **options)
    trainer.fit_loop.epoch_loop.passes = passes_of(trainer.fit_loop.epoch_loop.passes)
    return trainer, StepData(data, layout, 0, rank, num_workers=0)


@dataclass(eq=False)
class Fit:
    """What a rank has after a fit.

    Attributes:
        state: the module's weights and buffers. Of weights in parts only rank zero has the whole.
        metrics: what it has logged.
        trainer: its Trainer.
    """

    state: dict[str, Tensor]
    metrics: dict[str, float]
    trainer: Any


def fit(
    rank: int,
    net: pl.LightningModule,
    layout: Layout,
    train: int = 24,
    ckpt: Any = None,
    data: Splits | None = None,
    **options: Any,
) -> Fit:
    """Fit a copy of a module as a rank. By default an epoch has two steps.

    The module is made before, since all ranks share the random state that initialises it.
    """
    module = deepcopy(net)
    data = data or splits(train, options.pop("evaluated", SAMPLES))
    trainer, datamodule = trainer_and_data(rank, layout, data, **options)
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = trainer.strategy.lightning_module_state_dict()
    return Fit({name: value.clone() for name, value in state.items()}, metrics, trainer)


def same_bits(one: dict[str, Tensor], *others: dict[str, Tensor]) -> bool:
    """Check whether weights and buffers have the same bits."""
    return all(
        one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
        for other in others
    )


def fits(ranks: Ranks, net: pl.LightningModule, world: int, exact: bool = True, **options: Any) -> list[Any]:
    """Return the fit of each process of a layout. `batch_size`, `pieces`, `shares` and `strategy` are the layout's.

    With `errors`, types of errors, the result of a process that raises one is the error.
    """
    names = ("batch_size", "pieces", "shares", "strategy")
    layout = layout_of(world, exact, **{name: options.pop(name) for name in names if name in options})
    errors: Any = options.pop("errors", ())
    if layout.world_size == 1 and not errors:
        return [fit(0, net, layout, **options)]
    return ranks(layout.world_size, lambda rank: fit(rank, net, layout, **options), errors=errors)


class Saves(pl.Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: Path, step: int = 1) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def saving(path: Path, step: int = 1) -> dict[str, Any]:
    """Return the options of a fit that saves a checkpoint after a step."""
    return {"callbacks": [Saves(path, step)], "plugins_of": lambda: [AtomicCheckpointIO()]}


def going_on(path: Path, content: Any = None) -> dict[str, Any]:
    """Return the options of a fit that continues from a checkpoint, or from a changed content of it.

    The content was read before, as a run does: Lightning reads a file under a lock of the process.
    """
    return {"ckpt": path, "plugins_of": lambda: [AtomicCheckpointIO(loaded=content or load(path))]}
