"""A trained model's word on images that nobody has labelled."""

import csv
import io
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint import io as checkpoint_io
from lockstep.config.check import Config
from lockstep.data import Spec, Splits
from lockstep.errors import UserError
from lockstep.files import replacing
from lockstep.run.build import make_data, make_module, make_trainer
from lockstep.run.evaluation import config_of, find_checkpoint_and_record, some, spec_of, weights_must_fit
from lockstep.run.summary import summarise, write_summary
from lockstep.run.worker_setup import set_up_worker
from lockstep.step.passes import overrides_method

LOG = logging.getLogger("lockstep")
SHOWN_ROWS, SHOWN_WIDTH, LONGEST_CELL = 5, 100, 50  # of the table on the console; rows, characters, characters
FORMULA = tuple("=+-@\t\r")  # what a spreadsheet would compute begins with one of them


def config_and_spec(raw: Mapping[str, Any]) -> tuple[Config, Spec]:
    """The config of a prediction, and what the checkpoint's images were; raises as
    `find_checkpoint_and_record` and `config_of`."""
    path, record = find_checkpoint_and_record(raw)
    return config_of(path, record, raw), spec_of(path, record)


def as_splits(spec: Spec, images: Any) -> Splits:
    """Images to be predicted, in the place of the test set."""
    return Splits(train=range(1), val=None, test=images, spec=spec, fingerprint="")


def load_module(config: Config, splits: Splits) -> pl.LightningModule:
    """The module with the weights of `config.checkpoint`, in evaluation mode.

    Raises:
        CheckpointError: the file can't be used.
        UserError: its weights are not those of the model that it names.
    """
    module = make_module(config, splits)
    with weights_must_fit(config):
        module.load_state_dict(checkpoint_io.load(str(config.checkpoint), together=True)["state_dict"])
    return module.eval()


class PredictionCollector(pl.Callback):
    """Keeps what the module's `predict_step` returns of each image, by the image's number.

    Attributes:
        predictions: numbers int64 [n] and float64 rows [n, k] of the batches so far; -1 is an image that can't be
            decoded.
    """

    def __init__(self) -> None:
        self.predictions: list[tuple[Tensor, Tensor]] = []

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        ids = batch[1]
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != ids.shape:
            returned = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            name = type(pl_module).__name__
            raise UserError(
                f"{name}.predict_step: must return a tensor with a row for each of {len(ids)} images: {returned}"
            )
        self.predictions.append((ids.cpu(), outputs.double().reshape(len(ids), -1).cpu()))


def predict(config: Config, splits: Splits, folder: Path, top_k: int | None = None) -> dict[str, Any]:
    """Predicts in this worker, by the module's own `predict_step`, else its `forward`; returns the summary. Every
    worker of the layout calls it.

    Raises:
        UserError: `top_k` classes are asked for, and the module's answers are no probabilities.
    """
    rank = set_up_worker(config, folder)
    module = load_module(config, splits)
    if not overrides_method(module, "predict_step", pl.LightningModule):
        module.predict_step = lambda batch, batch_idx: module(batch[0])  # type: ignore[method-assign, misc]
    data, answers = make_data(config, splits, rank), PredictionCollector()
    trainer = make_trainer(config, folder, [answers])
    began = time.perf_counter()
    trainer.predict(module, datamodule=data, return_predictions=False)
    parts: list[Any] = [answers.predictions]
    if trainer.world_size > 1:
        parts = [None] * trainer.world_size
        dist.all_gather_object(parts, answers.predictions)
    speed = len(splits.test) / (time.perf_counter() - began)
    ids, rows = (torch.cat(each) for each in zip(*itertools.chain(*parts), strict=True))
    summary = summarise(config, folder, "completed", None)
    if rank == 0:
        broken = write(folder / "predictions.csv", splits.test.names, splits.spec.classes, ids, rows, top_k)
        summary |= {"images": len(splits.test), "broken": broken}
        summary["throughput"]["samples_per_second"] = speed
        write_summary(folder / "summary.json", summary)
        print(first_rows(folder / "predictions.csv"), flush=True)
        LOG.info("%d images, %.0f images/s: %s", len(splits.test), speed, folder / "predictions.csv")
        if broken:
            LOG.warning("can't be decoded, so their rows are empty: %s", some(broken))
    return summary


def write(
    path: Path, names: Sequence[Any], classes: Sequence[str], ids: Tensor, rows: Tensor, top_k: int | None = None
) -> list[str]:
    """Writes a table with a row per file, and returns the files whose row is empty, since they could not be decoded.

    Rows that are probabilities of the classes (not negative, with the sum 1) get the likeliest class and its
    probability before all of them, or the `top_k` likeliest; others stand there as they are.

    Args:
        ids: the file of each row; below 0: of none.
        rows: numbers [n, k].
    """
    known, count = rows[ids >= 0], rows.shape[1]
    sure = count == len(classes) and bool((known >= 0).all() and ((known.sum(1) - 1).abs() < 1e-4).all())
    if top_k and not sure:
        raise UserError(
            f"top_k={top_k}: the model's predict_step returns no probabilities of its classes; leave it out"
        )
    shown = [_inert(name, "'") for name in classes]
    columns = shown if count == len(classes) else [f"value_{number}" for number in range(count)]
    if sure:
        best, at = known.topk(top_k or 1)
        further = [f"{name}_{place}" for place in range(2, best.shape[1] + 1) for name in ("predicted", "probability")]
        columns = ["predicted", "probability", *further, *([] if top_k else columns)]
    place = dict(zip(ids[ids >= 0].tolist(), range(len(known)), strict=True))
    broken = []
    with replacing(path) as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
        table = csv.writer(text)
        table.writerow(["file", *columns])
        for index, name in enumerate(map(str, names)):
            row = place.get(index)
            if row is None:
                broken.append(name)
                cells = [""] * len(columns)
            else:
                cells = [] if sure and top_k else [f"{value:.6f}" for value in known[row].tolist()]
                if sure:
                    likely = zip(at[row].tolist(), best[row].tolist(), strict=True)
                    cells = [cell for label, value in likely for cell in (shown[label], f"{value:.6f}")] + cells
            table.writerow([_inert(name, "./"), *cells])
        text.detach()
    return broken


def first_rows(path: Path) -> str:
    """The beginning of a table for the terminal: its first rows, and columns as far as a terminal is wide."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(itertools.islice(csv.reader(file), SHOWN_ROWS + 1))
        more = next(file, None) is not None
    rows = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    fitting = sum(end <= SHOWN_WIDTH for end in itertools.accumulate(width + 2 for width in widths))
    lines = ["  ".join(map(str.ljust, row[: max(1, fitting)], widths)).rstrip() for row in rows]
    return "\n".join([*lines, *["..."] * more])


def _printable(cell: str) -> str:
    cell = cell if len(cell) <= LONGEST_CELL else f"...{cell[3 - LONGEST_CELL :]}"  # of a path the end says more
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cell)


def _inert(text: str, mark: str) -> str:
    return mark + text if text.startswith(FORMULA) else text
