"""What happens beside training: measuring, showing, keeping."""

from lockstep.callbacks.agreement import Agreement
from lockstep.callbacks.checkpoint import Checkpoint
from lockstep.callbacks.console import Console
from lockstep.callbacks.continuation import Continuation
from lockstep.callbacks.dashboard import Dashboard
from lockstep.callbacks.found_pieces import FoundPieces
from lockstep.callbacks.heartbeat import Heartbeat
from lockstep.callbacks.pictures import Pictures
from lockstep.callbacks.preemption import Preemption
from lockstep.callbacks.stand_in import StandIn
from lockstep.callbacks.throughput import Throughput

__all__ = [
    "Agreement",
    "Checkpoint",
    "Console",
    "Continuation",
    "Dashboard",
    "FoundPieces",
    "Heartbeat",
    "Pictures",
    "Preemption",
    "StandIn",
    "Throughput",
]
