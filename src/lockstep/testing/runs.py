"""The runs of a `ModuleTests` class. Each is made when a test first needs it."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import Subset

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.commands.api import compose
from lockstep.config.check import check
from lockstep.data import Splits
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.guards.check import Finding
from lockstep.guards.first_step import read_findings
from lockstep.job.evaluation import evaluate
from lockstep.job.training import fit_and_test
from lockstep.launch.parent import launch
from lockstep.programs.sameness.judging import Pair
from lockstep.programs.sameness.recorded import Side
from lockstep.programs.sameness.training import read_run
from lockstep.programs.sameness.verdict import Verdict, judge
from lockstep.testing.probe import probe
from lockstep.testing.server import Server

STEPS, SAVED = 4, 2  # optimizer steps of a run; steps between two checkpoints
EVALUATED, GROUP = 21, 4  # most samples of validation and test; samples of a batch, which do not divide them
ONE, DDP, DP = {"strategy": "auto"}, {"strategy": "ddp", "devices": 2}, {"strategy": "dp", "devices": 3}
FLOAT64 = {"precision": "64-true", "exact": False}
FLIPPED = "float64_flipped"  # the last bit of each weight before the first step: its distance is what rounding does
EXACT = {"precision": "32-true", "exact": True}
SHORT: dict[str, Any] = {
    "accelerator": "cpu",
    "num_nodes": 1,
    "devices": 1,
    "accumulate_grad_batches": None,
    "threads": 1,
    "num_workers": 0,
    "compile": False,
    "extras": {},
    "logger": {},
    "hang_timeout": 60,
    "max_restarts": 0,
    "elastic": False,
    "survive": False,
    "resume": None,
    "max_steps": STEPS,
    "max_epochs": None,
    "val_every": None,
    "checkpoint_every": SAVED,
}
USUAL = {"batch_size": 16, "pieces": 4}  # if the overrides have none
SILENT = ("meter", "console", "dashboard", "pictures")  # callbacks that only show a run
FINDINGS = {"_target_": "lockstep.guards.first_step.CollectFindings"}
KILL = {"_target_": "lockstep.testing.runs.Kill", "after": SAVED + 1}
EVALUATION: dict[str, Any] = {"pieces": None, "_work": evaluate, "_after": "exact_one"}
# A run's changes to the config; `_work`, `_after` and `_in` are not keys: the function that a worker calls, the run
# that must come before (its checkpoint is evaluated), and the run whose folder it has.
RUNS: dict[str, dict[str, Any]] = {
    "exact_one": {**ONE, **EXACT},
    "exact_ddp": {**DDP, **EXACT},
    "exact_dp": {**DP, **EXACT},
    "again": {**ONE, **EXACT},
    "float64_one": {**ONE, **FLOAT64},
    "float64_ddp": {**DDP, **FLOAT64},
    "float64_dp": {**DP, **FLOAT64},
    FLIPPED: {**ONE, **FLOAT64},
    "killed": {**ONE, **EXACT, "callbacks": {"kill": KILL}},
    "resumed": {**ONE, **EXACT, "_in": "killed"},
    "tested_batch_1": {**ONE, **FLOAT64, "batch_size": 1, **EVALUATION},
    "tested_one_device": {**ONE, **FLOAT64, "batch_size": GROUP, **EVALUATION},
    "tested_ddp": {**DDP, **FLOAT64, "batch_size": 2 * GROUP, **EVALUATION},
    "probe": {**ONE, **FLOAT64, "_work": probe, "_after": "exact_one"},
}


RECORDS = "records"  # of the runs in float64, in their folders


class Kill(Callback):
    """Kills the process with SIGKILL after a step, once the checkpoints before it are on the disk.

    Args:
        after: the step, counted from 1.
    """

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Kill this process after the step."""
        if trainer.global_step == self.after:
            trainer.strategy.checkpoint_io.wait()
            os.kill(os.getpid(), signal.SIGKILL)


