"""A trained model's word on images that nobody has labelled."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.callbacks import Heartbeat, checkpoint_io
from lockstep.launch.atomic import replacing
from lockstep.loading import Spec, Splits
from lockstep.run.build import make_data, make_module, make_trainer
from lockstep.run.config import Config
from lockstep.run.evaluation import config_of, record_of, some, spec_of, weights_must_fit
from lockstep.run.fast import set_up_worker
from lockstep.run.summary import summarise, write_summary
from lockstep.step.stages import parts_of

LOG = logging.getLogger("lockstep")


def config_and_spec(path: Path, raw: Mapping[str, Any]) -> tuple[Config, Spec]:
    """The config of a prediction, and what the checkpoint's images were; raises as `record_of` and `config_of`."""
    record = record_of(path)
    return config_of(path, record, raw), spec_of(path, record)


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
    with weights_must_fit(config):
        module.load_state_dict(checkpoint_io.load(str(config.checkpoint))["state_dict"])
    return module.eval()


class Predictor(pl.LightningModule):
    """Any module whose `forward` maps images to logits or log-probabilities; it predicts the probabilities of a batch's
    classes, by the images' ids."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.module.on_after_batch_transfer(batch, dataloader_idx)

    def stages(self) -> list[nn.Module]:
        return parts_of(self.module)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[int, list[float]]:
        x, ids = batch
        return dict(zip(ids.tolist(), self(x).double().softmax(dim=1).tolist(), strict=True))


def predict(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Predicts in this worker; returns the summary. Every worker of the layout calls it."""
    rank = set_up_worker(config, folder)
    predictor = Predictor(load_module(config, splits))
    data = make_data(config, splits, rank)
    trainer = make_trainer(config, folder, [Heartbeat()])
    own: Any = trainer.predict(predictor, datamodule=data) or []  # None where there are more processes than batches
    parts = [own]
    if trainer.world_size > 1:
        parts = [None] * trainer.world_size
        dist.all_gather_object(parts, own)
    summary = summarise(config, folder, "completed", None)
    if rank == 0:
        found = {image: row for part in parts for batch in part for image, row in batch.items()}
        broken = write(folder / "predictions.csv", splits.test, splits.spec.classes, found)
        summary |= {"images": len(splits.test), "broken": broken}
        write_summary(folder / "summary.json", summary)
        LOG.info("%d images: %s", len(splits.test), folder / "predictions.csv")
        if broken:
            LOG.warning("can't be decoded, so their rows are empty: %s", some(broken))
    return summary


def write(path: Path, images: Any, classes: Iterable[str], found: Mapping[int, list[float]]) -> list[str]:
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
            best = row.index(max(row))
            table.writerow([name, classes[best], *(f"{value:.6f}" for value in (row[best], *row))])
        text.detach()
    return broken
