"""Lockstep's own callbacks: measuring, console, averages, checks. Those that users may change are in project/.

A callback that changes no weights has `changes_weights = False`. The record of settings that affect the weights leaves
it out.
"""

from lockstep.callbacks.console import Console
from lockstep.callbacks.ema import EMA
from lockstep.callbacks.evaluation_seed import EvaluationSeed
from lockstep.callbacks.meter import Meter
from lockstep.callbacks.preemption import Preemption
from lockstep.callbacks.ranks import DummyBatchOnEmptyRank, ReplicaConsistencyCheck
from lockstep.checkpoint.callback import Checkpoint

__all__ = [
    "EMA",
    "Checkpoint",
    "Console",
    "DummyBatchOnEmptyRank",
    "EvaluationSeed",
    "Meter",
    "Preemption",
    "ReplicaConsistencyCheck",
]
