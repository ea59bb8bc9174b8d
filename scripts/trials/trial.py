"""Run a trial: a few optimizer steps on one layout, recorded to the bit.

Each trial is a run of train.py with one additional callback, which records it. The parent only compares files, with
numpy, so that it can fork.
"""

import logging
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset
from trials.record import FILE, KILLED

from lockstep.config.check import Config, check
from lockstep.data import Splits
from lockstep.errors import UserError, WorkerFailed
from lockstep.launch.environment import export
from lockstep.launch.network import LOOPBACK, bind_socket
from lockstep.launch.parent import launch
from lockstep.launch.process_group import leave_group
from lockstep.run.training import fit_and_test

FULL_STEPS = 2  # full steps before the short one: a wrong short step shows before rounding has grown
USUAL = {"meter", "console", "dashboard", "pictures", "checkpoint"}  # callbacks that do not change training
Tensors = dict[str, NDArray[Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """A trial: `changes` to the config, and a deliberate fault for controls (see trials.record).

    Attributes:
        whole: validate too, and keep the callbacks that not every run has.
        begun: changes to the layout on which the trial begins, to be killed in the middle of an epoch; with `whole`.
        by_engine: start the workers as an engine does; they read their rank from the environment.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None
    whole: bool = False
    begun: Mapping[str, Any] | None = None
    by_engine: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        config: as checked.
        sha256: of weights and buffers at the end, as in summary.json.
        metrics: of the test.
        samples: a hash of the sample ids of every piece of every step.
        losses: mean loss of each step's samples, float64 [steps].
        probes: up to PROBES of the weights after each step, [steps, probes].
        sensitive: kinds of layers whose result depends on how a step is cut: BatchNorm, dropout.
        weights, buffers: at the end, by name.
        gradients: of the last step, before clipping.
    """

    config: Config
    sha256: str
    metrics: dict[str, float]
    samples: str
    losses: NDArray[Any]
    probes: NDArray[Any]
    sensitive: list[str]
    weights: Tensors
    buffers: Tensors
    gradients: Tensors


def shorten(splits: Splits, steps: int, batch_size: int, pieces: int, tail: int | None) -> Splits:
    """Return splits of which `steps` optimizer steps take several epochs, each with a short last step.

    Args:
        tail: samples of the short step. None: half as many as there are pieces, so that some pieces, and on many
            layouts some devices, have none.
    """
    tail = min(tail or max(1, pieces // 2), batch_size)
    full = max(1, min(FULL_STEPS, (len(splits.train) - tail) // batch_size))
    return replace(splits, train=Subset(splits.train, range(min(full * batch_size + tail, len(splits.train)))))


def run(trial: Trial, raw: Mapping[str, Any], steps: int, splits: Splits, folder: Path) -> Outcome:
    """Make the first `steps` optimizer steps of a run, test it, and delete its folder.

    Raises:
        UserError: the trial's config can't be run.
        WorkerFailed: the trial failed.
    """
    config = _config(trial, raw, steps, trial.changes, trial.fault)
    folder.mkdir(parents=True)
    if not trial.whole:
        splits = replace(splits, val=None)
    if trial.begun is not None:
        begins = _config(trial, raw, steps, trial.begun, KILLED)
        with suppress(WorkerFailed):
            _launch(begins, splits, folder)
            raise AssertionError("the trial was not killed")
        if not (folder / "checkpoints" / "last.ckpt").exists():
            raise WorkerFailed("killed before its first checkpoint")
    summary = (_launch_as_an_engine if trial.by_engine else _launch)(config, splits, folder)
    parts: dict[str, Any] = {"weights": {}, "buffers": {}, "gradients": {}, "about": {}}
    with np.load(folder / FILE) as arrays:
        for key in arrays:
            kind, _, name = key.partition("/")
            parts[kind][name] = arrays[key]
    shutil.rmtree(folder)
    about: dict[str, Any] = parts.pop("about")
    about |= {"samples": str(about["samples"]), "sensitive": about["sensitive"].tolist()}
    return Outcome(config, summary["weights_sha256"], summary["metrics"], **about, **parts)


def _config(trial: Trial, raw: Mapping[str, Any], steps: int, changes: Mapping[str, Any], fault: str | None) -> Config:
    bare: dict[str, Any] = {"max_steps": steps, "max_epochs": steps, "val_every": None, "logger": {}, "resume": None}
    layout = check({**raw, **changes}).layout
    record = {"_target_": "trials.record.Record", "pieces": layout.pieces, "batch_size": layout.batch_size}
    callbacks = {name: callback for name, callback in raw["callbacks"].items() if trial.whole and name not in USUAL}
    if trial.begun is not None:
        callbacks["checkpoint"] = {"_target_": "lockstep.callbacks.Checkpoint", "monitor": None, "every": 1}
    return check({**raw, **bare, **changes, "callbacks": {**callbacks, "record": {**record, "fault": fault}}})


def _work(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # the table has all results
    return fit_and_test(config, splits, folder)


def _launch(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = launch(_work, config, splits, folder, layout=config.layout)
    return summary


def _launch_as_an_engine(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Do the work of `_launch` in forks of this process, which read their ranks from the environment."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with bind_socket(LOOPBACK) as free:
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=_be_rank, args=(rank, port, sender, config, splits, folder))
        for rank in range(config.layout.world_size)
    ]
    for each in ranks:
        each.start()
    sender.close()
    try:
        answer: dict[str, Any] | Exception = receiver.recv()
    except EOFError:
        answer = WorkerFailed("rank 0 ended without an answer")
    for each in ranks:
        each.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _be_rank(rank: int, port: int, sender: Connection, config: Config, splits: Splits, folder: Path) -> None:
    """Run one rank of an engine. Rank zero sends the summary, or the error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the answer has the error
    place = {"RANK": rank, "WORLD_SIZE": config.layout.world_size, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    export(**{name: str(value) for name, value in place.items()})
    answer: dict[str, Any] | Exception
    try:
        answer = _launch(config, splits, folder)
        leave_group()
    except (UserError, WorkerFailed) as error:
        answer = error
    except Exception as error:
        answer = WorkerFailed(f"{type(error).__name__}: {error}")
    if rank == 0:
        sender.send(answer)


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items, and show a counter on a terminal.

    Rich's progress bar would start a thread, and this parent forks.
    """
    for number, item in enumerate(items, 1):
        if sys.stderr.isatty():
            end = "\n" if number == len(items) else ""
            print(f"\r{what} {number}/{len(items)} ", end=end, file=sys.stderr, flush=True)
        yield item


def difference(tensors: Tensors, reference: Tensors) -> float:
    """Return the largest relative difference of a tensor: norm of the difference over norm of the reference.

    If a tensor's norm is less than a thousandth of the norm of all, that thousandth is the divisor. The gradient of a
    bias before BatchNorm, for example, is zero but for rounding, so its relative difference means nothing.
    """
    norms = {name: norm(tensor) for name, tensor in reference.items()}
    least = 1e-3 * float(np.sqrt(sum(value**2 for value in norms.values())))
    off = [norm(tensors[name] - reference[name].astype(np.float64)) / max(norms[name], least, 1e-300) for name in norms]
    return max(off, default=0.0)


def norm(values: NDArray[Any]) -> float:
    """Return the Euclidean norm. numpy computes it without BLAS, which would start threads in a process that forks."""
    return float(np.sqrt(np.square(values, dtype=np.float64).sum()))
