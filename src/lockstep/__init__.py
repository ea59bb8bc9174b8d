"""One training step, whoever computes it: what project/, scripts and notebooks import, `from lockstep import train`.

Everything below this page is the engine's own, but for `lockstep.testing`; docs/use/python.md describes the names.
"""

import importlib
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.arithmetic.order import hash64
    from lockstep.callbacks.meter import find as find_meter
    from lockstep.checkpoint.weights import begin as load_weights
    from lockstep.checkpoint.weights import fill as copy_weights
    from lockstep.checkpoint.weights import told as weights_message
    from lockstep.config.checks import matching
    from lockstep.data.data_module import DataModule
    from lockstep.data.datasets import ArrayDataset, Source, Spec
    from lockstep.errors import UserError
    from lockstep.launch.endings import WorkerFailed
    from lockstep.launch.machine import cores
    from lockstep.launch.process_group import of_ranks as gather_objects
    from lockstep.launch.signals import Interrupted
    from lockstep.run.api import Composed, compose, train
    from lockstep.run.lines import peak_lr
    from lockstep.run.loggers import hyper_parameters
    from lockstep.step.batch import StepBatch
    from lockstep.step.lightning_quirks import is_last_step
    from lockstep.step.metrics import Count, ExactMean
    from lockstep.step.untimed import untimed
    from lockstep.text import join_names, plural

__all__ = [
    "ArrayDataset",
    "Composed",
    "Count",
    "DataModule",
    "ExactMean",
    "Interrupted",
    "Source",
    "Spec",
    "StepBatch",
    "UserError",
    "WorkerFailed",
    "compose",
    "copy_weights",
    "cores",
    "find_meter",
    "gather_objects",
    "hash64",
    "hyper_parameters",
    "is_last_step",
    "join_names",
    "load_weights",
    "matching",
    "peak_lr",
    "plural",
    "train",
    "untimed",
    "weights_message",
]
# Where each name is, and what it is called there. It is imported at first use: Hydra, torch and Lightning take seconds
# that a mere import need not wait.
HOMES = {
    "ArrayDataset": "lockstep.data.datasets",
    "Composed": "lockstep.run.api",
    "Count": "lockstep.step.metrics",
    "DataModule": "lockstep.data.data_module",
    "ExactMean": "lockstep.step.metrics",
    "Interrupted": "lockstep.launch.signals",
    "Source": "lockstep.data.datasets",
    "Spec": "lockstep.data.datasets",
    "StepBatch": "lockstep.step.batch",
    "UserError": "lockstep.errors",
    "WorkerFailed": "lockstep.launch.endings",
    "compose": "lockstep.run.api",
    "copy_weights": "lockstep.checkpoint.weights:fill",
    "cores": "lockstep.launch.machine",
    "find_meter": "lockstep.callbacks.meter:find",
    "gather_objects": "lockstep.launch.process_group:of_ranks",
    "hash64": "lockstep.arithmetic.order",
    "hyper_parameters": "lockstep.run.loggers",
    "is_last_step": "lockstep.step.lightning_quirks",
    "join_names": "lockstep.text",
    "load_weights": "lockstep.checkpoint.weights:begin",
    "matching": "lockstep.config.checks",
    "peak_lr": "lockstep.run.lines",
    "plural": "lockstep.text",
    "train": "lockstep.run.api",
    "untimed": "lockstep.step.untimed",
    "weights_message": "lockstep.checkpoint.weights:told",
}

began = time.time()  # of a command: this is the first that it imports
# libgomp reads it once, when torch is imported: threads that wait for each other sleep after 1,000 turns, not 300,000,
# which would take a busy machine's cores (docs/decisions/threads.md). A policy that the user has set stays as it is.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


if not TYPE_CHECKING:  # to a type checker, a name that is not imported above does not exist

    def __getattr__(name: str) -> Any:
        if name not in HOMES:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
        module, _, attribute = HOMES[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)
