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
from lockstep.data import Spec, Splits
from lockstep.errors import UserError
from lockstep.launch.process_group import gather_objects
from lockstep.run.build import make_data, make_module, make_trainer
from lockstep.run.evaluation import config_of, find_checkpoint_and_record, spec_of, weights_must_fit
from lockstep.run.prediction_table import first_rows, write_masks, write_predictions
from lockstep.run.summary import summarise, write_summary
from lockstep.run.worker_setup import set_up_worker
from lockstep.step.passes import overrides_method
from lockstep.text import join_names, plural

LOG = logging.getLogger("lockstep")


def config_and_spec(raw: Mapping[str, Any]) -> tuple[Config, Spec]:
    """Return the config of a prediction, and the spec of the images that the checkpoint was trained on.

    Raises:
        CheckpointError, UserError: see `find_checkpoint_and_record` and `config_of`.
    """
    path, record = find_checkpoint_and_record(raw)
    return config_of(path, record, raw), spec_of(path, record)


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


def predict(config: Config, splits: Splits, folder: Path, top_k: int | None = None) -> dict[str, Any]:
    """Predict in this worker, and return the summary. Every worker of the layout must call it.

    It calls the module's `predict_step`, or its `forward` if it has none. Rank zero writes predictions.csv, and masks
    as images.

    Args:
        top_k: how many classes to write for each image; None: see `write_predictions`.

    Raises:
        UserError: `top_k` is given, but the module does not return probabilities.
    """
    set_up_worker(config, folder)
    module = load_module(config, splits)
    module.predict_step = prediction_step(module)  # type: ignore[method-assign]
    data, collector = make_data(config, splits), PredictionCollector()
    trainer = make_trainer(config, folder, [EvaluationSeed(), collector])
    began = time.perf_counter()
    trainer.predict(module, datamodule=data, return_predictions=False)
    parts = gather_objects(collector.predictions)
    speed = len(splits.test) / (time.perf_counter() - began)
    ids, rows = (torch.cat(each) for each in zip(*itertools.chain(*parts), strict=True))
    summary = summarise(config, splits, folder, "completed", None)
    if trainer.is_global_zero:
        write = write_masks if rows.dtype == torch.uint8 else partial(write_predictions, top_k=top_k)
        broken = write(folder / "predictions.csv", splits.test.names, splits.spec, ids, rows)
        summary |= {"images": len(splits.test), "broken": broken}
        summary["throughput"]["samples_per_second"] = speed
        write_summary(folder / "summary.json", summary)
        print(first_rows(folder / "predictions.csv"), flush=True)
        LOG.info("%d images, %.0f images/s: %s", len(splits.test), speed, folder / "predictions.csv")
        if broken:
            LOG.warning("images that can't be decoded have empty rows: %s", join_names(broken, 5))
    return summary
