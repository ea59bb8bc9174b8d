"""The loops over the batches of a validation, test or prediction: each batch is evaluated, on all ranks together."""

from typing import Any

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.trainer.states import TrainerFn

from lockstep.errors import StepRefused
from lockstep.launch.failures import no_silent_end
from lockstep.lightning.strategy import Hooks


class WatchedLoop:
    """For a loop over evaluation batches: each is evaluated, limits count the batches of all ranks, its end may save.

    See it: `validation_step` with `raise StopIteration`; Lightning takes it for the end of the data. A module that
    changes a buffer in `on_validation_end`; a ModelCheckpoint with a monitor saves it before. limit_val_batches=2 on
    two ranks; Lightning evaluates two batches of each rank.
    """

    _data_fetcher: Any
    trainer: Any
    _prefix: str
    num_dataloaders: int

    def setup_data(self) -> None:
        """Make the loader, whose length is what the limit of batches leaves. The data module applies the limit."""
        trainer, name = self.trainer, f"limit_{self._prefix}_batches"
        limit, trainer.evaluated_loader = getattr(trainer, name), None
        try:
            trainer.limits = {name: limit}
            setattr(trainer, name, 1.0 if limit else limit)
            super().setup_data()  # type: ignore[misc]
        finally:
            trainer.limits = {}
            setattr(trainer, name, limit)

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, *args: Any) -> None:
        self._set_position(batch_idx, dataloader_idx)
        with no_silent_end():
            super()._evaluation_step(batch, batch_idx, dataloader_idx, *args)  # type: ignore[misc]

    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, *args: Any) -> None:
        self._set_position(batch_idx, dataloader_idx)
        with no_silent_end():
            super()._predict_step(batch, batch_idx, dataloader_idx, *args)  # type: ignore[misc]

    def _set_position(self, batch_idx: int, dataloader_idx: int) -> None:
        self.trainer.evaluated_loader = dataloader_idx if self.num_dataloaders > 1 else None
        self.trainer.evaluated_batch = batch_idx

    def on_run_end(self) -> Any:
        """End the loop. After a validation inside an epoch, run its hooks and then save.

        Raises:
            StepRefused: its loader has ended early.
        """
        trainer = self.trainer
        trainer.evaluated_loader = None
        batches, expected = self._data_fetcher.fetched, self._data_fetcher.length
        if expected is not None and batches != expected:
            stage = trainer.state.stage.value
            raise StepRefused(f"{stage}: {batches} of {expected} batches were evaluated: the loader must yield all")
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.fit_loop.epoch_loop.seed_hooks(Hooks.EVALUATION_END, trainer.global_step)
        outputs = super().on_run_end()  # type: ignore[misc]
        in_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if in_fit and not trainer.is_last_batch:  # else the end of the epoch follows
            trainer.saves.complete_step()
        return outputs


class WatchedEvaluation(WatchedLoop, _EvaluationLoop):
    """Lightning's loop of an evaluation, see `WatchedLoop`."""

    @property
    def _prefix(self) -> str:  # type: ignore[override]
        return self._stage.dataloader_prefix or ""


class WatchedPrediction(WatchedLoop, _PredictionLoop):
    """Lightning's loop of a prediction, see `WatchedLoop`. A BasePredictionWriter gets lists of numbers, not ranges."""

    _prefix = "predict"

    def _store_data_for_prediction_writer(self, batch_idx: int, dataloader_idx: int) -> bool:
        on_epoch = super()._store_data_for_prediction_writer(batch_idx, dataloader_idx)
        self.current_batch_indices = list(self.current_batch_indices)
        if numbers := self.epoch_batch_indices[dataloader_idx]:
            numbers[-1] = list(numbers[-1])
        return on_epoch


def watched_loop(loop: Any) -> Any:
    """Return a loop over evaluation batches as Lightning has made `loop`, see `WatchedLoop`."""
    if isinstance(loop, _PredictionLoop):
        return WatchedPrediction(loop.trainer, loop.inference_mode)
    return WatchedEvaluation(loop.trainer, loop._trainer_fn, loop._stage, loop.verbose, loop.inference_mode)
