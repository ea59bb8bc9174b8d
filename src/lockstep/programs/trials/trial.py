"""Run a trial: a few optimizer steps on one layout, recorded as `lockstep same` records any program.

Each trial is a run of train.py with one additional callback, which records it. This process forks, so it must not
compute with torch: it reads and compares the records with numpy.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import Subset

from lockstep.config.arguments import overridden_keys
from lockstep.config.check import Config, check
from lockstep.config.pages import group_file
from lockstep.data import Splits
from lockstep.guards.check import Finding
from lockstep.guards.first_step import read_findings
from lockstep.launch.environment import export
from lockstep.launch.forks import call_in_forks
from lockstep.launch.parent import launch
from lockstep.launch.rendezvous import LOOPBACK, bind_socket, leave_group
from lockstep.programs.common.training import train_quietly
from lockstep.programs.sameness.recorded import Run
from lockstep.programs.sameness.training import read_run

# Full steps of an epoch before its short one: few, because differences by rounding grow with each step, and would hide
# an error in the short one.
FULL_STEPS = 2
RECORDS = "records"  # the folder of the recorder's files, in a trial's
# Further runs of the reference, which measure what rounding does, and of which elements of each weight they flip a bit.
YARDSTICKS = {"1 device again": 0, "one flipped bit of each weight": 1, "of every second": 2, "of every third": 3}
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """A short run to compare with others.

    Attributes:
        changes: changes to the config.
        fault: a deliberate fault (see trials/faults.py). It checks the program itself, which must report a difference.
        flip: of each weight, the last bit of every so manyth element is flipped before the first step; 0: none.
        by_engine: start the workers as an engine such as torchrun does; they read their rank from the environment.
        judged: collect what the first step's check finds in the module, and do not refuse it.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None
    flip: int = 0
    by_engine: bool = False
    judged: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        config: the checked config.
        sha256: hash of weights and buffers at the end, as in summary.json.
        metrics: the metrics of the test.
        run: what was recorded of its steps.
        findings: what the first step's check has found in the module, if the trial is judged.
    """

    config: Config
    sha256: str
    metrics: dict[str, float]
    run: Run
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
    ids = np.arange(count) * total // count
    labels = None if splits.labels is None else splits.labels[ids]
    weights = None if splits.weights is None else splits.weights[ids]
    return replace(splits, train=Subset(splits.train, ids.tolist()), labels=labels, weights=weights)


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
    config = _config(trial, raw, steps, folder)
    folder.mkdir(parents=True)
    splits = replace(splits, val=None)
    summary = (_launch_as_an_engine if trial.by_engine else _launch)(config, splits, folder)
    findings = read_findings(folder) if trial.judged else ()
    outcome = Outcome(config, summary["weights_sha256"], summary["metrics"], read_run(folder / RECORDS), findings)
    shutil.rmtree(folder)
    return outcome


def _config(trial: Trial, raw: Mapping[str, Any], steps: int, folder: Path) -> Config:
    common: dict[str, Any] = {"max_steps": steps, "max_epochs": steps, "val_every": None, "logger": {}, "resume": None}
    layout = check({**raw, **trial.changes}).layout
    callbacks: dict[str, Any] = {
        "record": {
            "_target_": "lockstep.programs.sameness.training.Record",
            "folder": str(folder / RECORDS),
            "steps": steps,
            "flip": trial.flip,
        }
    }
    if trial.fault is not None:
        callbacks["fault"] = {
            "_target_": "lockstep.programs.trials.faults.Fault",
            "pieces": layout.pieces,
            "batch_size": layout.batch_size,
            "fault": trial.fault,
        }
    if trial.judged:
        callbacks["findings"] = {"_target_": "lockstep.guards.first_step.CollectFindings"}
    changed = {**raw, **common, **trial.changes, "callbacks": callbacks}
    overridden = overridden_keys() if HydraConfig.initialized() else []  # what the user has set counts as in train.py
    return check(
        changed, overridden=[key for key in overridden if key.partition(".")[0] not in {*common, *trial.changes}]
    )


def _launch(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = launch(train_quietly, config, splits, folder, layout=config.layout)
    return summary


def _launch_as_an_engine(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Train in workers that are started as an engine starts them: they read their ranks from the environment."""
    with bind_socket(LOOPBACK) as socket:
        port = socket.getsockname()[1]
    world = config.layout.world_size

    def train_as(rank: int) -> dict[str, Any]:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the parent reports the error
        export(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port))
        summary = _launch(config, splits, folder)
        leave_group()
        return summary

    answer, *_ = call_in_forks(*(partial(train_as, rank) for rank in range(world)))
    if isinstance(answer, Exception):
        raise answer
    return answer


def with_counter(trials: Sequence[T]) -> Iterator[T]:
    """Yield the trials. On a terminal, show a counter such as `trial 3/20`.

    Rich's progress bar would start a thread, and this parent forks.
    """
    for number, trial in enumerate(trials, 1):
        if sys.stderr.isatty():
            end = "\n" if number == len(trials) else ""
            print(f"\rtrial {number}/{len(trials)} ", end=end, file=sys.stderr, flush=True)
        yield trial
