"""The public names of Lockstep: one training step on any layout.

A project and notebooks import from here, `lockstep.strategies`, `lockstep.testing` and `lockstep.vision` only.
docs/use/train.md describes each name. Everything else in the package is internal.
"""

import importlib
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` marks the names that a type checker may import from here
    from lockstep.arithmetic.order import hash64 as hash64
    from lockstep.checkpoint.weights import copy_weights as copy_weights
    from lockstep.checkpoint.weights import load_weights as load_weights
    from lockstep.commands.api import Composed as Composed
    from lockstep.commands.api import compose as compose
    from lockstep.commands.api import train as train
    from lockstep.commands.command import command as command
    from lockstep.data.datasets import ArrayDataset as ArrayDataset
    from lockstep.data.splits import Source as Source
    from lockstep.data.splits import Spec as Spec
    from lockstep.data.user_data import DataModule as DataModule
    from lockstep.errors import UserError as UserError
    from lockstep.errors import WorkerFailed as WorkerFailed
    from lockstep.job.job import Job as Job
    from lockstep.launch.local import launch as launch
    from lockstep.launch.process_group import gather_objects as gather_objects
    from lockstep.launch.signals import Interrupted as Interrupted
    from lockstep.lightning.epochs import is_last_step as is_last_step
    from lockstep.report.summary import weights_sha256 as weights_sha256
    from lockstep.step.batch import StepBatch as StepBatch
    from lockstep.step.metrics import Count as Count
    from lockstep.step.metrics import ExactMean as ExactMean
    from lockstep.trainer.trainer import Trainer as Trainer

# The module of each name. It is imported at first use, because Hydra, torch and Lightning take seconds to import.
HOMES = {
    "ArrayDataset": "lockstep.data.datasets",
    "Composed": "lockstep.commands.api",
    "Count": "lockstep.step.metrics",
    "DataModule": "lockstep.data.user_data",
    "ExactMean": "lockstep.step.metrics",
    "Interrupted": "lockstep.launch.signals",
    "Job": "lockstep.job.job",
    "Source": "lockstep.data.splits",
    "Spec": "lockstep.data.splits",
    "StepBatch": "lockstep.step.batch",
    "Trainer": "lockstep.trainer.trainer",
    "UserError": "lockstep.errors",
    "WorkerFailed": "lockstep.errors",
    "command": "lockstep.commands.command",
    "compose": "lockstep.commands.api",
    "copy_weights": "lockstep.checkpoint.weights",
    "gather_objects": "lockstep.launch.process_group",
    "hash64": "lockstep.arithmetic.order",
    "is_last_step": "lockstep.lightning.epochs",
    "launch": "lockstep.launch.local",
    "load_weights": "lockstep.checkpoint.weights",
    "train": "lockstep.commands.api",
    "weights_sha256": "lockstep.report.summary",
}
__all__ = list(HOMES)

command_started_at = time.time()  # a command imports this module first
# libgomp reads this variable once, when torch is imported. Threads that wait for each other then sleep after 1,000
# spins instead of 300,000, which would occupy the cores of a busy machine (docs/decisions.md). A wait policy
# that the user has set stays in force.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


if not TYPE_CHECKING:  # a type checker must report names that are not imported above

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use."""
        if name not in HOMES:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
        return getattr(importlib.import_module(HOMES[name]), name)
