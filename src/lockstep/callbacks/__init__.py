"""What happens beside training: measuring, showing, keeping."""

from lockstep.callbacks.console import Console
from lockstep.callbacks.dashboard import Dashboard
from lockstep.callbacks.ema import EMA
from lockstep.callbacks.first_page import TensorBoard
from lockstep.callbacks.meter import Meter
from lockstep.callbacks.pictures import Pictures
from lockstep.callbacks.preemption import Preemption
from lockstep.callbacks.ranks import DummyBatchOnEmptyRank, ReplicaConsistencyCheck
from lockstep.checkpoint.callback import Checkpoint

__all__ = [
    "EMA",
    "Checkpoint",
    "Console",
    "Dashboard",
    "DummyBatchOnEmptyRank",
    "Meter",
    "Pictures",
    "Preemption",
    "ReplicaConsistencyCheck",
    "TensorBoard",
]
