"""Compares the weights at the end of training with those that another machine had."""

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep import WorkerFailed, weights_sha256

LOG = logging.getLogger("lockstep")


class Golden(Callback):
    """Ends a run with an error if it has not come to the recorded weights.

    Args:
        sha256: `weights_sha256` of a run with this config, as its summary.json has it.
    """

    def __init__(self, sha256: str) -> None:
        self.sha256 = str(sha256)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = weights_sha256(trainer.strategy.lightning_module_state_dict())
        if mine != self.sha256:
            raise WorkerFailed(f"weights_sha256 is {mine}, and the recorded one is {self.sha256}")
        if trainer.is_global_zero:
            LOG.info("weights_sha256 is the recorded one: %s", mine)
