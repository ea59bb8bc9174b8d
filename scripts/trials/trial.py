"""A trial: a few optimizer steps on one layout, taken down to the bit. parity.py and differences.py compare them.

Each trial runs in workers that are forked from one parent, as a run of train.py does: the same module, data, Trainer
and loop, with one callback more, which writes down. The parent only compares files, with numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset
from trials.faults import FAULTS
from trials.record import Record, Tensors, sensitive

from lockstep.callbacks import DummyBatchOnEmptyRank
from lockstep.launch import logs
from lockstep.launch.agent import launch
from lockstep.launch.environment import environment
from lockstep.loading import DataModule, Splits
from lockstep.run import fast
from lockstep.run.build import compile_module, make_module, make_trainer
from lockstep.run.config import Config, check
from lockstep.run.summary import weights_sha256

FULL = 2  # steps before the tail: soon enough to see a wrong one before rounding has grown
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """What is run: `changes` to the config, and a deliberate fault (see FAULTS) for controls."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a trial left.

    Attributes:
        config: as checked.
        sha256: of weights and buffers at the end, as in summary.json.
        samples: a hash of the sample ids of every piece of every step.
        losses: mean loss of each step's samples, float64 [steps].
        probes: up to PROBES of the weights after each step, [steps, probes].
        weights, buffers: at the end, by name.
        gradients: of the last step, before clipping.
        metrics: of the test.
        sensitive: kinds of layers whose result depends on how a step is cut: BatchNorm, dropout.
    """

    config: Config
    sha256: str
    samples: str
    losses: NDArray[Any]
    probes: NDArray[Any]
    weights: Tensors
    buffers: Tensors
    gradients: Tensors
    metrics: dict[str, float]
    sensitive: list[str]


def prepare(raw: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A train.py config for trials of `steps` optimizer steps: nothing is validated, logged or saved beside them."""
    return {
        **raw,
        "max_steps": steps,
        "max_epochs": steps,
        "val_every": None,
        "callbacks": {},
        "logger": {"name": "none"},
        "resume": None,
    }


def shorten(splits: Splits, steps: int, batch_size: int, pieces: int, tail: int | None, test_samples: int) -> Splits:
    """Splits in which `steps` optimizer steps pass several epochs, each with a short last step.

    Args:
        tail: samples of that last step; None: half as many as there are pieces, so that some pieces, and on many
            layouts some devices, have none.
        test_samples: of the test set, to keep trials short.
    """
    tail = min(tail or max(1, pieces // 2), batch_size)
    full = max(1, min(FULL, (len(splits.train) - tail) // batch_size))
    train = Subset(splits.train, range(min(full * batch_size + tail, len(splits.train))))
    return replace(splits, train=train, val=None, test=Subset(splits.test, range(min(test_samples, len(splits.test)))))


def run(trial: Trial, raw: Mapping[str, Any], splits: Splits, folder: Path) -> Outcome:
    """Runs a trial in workers of its own.

    Raises:
        Refusal: the trial's config can't be run; WorkerFailed: it failed.
    """
    config = check({**raw, **trial.changes})
    folder.mkdir(parents=True, exist_ok=True)
    found = launch(_work, config, splits, folder, trial.fault, layout=config.layout)
    file = folder / "record.npz"
    with np.load(file) as record:
        parts: dict[str, Any] = {"weights": {}, "buffers": {}, "gradients": {}, "curves": {}}
        for key in record:
            kind, _, name = key.partition("/")
            parts[kind][name] = record[key]
    file.unlink()  # as large as two checkpoints
    return Outcome(config=config, **found, **parts.pop("curves"), **parts)


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with a counter on a terminal. Rich's progress bar would keep a thread in a parent that forks."""
    for number, item in enumerate(items, 1):
        if sys.stderr.isatty():
            end = "\n" if number == len(items) else ""
            print(f"\r{what} {number}/{len(items)} ", end=end, file=sys.stderr, flush=True)
        yield item


def _work(config: Config, splits: Splits, folder: Path, fault: str | None) -> dict[str, Any]:
    rank = environment().rank
    logs.configure(folder, rank)
    fast.set_up(config.layout, config.threads, config.allocator)
    module = make_module(config, splits)
    data = DataModule(splits, config.layout, seed=config.seed, num_workers=config.num_workers)
    data.process = rank
    record = Record()
    trainer = make_trainer(config, folder, [DummyBatchOnEmptyRank(), record])
    if fault is not None:
        FAULTS[fault](trainer, module, data)
    compile_module(config, module, trainer)
    trainer.fit(module, datamodule=data)
    state = trainer.strategy.lightning_module_state_dict()
    if rank == 0:
        record.save(folder / "record.npz", module)
    found = {"sha256": weights_sha256(state), "samples": record.samples, "sensitive": sensitive(module)}
    trainer.test(module, datamodule=data, verbose=False)
    return found | {"metrics": {name: float(value) for name, value in trainer.callback_metrics.items()}}
