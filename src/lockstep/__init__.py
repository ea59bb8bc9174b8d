"""One training step, whoever computes it: what project/, scripts and notebooks import, `from lockstep import train`.

Everything below this page is the engine's own, but for `lockstep.testing`; docs/use/python.md describes the names.
"""

import importlib
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.arithmetic.order import hash64
    from lockstep.callbacks.meter import find_meter
    from lockstep.checkpoint.weights import copy_weights, load_weights, weights_message
    from lockstep.config.value_checks import match_patterns
    from lockstep.data.data_module import DataModule
    from lockstep.data.datasets import ArrayDataset, Source, Spec
    from lockstep.errors import UserError
    from lockstep.launch.machine import available_cores
    from lockstep.launch.outcomes import WorkerFailed
    from lockstep.launch.process_group import gather_objects
    from lockstep.launch.signals import Interrupted
    from lockstep.run.api import Composed, compose, train
    from lockstep.run.loggers import hyper_parameters
    from lockstep.run.report_lines import peak_lr
    from lockstep.step.batch import StepBatch
    from lockstep.step.lightning_quirks import is_last_step
    from lockstep.step.metrics import Count, ExactMean
    from lockstep.step.timing import exclude_from_timing
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
    "available_cores",
    "compose",
    "copy_weights",
    "exclude_from_timing",
    "find_meter",
    "gather_objects",
    "hash64",
    "hyper_parameters",
    "is_last_step",
    "join_names",
    "load_weights",
    "match_patterns",
    "peak_lr",
    "plural",
    "train",
    "weights_message",
]
# Where each name is. It is imported at first use: Hydra, torch and Lightning take seconds that a mere import need not
# wait.
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
    "WorkerFailed": "lockstep.launch.outcomes",
    "available_cores": "lockstep.launch.machine",
    "compose": "lockstep.run.api",
    "copy_weights": "lockstep.checkpoint.weights",
    "exclude_from_timing": "lockstep.step.timing",
    "find_meter": "lockstep.callbacks.meter",
    "gather_objects": "lockstep.launch.process_group",
    "hash64": "lockstep.arithmetic.order",
    "hyper_parameters": "lockstep.run.loggers",
    "is_last_step": "lockstep.step.lightning_quirks",
    "join_names": "lockstep.text",
    "load_weights": "lockstep.checkpoint.weights",
    "match_patterns": "lockstep.config.value_checks",
    "peak_lr": "lockstep.run.report_lines",
    "plural": "lockstep.text",
    "train": "lockstep.run.api",
    "weights_message": "lockstep.checkpoint.weights",
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
        return getattr(importlib.import_module(HOMES[name]), name)
