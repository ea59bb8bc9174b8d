"""Predict images without labels with a trained model."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.callbacks import EvaluationSeed
from lockstep.checkpoint import io as checkpoint_io
from lockstep.config.check import Config
from lockstep.config.instantiate import locate
from lockstep.config.value_checks import whole_number
from lockstep.data import Spec, Splits
from lockstep.data.transforms import as_evaluated
from lockstep.errors import UserError
from lockstep.job.build import make_module, make_trainer
from lockstep.job.evaluation import config_of, find_checkpoint_and_record, spec_of, weights_must_fit
from lockstep.job.job import Job
from lockstep.job.worker_setup import set_up_worker
from lockstep.launch.environment import environment
from lockstep.launch.process_group import gather_objects
from lockstep.launch.process_lifetime import in_new_thread
from lockstep.lightning.hooks import overrides_method
from lockstep.report.prediction_table import first_rows, note_on_numbers, write_masks, write_predictions
from lockstep.report.summary import summarise, write_summary
from lockstep.text import join_names, plural
from lockstep.trainer.trainer import Trainer

LOG = logging.getLogger("lockstep")


def config_and_spec(raw: Mapping[str, Any]) -> tuple[Config, Spec]:
    """Return the config of a prediction, and the spec of the images that the checkpoint was trained on.

    Raises:
        CheckpointError, UserError: see `find_checkpoint_and_record` and `config_of`.
    """
    path, record = find_checkpoint_and_record(raw)
    return config_of(path, record, raw), spec_of(path, record)


def check_top_k(top_k: Any, spec: Spec) -> None:
    """Check `top_k`."""
    if top_k is None:
        return
    if spec.task != "classification":
        raise UserError(f"top_k={top_k}: the model is for {spec.task}, without one class per image: leave it out")
    if whole_number(1)("top_k", top_k) > spec.num_classes:
        raise UserError(f"top_k={top_k}: must be at most {spec.num_classes}, the number of the model's classes")


@in_new_thread  # user code may start threads, and this process must be able to fork
def open_files(images: Any, reader: dict[str, Any], config: Config, spec: Spec) -> Any:
    """Open the images to be predicted, with the transforms of evaluation.

    Args:
        images: the value of `images=`.
        reader: the data set that reads them, by its `_target_`. It gets their size and channels, and the options
            `background` and `bits` that the data of the training had.
    """
    reading = {key: config.data[key] for key in ("background", "bits") if key in config.data}
    options = {key: value for key, value in (reader | reading).items() if key != "_target_"}
    make = locate("reader._target_", str(reader.get("_target_")))
    files = make(images, spec.image_size, spec.channels, **options)
    if about := getattr(files, "about", ""):
        LOG.info("images: %s", about)
    return as_evaluated(files, config.data, spec)


def as_splits(spec: Spec, images: Any) -> Splits:
    """Return splits with the images to be predicted in place of the test set."""
    return Splits(train=range(1), val=None, test=images, spec=spec, fingerprint="")


def load_module(config: Config, splits: Splits) -> pl.LightningModule:
    """Return the module with the weights of `config.checkpoint`, in evaluation mode.

    Raises:
        CheckpointError: The file can't be read.
        UserError: Its weights do not fit the model that it names.
    """
    module = make_module(config, splits)
    with weights_must_fit(config):
        module.load_state_dict(checkpoint_io.load(str(config.checkpoint), broadcast=True)["state_dict"])
    return module.eval()


def prediction_step(module: pl.LightningModule) -> Callable[[Any, int], Any]:
    """Return what predicts a batch `(images, numbers)`: the module's `predict_step`, or else its `forward`."""
    if overrides_method(module, "predict_step", pl.LightningModule):
        return module.predict_step
    return lambda batch, batch_idx: module(batch[0])


