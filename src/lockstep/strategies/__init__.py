"""The strategies of conf/strategy/: how a step's pieces are computed. Each is one class, with a page that names it.

These modules import quickly, because a config is checked with them before torch is imported.
"""

from lockstep.arithmetic.layout import Action as Action
from lockstep.strategies.ddp import DDP as DDP
from lockstep.strategies.dp import DP as DP
from lockstep.strategies.fsdp import FSDP as FSDP
from lockstep.strategies.strategy import RunSettings as RunSettings
from lockstep.strategies.strategy import Strategy as Strategy