class Runs:
    """The runs of one test class.

    Args:
        overrides: command-line overrides that choose the module.
        folder: an empty folder for the runs.
        server: makes the runs.
    """

    def __init__(self, overrides: Sequence[str], folder: Path, server: Server) -> None:
        self.overrides, self.folder, self.server = check_overrides(overrides), folder, server
        self.outcomes: dict[str, tuple[Any, str]] = {}  # result and error

    def result(self, name: str) -> Any:
        """Return what a run returns; make it at the first call. Fail the test with the run's error if it fails."""
        for before in filter(None, [RUNS[name].get("_after")]):
            self.result(before)
        if name == "resumed":
            self.kill()
        result, error = self._outcome(name)
        if error:
            pytest.fail(f"the run with {self.layout(name)} failed: {error}", pytrace=False)
        return result

    def kill(self) -> None:
        """Make the run that is killed. Fail the test if it ends otherwise."""
        _, error = self._outcome("killed")
        if "SIGKILL" not in error:
            pytest.fail(f"the run to be killed has failed before: {error or 'it completed'}", pytrace=False)

    def _checkpoint(self, name: str) -> dict[str, Any]:
        """Return a run's last checkpoint."""
        self.result(name)
        return checkpoint_io.load(paths.last(self.folder / RUNS[name].get("_in", name)))

    def _outcome(self, name: str) -> tuple[Any, str]:
        if name not in self.outcomes:
            arguments = {"overrides": self.overrides, "folder": str(self.folder), "name": name}
            try:
                self.outcomes[name] = self.server.call("lockstep.testing.runs.make_run", **arguments), ""
            except UserError as error:
                self.outcomes[name] = None, str(error)
        return self.outcomes[name]

    def layout(self, name: str) -> str:
        """Return a run's layout and precision as overrides."""
        shown = {key: value for key, value in RUNS[name].items() if not key.startswith("_") and key != "callbacks"}
        return " ".join(f"{key}={json.dumps(value)}".replace('"', "") for key, value in shown.items())

    def weights(self, name: str) -> dict[str, Tensor]:
        """Return the floating-point tensors of a run's last checkpoint by name."""
        state = self._checkpoint(name)["state_dict"]
        return {key: value for key, value in state.items() if value.is_floating_point()}

    def verdict(self, one: str, other: str) -> Verdict:
        """Return the verdict on the steps of two runs in float64, as `lockstep same` gives it."""
        for name in (one, other, FLIPPED):
            self.result(name)
        first, second, flipped = (read_run(self.folder / name / RECORDS) for name in (one, other, FLIPPED))
        return judge(Pair(Side(one, first, flipped=(flipped,)), Side(other, second)))

    def attributes(self) -> list[str]:
        """Return the names of Python attributes that have changed, which no checkpoint has."""
        return sorted(self._checkpoint("exact_one")["continuation"].get("attributes", {}))

    def findings(self) -> Sequence[Finding]:
        """Return what the judge finds before the first step with exact=true."""
        self.result("exact_one")
        return read_findings(self.folder / "exact_one")


def check_overrides(overrides: Sequence[str]) -> list[str]:
    """Return overrides as a list; fail the test if they are no texts in a list or tuple."""
    if not isinstance(overrides, list | tuple) or not all(isinstance(each, str) for each in overrides):
        pytest.fail(f'overrides = {overrides!r}: must be a list of texts, ["model=mine", "data=mine"]', pytrace=False)
    return list(overrides)


def make_run(overrides: list[str], folder: str, name: str) -> Any:
    """Make a run in a worker for each of its devices, and return what rank zero returns. The server calls this.

    Raises:
        UserError: the overrides do not fit, the data can't be opened, or the run was refused.
        WorkerFailed: the run failed.
    """
    changes = dict(RUNS[name])
    work: Callable[..., Any] = changes.pop("_work", fit_and_test)
    after, at = changes.pop("_after", None), Path(folder, changes.pop("_in", name))
    chosen = {override.lstrip("+").partition("=")[0] for override in overrides}
    raw = {**composed((*overrides, f"strategy={changes.pop('strategy')}")), **SHORT}
    raw |= {key: value for key, value in USUAL.items() if key not in chosen}
    splits = opened(tuple(overrides), int(raw["batch_size"]))
    shown = {key: options for key, options in raw["callbacks"].items() if work is fit_and_test and key not in SILENT}
    if work is fit_and_test:
        shown["findings"] = FINDINGS
    if name.startswith("float64"):
        record: dict[str, Any] = {"_target_": "lockstep.programs.sameness.training.Record", "steps": STEPS}
        shown["record"] = {**record, "folder": str(at / RECORDS), "flip": int(name == FLIPPED)}
    raw = {**raw, **changes, "callbacks": {**shown, **changes.get("callbacks", {})}}
    config = check(raw, trains=work is not evaluate, overridden=chosen - USUAL.keys() - SHORT.keys() - changes.keys())
    if after:
        config = replace(config, checkpoint=str(paths.last(Path(folder, after))))
    at.mkdir(exist_ok=True)
    return launch(work, config, splits, at, layout=config.layout, hang_timeout=config.hang_timeout)


@lru_cache(maxsize=8)
def composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the config of these overrides."""
    return dict(compose(*overrides))


@lru_cache(maxsize=2)
def opened(overrides: tuple[str, ...], batch_size: int) -> Splits:
    """Open the data set that overrides choose, and shorten it."""
    config = composed((*overrides, f"strategy={ONE['strategy']}"))
    return shorten(open_data(config["data"], config["data_dir"], config["seed"]), batch_size)


def shorten(splits: Splits, batch_size: int) -> Splits:
    """Return splits with two and a half steps of training samples, and few samples for validation and test."""
    parts = {"train": spread(splits.train, 2 * batch_size + max(1, batch_size // 2))}
    for name in ("val", "test"):
        if (part := getattr(splits, name)) is not None:
            samples = min(EVALUATED, len(part))
            parts[name] = spread(part, samples - (samples > 1 and samples % GROUP == 0))
    return replace(splits, **parts)


def spread(dataset: Any, samples: int) -> Any:
    """Return a Subset of so many samples, evenly spaced over a data set; return a smaller one unchanged."""
    if len(dataset) <= samples:
        return dataset
    return Subset(dataset, np.linspace(0, len(dataset) - 1, samples).astype(np.int64))  # type: ignore[arg-type]
