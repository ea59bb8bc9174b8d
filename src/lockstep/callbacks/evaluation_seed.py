"""Give each batch of an evaluation its own random numbers, so that a module which draws some has one score."""

from typing import Any

from lightning.pytorch import Callback

from lockstep.arithmetic.order import evaluation_seed
from lockstep.step.batch import evaluated_split
from lockstep.step.strategy import seed_device


class EvaluationSeed(Callback):
    """Seeds torch's generators before each batch of a validation, a test or a prediction.

    The seed follows from the run's seed and the batch's first sample. So a variational autoencoder, for example, has
    the same validation loss on every layout, and the same random numbers in each validation.
    """

    changes_weights = False  # so the record of settings that affect the weights leaves this callback out

    def _seed(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        data, split = trainer.datamodule, evaluated_split(trainer)
        seed_device(evaluation_seed(data.order.seed, data.first_sample(split, batch_idx)), trainer.strategy.root_device)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _seed
