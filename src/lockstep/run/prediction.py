"""A trained model's word on images that nobody has labelled."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

from lockstep.callbacks import Heartbeat, checkpoint_io
from lockstep.launch import logs
from lockstep.launch.atomic import replacing
from lockstep.launch.environment import environment
from lockstep.loading import Spec, Splits, open_data
from lockstep.run import fast
from lockstep.run.build import make_data, make_module, make_trainer
from lockstep.run.config import Config
from lockstep.run.evaluation import config_of, misfit, record_of, some
from lockstep.run.summary import summarise, write_summary
from project.data import ImageFiles

LOG = logging.getLogger("lockstep")


def config_and_spec(path: Path, raw: Mapping[str, Any]) -> tuple[Config, Spec]:
    """The config of a prediction, and what the checkpoint's images were: from the checkpoint, else from its data set.

    Raises:
        CheckpointError, Refusal: as `record_of`, `config_of`; no spec in the checkpoint, and no data set either.
    """
    record = record_of(path)
    config, spec = config_of(path, record, {"exact": False, **raw}), record.get("spec")
    return config, Spec(**spec) if spec else open_data(config.data, config.data_dir, config.seed).spec


def as_splits(spec: Spec, images: Any) -> Splits:
    """Images to be predicted, in the place of the test set."""
    return Splits(train=range(1), val=None, test=images, spec=spec, fingerprint="")


def load_module(config: Config, splits: Splits) -> pl.LightningModule:
    """The module with the weights of `config.checkpoint`, in evaluation mode.

    Raises:
        CheckpointError: the file can't be used.
        Refusal: its weights are not those of the model that it names.
    """
    module = make_module(config, splits)
    assert config.checkpoint is not None
    try:
        module.load_state_dict(checkpoint_io.load(config.checkpoint)["state_dict"])
    except RuntimeError as error:
        raise misfit(config, error) from error
    return module.eval()


class Predictor(pl.LightningModule):
    """Any module whose `forward` maps images to logits or log-probabilities; its predictions are ids int64 [n] and
    probabilities float64 [n, C]."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.module.on_after_batch_transfer(batch, dataloader_idx)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        x, ids = batch
        return ids, self.module(x).double().softmax(dim=1)


def predict(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Predicts in this worker; returns the summary. Every worker of the layout calls it."""
    rank = environment().rank
    logs.configure(folder, rank)
    fast.set_up(config.layout, config.threads, config.allocator)
    predictor = Predictor(load_module(config, splits))
    data = make_data(config, splits, rank)
    trainer = make_trainer(replace(config, logger={}), folder, [Heartbeat()])
    own: Any = trainer.predict(predictor, datamodule=data) or []  # None where there are more processes than batches
    parts = [own]
    if trainer.world_size > 1:
        parts = [None] * trainer.world_size
        dist.all_gather_object(parts, own)
    summary = summarise(config, folder, "completed", None)
    if rank == 0:
        found = {
            int(i): row
            for part in parts
            for ids, rows in part
            for i, row in zip(ids.tolist(), rows.tolist(), strict=True)
        }
        broken = write(folder / "predictions.csv", splits.test, splits.spec.classes, found)
        summary |= {"images": len(splits.test), "broken": broken}
        write_summary(folder / "summary.json", summary)
        LOG.info("%d images: %s", len(splits.test), folder / "predictions.csv")
        if broken:
            LOG.warning("can't be decoded, so their rows are empty: %s", some(broken))
    return summary


def write(path: Path, images: ImageFiles, classes: Iterable[str], found: Mapping[int, list[float]]) -> list[str]:
    """Writes the table `file, predicted, probability, <class>...`, files in sorted order; returns the files whose row
    is empty, since they could not be decoded."""
    classes, broken = list(classes), []
    with replacing(path) as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
        table = csv.writer(text)
        table.writerow(["file", "predicted", "probability", *classes])
        for index, name in enumerate(images.names):
            row = found.get(index)
            if row is None:
                broken.append(str(name))
                table.writerow([name, "", "", *[""] * len(classes)])
                continue
            best = max(range(len(row)), key=row.__getitem__)
            table.writerow([name, classes[best], *(f"{value:.6f}" for value in (row[best], *row))])
        text.detach()
    return broken