class PredictionCollector(pl.Callback):
    """Collects what the module's `predict_step` returns, with the images' numbers.

    Attributes:
        predictions: for each batch so far the images' numbers, int64 [n], and the rows, float64 [n, k], or masks,
            uint8 [n, H, W]. The number -1 stands for an image that can't be decoded.
    """

    def __init__(self) -> None:
        self.predictions: list[tuple[Tensor, Tensor]] = []

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        ids = batch[1]
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != ids.shape:
            returned = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            has_method = overrides_method(type(pl_module), "predict_step", pl.LightningModule)
            method = f"{type(pl_module).__name__}.{'predict_step' if has_method else 'forward'}"
            raise UserError(
                f"{method} returned {returned}: it must return a tensor with {plural(len(ids), 'row')}, "
                "one for each image"
            )
        masks = outputs.dtype == torch.uint8 and outputs.ndim == 3
        self.predictions.append((ids.cpu(), (outputs if masks else outputs.double().reshape(len(ids), -1)).cpu()))


class PredictionJob(Job):
    """A prediction of images without labels; see `Job`.

    Args:
        top_k: how many classes to write for each image; None: see `write_predictions`.
    """

    name = "predict"

    def __init__(self, config: Config, splits: Splits, folder: Path, top_k: int | None) -> None:
        set_up_worker(config, folder)
        super().__init__(config, splits, folder, config.checkpoint)
        self.top_k, self._collector = top_k, PredictionCollector()
        self._of_forward = ""  # the module's class if it has no predict_step

    def build_module(self) -> pl.LightningModule:
        """Build the module with the checkpoint's weights."""
        module = load_module(self.config, self.splits)
        has_step = overrides_method(module, "predict_step", pl.LightningModule)
        self._of_forward = "" if has_step else type(module).__name__
        module.predict_step = prediction_step(module)  # type: ignore[method-assign]
        return module

    def build_trainer(self, module: pl.LightningModule) -> Trainer:
        """Build the trainer, which collects the predictions."""
        self._began = time.perf_counter()
        return make_trainer(self.config, self.folder, [EvaluationSeed(), self._collector], run=self)

    def finish(self) -> dict[str, Any]:
        """Write predictions.csv, or masks as images, and the summary on rank zero. Return the summary."""
        splits, folder = self.splits, self.folder
        parts = gather_objects(self._collector.predictions)
        if not any(parts):
            raise UserError("predict(job) has ended without trainer.predict: it must call it once")
        speed = len(splits.test) / (time.perf_counter() - self._began)
        ids, rows = (torch.cat(each) for each in zip(*itertools.chain(*parts), strict=True))
        summary = summarise(self.config, splits, folder, "completed", None)
        if environment().rank == 0:
            write = write_masks if rows.dtype == torch.uint8 else partial(write_predictions, top_k=self.top_k)
            broken = write(folder / "predictions.csv", splits.test.names, splits.spec, ids, rows)
            summary |= {"images": len(splits.test), "broken": broken}
            summary["throughput"]["samples_per_second"] = speed
            write_summary(folder / "summary.json", summary)
            print(first_rows(folder / "predictions.csv"), flush=True)
            if self._of_forward and (note := note_on_numbers(self._of_forward, splits.spec, ids, rows)):
                LOG.warning(note)
            LOG.info("%d images, %.0f images/s: %s", len(splits.test), speed, folder / "predictions.csv")
            if broken:
                LOG.warning("images that can't be decoded have empty rows: %s", join_names(broken, 5))
        return summary


def predict(
    config: Config, splits: Splits, folder: Path, top_k: int | None = None, function: Callable[[Job], Any] | None = None
) -> dict[str, Any]:
    """Call `function(job)` in this worker, and return the summary. Every worker of the layout must call it.

    The trainer calls the module's `predict_step`, or its `forward` if it has none.

    Args:
        top_k: how many classes to write for each image; None: see `write_predictions`.
        function: None: `predict` of the project's `src/predict.py`.

    Raises:
        UserError: `top_k` is given, but the module does not return probabilities.
    """
    job = PredictionJob(config, splits, folder, top_k)
    job.call(function)
    return job.finish()
