"""A network that is slow on some ranks, and two mistakes. Tests copy this file into a project as `uneven`."""

import time

import lightning.pytorch as pl

from lockstep.vision.models import SmallCNN

SLEEP = 0.03  # seconds of each piece on a slow rank


class Uneven(SmallCNN):
    """Makes ranks slow for a while: `slow` lists `[rank, first step, step after the last]`, 0-based."""

    def __init__(self, slow=(), **options):
        super().__init__(**options)
        self.slow = slow

    def training_step(self, batch, batch_idx):
        now = self.trainer.global_step
        if any(rank == self.global_rank and first <= now < last for rank, first, last in self.slow):
            time.sleep(SLEEP)
        return super().training_step(batch, batch_idx)


class TooEarly(pl.Callback):
    """Lets changes take effect at the next step, although loader processes have fetched it."""

    def setup(self, trainer, pl_module, stage):
        from lockstep_extras.rebalance import rebalancer as hook

        hook.fetched_ahead = lambda trainer: 0


class Apart(pl.Callback):
    """Lets changes take effect on each rank a step later than on the rank before it."""

    def setup(self, trainer, pl_module, stage):
        from lockstep_extras.rebalance.assignment import MovingAssignment

        change, rank = MovingAssignment.change, trainer.global_rank
        MovingAssignment.change = lambda assignment, first, now, counts: change(assignment, first + rank, now, counts)
