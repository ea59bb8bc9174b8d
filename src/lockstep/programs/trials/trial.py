"""Run a trial: a few optimizer steps on one layout, recorded to the bit.

Each trial is a run of train.py with one additional callback, which records it. This process forks, so it must not
compute with torch: it reads and compares the records with numpy.
"""

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
from hydra.core.hydra_config import HydraConfig
from numpy.typing import NDArray
from torch.utils.data import Subset

from lockstep.config.arguments import overridden_keys
from lockstep.config.check import Config, check
from lockstep.config.pages import group_file
from lockstep.data import Splits
from lockstep.errors import UserError, WorkerFailed
from lockstep.guards.check import Finding
from lockstep.guards.first_step import read_findings
from lockstep.launch.environment import export
from lockstep.launch.parent import launch
from lockstep.launch.rendezvous import LOOPBACK, bind_socket, leave_group
from lockstep.programs.common.training import train_quietly
from lockstep.programs.trials.record import FILE, KILLED

# Full steps of an epoch before its short one: few, because differences by rounding grow with each step, and would hide
# an error in the short one.
FULL_STEPS = 2
HARMLESS = {"meter", "console", "dashboard", "pictures", "checkpoint"}  # callbacks that do not change training
Tensors = dict[str, NDArray[Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """A short run to compare with others.

    Attributes:
        changes: changes to the config.
        fault: a deliberate fault (see trials/record.py). It checks the program itself, which must report a difference;
            the faults of YARDSTICKS instead measure how large differences by rounding are.
        whole: also validate, and keep the callbacks that may change training (all but HARMLESS).
        first_layout: changes to the config for a first start, which is killed inside an epoch. The trial resumes from
            its last checkpoint.
        by_engine: start the workers as an engine such as torchrun does; they read their rank from the environment.
        judged: collect what the first step's check finds in the module, and do not refuse it.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None
    whole: bool = False
    first_layout: Mapping[str, Any] | None = None
    by_engine: bool = False
    judged: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        config: the checked config.
        sha256: hash of weights and buffers at the end, as in summary.json.
        metrics: the metrics of the test, and of the validation if the trial validates.
        samples: a hash of the sample ids of every piece of every step.
        losses: mean loss of each step's samples, float64 [steps].
        probes: single weights after each step, about trials.record.PROBES of them, [steps, probes].
        sensitive: kinds of layers whose result depends on how a step is cut into pieces: BatchNorm, dropout.
        weights, buffers: the values at the end, by name.
        gradients: the gradients of the last step, before clipping, by name.
        rounding: the elements of each weight whose gradient was only rounding at some step, bool, by name.
        rounding_probes: the same of `probes`, bool [probes].
        findings: what the first step's check has found in the module, if the trial is judged.
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
    rounding: Tensors
    rounding_probes: NDArray[Any]
    findings: Sequence[Finding] = ()


def shorten(splits: Splits, batch_size: int, pieces: int, tail: int | None) -> Splits:
    """Return splits with so few training samples that an epoch is at most FULL_STEPS full steps and one short step.

    The samples lie evenly in the training set, because the first samples of class folders are all of one class.

    Args:
        tail: samples of the short step. None: half as many as there are pieces, so that some pieces, and on many
            layouts some devices, have none.
    """
    tail = min(tail or max(1, pieces // 2), batch_size)
    total = len(splits.train)
    count = min(max(1, min(FULL_STEPS, (total - tail) // batch_size)) * batch_size + tail, total)
    return replace(splits, train=Subset(splits.train, [number * total // count for number in range(count)]))


def layout_changes(strategy: str, devices: int, pieces: int) -> dict[str, Any]:
    """Return the changes to a config that choose a layout; `strategy` is a file of conf/strategy/."""
    chosen = {"strategy": group_file("strategy", strategy), "devices": devices}
    return chosen | {"pieces": pieces, "accumulate_grad_batches": None}


def run(trial: Trial, raw: Mapping[str, Any], steps: int, splits: Splits, folder: Path) -> Outcome:
    """Make the first `steps` optimizer steps of a run, test it, and delete its folder.

    Args:
        raw: the composed config, without the trial's changes.
        folder: the trial's folder; it must not exist.

    Raises:
        UserError: the trial's config is not valid.
        WorkerFailed: the trial failed.
    """
    config = _config(trial, raw, steps, trial.changes, trial.fault)
    folder.mkdir(parents=True)
    if not trial.whole:
        splits = replace(splits, val=None)
    if trial.first_layout is not None:
        first_config = _config(trial, raw, steps, trial.first_layout, KILLED)
        with suppress(WorkerFailed):
            _launch(first_config, splits, folder)
            raise AssertionError("the trial was not killed")
        if not (folder / "checkpoints" / "last.ckpt").exists():
            raise WorkerFailed("killed before its first checkpoint")
    summary = (_launch_as_an_engine if trial.by_engine else _launch)(config, splits, folder)
    record: dict[str, Any] = {name: {} for name in ("weights", "buffers", "gradients", "rounding", "about")}
    with np.load(folder / FILE) as arrays:
        for key in arrays:
            section, _, name = key.partition("/")
            record[section][name] = arrays[key]
    findings = read_findings(folder) if trial.judged else ()
    shutil.rmtree(folder)
    about: dict[str, Any] = record.pop("about")
    about |= {"samples": str(about["samples"]), "sensitive": about["sensitive"].tolist()}
    return Outcome(config, summary["weights_sha256"], summary["metrics"], **about, **record, findings=findings)


def _config(trial: Trial, raw: Mapping[str, Any], steps: int, changes: Mapping[str, Any], fault: str | None) -> Config:
    common: dict[str, Any] = {"max_steps": steps, "max_epochs": steps, "val_every": None, "logger": {}, "resume": None}
    layout = check({**raw, **changes}).layout
    record = {
        "_target_": "lockstep.programs.trials.record.Record",
        "pieces": layout.pieces,
        "batch_size": layout.batch_size,
    }
    callbacks = {name: callback for name, callback in raw["callbacks"].items() if trial.whole and name not in HARMLESS}
    if trial.first_layout is not None:
        callbacks["checkpoint"] = {"_target_": "lockstep.callbacks.Checkpoint", "monitor": None, "every": 1}
    if trial.judged:
        callbacks["findings"] = {"_target_": "lockstep.guards.first_step.CollectFindings"}
    changed = {**raw, **common, **changes, "callbacks": {**callbacks, "record": {**record, "fault": fault}}}
    overridden = overridden_keys() if HydraConfig.initialized() else []  # what the user has set counts as in train.py
    return check(changed, overridden=[key for key in overridden if key.partition(".")[0] not in {*common, *changes}])


def _launch(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = launch(train_quietly, config, splits, folder, layout=config.layout)
    return summary


def _launch_as_an_engine(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Train in workers that are started as an engine starts them: they read their ranks from the environment."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with bind_socket(LOOPBACK) as socket:
        port = socket.getsockname()[1]
    workers = [
        context.Process(target=_run_rank, args=(rank, port, sender, config, splits, folder))
        for rank in range(config.layout.world_size)
    ]
    for worker in workers:
        worker.start()
    sender.close()
    try:
        answer: dict[str, Any] | Exception = receiver.recv()
    except EOFError:
        answer = WorkerFailed("rank 0 ended without an answer")
    for worker in workers:
        worker.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _run_rank(rank: int, port: int, sender: Connection, config: Config, splits: Splits, folder: Path) -> None:
    """Train as one rank of an engine. Rank zero sends the summary, or the error, to the parent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the parent reports the error
    environment = {"RANK": rank, "WORLD_SIZE": config.layout.world_size, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    export(**{name: str(value) for name, value in environment.items()})
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


def with_counter(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield the items. On a terminal, show a counter such as `trial 3/20`.

    Rich's progress bar would start a thread, and this parent forks.
    """
    for number, item in enumerate(items, 1):
        if sys.stderr.isatty():
            end = "\n" if number == len(items) else ""
            print(f"\r{label} {number}/{len(items)} ", end=end, file=sys.stderr, flush=True)
        yield item


def difference(tensors: Tensors, reference: Tensors, left_out: Tensors | None = None) -> float:
    """Return the largest relative difference of any tensor: norm of its difference over norm of its reference.

    Elements that are true in `left_out` are not compared.

    The divisor is at least a thousandth of the norm of all reference tensors together. The gradient of a bias before
    BatchNorm, for example, is zero except for rounding, so a difference relative to its own norm means nothing.
    """
    if left_out:
        tensors, reference = (
            {name: np.where(left_out.get(name, False), 0, tensor) for name, tensor in side.items()}
            for side in (tensors, reference)
        )
    norms = {name: norm(tensor) for name, tensor in reference.items()}
    smallest = max(1e-3 * float(np.sqrt(sum(value**2 for value in norms.values()))), 1e-300)
    distances = {name: norm(tensors[name] - tensor.astype(np.float64)) for name, tensor in reference.items()}
    return max((distances[name] / max(norms[name], smallest) for name in norms), default=0.0)


def norm(values: NDArray[Any]) -> float:
    """Return the Euclidean norm. numpy computes it without BLAS, which would start threads in a process that forks."""
    return float(np.sqrt(np.square(values, dtype=np.float64).sum()))
