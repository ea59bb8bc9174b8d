"""Compare the weights at the end of training with those of another machine."""

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.errors import WorkerFailed
from lockstep.report.summary import weights_sha256

LOG = logging.getLogger("lockstep")


class Golden(Callback):
    """Fail a run whose final weights differ from the recorded ones.

    Args:
        sha256: `weights_sha256` from the summary.json of a run with this config.
    """

    def __init__(self, sha256: str) -> None:
        self.sha256 = str(sha256)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = trainer.strategy.lightning_module_state_dict()  # every rank calls it, but only rank zero gets all
        if not trainer.is_global_zero:
            return
        mine = weights_sha256(weights)
        if mine != self.sha256:
            raise WorkerFailed(f"weights_sha256={mine}: must be the recorded {self.sha256}")
        LOG.info("weights_sha256 is the recorded one: %s", mine)
