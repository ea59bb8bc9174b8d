"""Fill TensorBoard's first page.

It has the validation of all runs, a page of the most important curves, texts, and HParams.
"""

import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import OmegaConf
from torch.utils.tensorboard.summary import hparams

from lockstep.report.loggers import hyper_parameters

FIRST = "headline/"  # TensorBoard sorts the groups of tags by name, and opens the first two
COUNTS = ("/correct", "/count")

FORKED = "(_step|_epoch)?"  # Lightning's suffix for a name that is logged at steps and at epoch ends
# Title of a chart -> its tags, regular expressions; those of the model's own metric come after the first two.
LOSSES = {
    "training loss": [f"^train/loss{FORKED}$"],
    "validation loss": [f"^val/loss{FORKED}$"],
}
OTHERS = {
    "speed, samples per second": ["^workers/samples_per_second$"],
    "a step and its waiting for data, seconds": ["^workers/step_seconds$", "^workers/data_wait$"],
    "peak memory, GiB": ["^workers/peak_gib$"],
    "validation accuracy of each class": ["^val_class/"],
    "norm of the gradient": ["^train/grad_norm$"],
    "learning rate": ["^train/lr$"],
}


class TensorBoard(TensorBoardLogger):
    """Lightning's TensorBoardLogger, with two curves of all runs on the first page: val/loss and another.

    It leaves out curves without information: the epoch, which is a straight line, and counts, which accuracies show.

    Args:
        first_page: the other one, the metric by which the best checkpoint is chosen.
        options: as for TensorBoardLogger.
    """

    def __init__(self, *, first_page: str, **options: Any) -> None:
        super().__init__(**options)
        self._first = {tag: FIRST + tag.replace("/", "_") for tag in ("val/loss", first_page)}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        shown = {tag: value for tag, value in metrics.items() if tag != "epoch" and not tag.endswith(COUNTS)}
        first = {name: shown[tag] for tag, name in self._first.items() if tag in shown}
        super().log_metrics(shown | first, step)


def charts(metric: str) -> dict[str, list[str]]:
    """Return the page of the most important curves: title of a chart -> its tags, regular expressions.

    Args:
        metric: name of the model's own metric, without `val/`.
    """
    name = "accuracy" if metric == "acc" else metric
    splits = {"training": "train", "validation": "val"}
    of_metric = {f"{split} {name}": [f"^{tag}/{re.escape(metric)}{FORKED}$"] for split, tag in splits.items()}
    return LOSSES | of_metric | OTHERS


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return the Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def write(writer: Any, step: int, config: Mapping[str, Any], headline: str, metric: str) -> None:
    """Write the page of charts, the texts and the run's row of the HParams page with a SummaryWriter."""
    page = {title: ["Multiline", tags] for title, tags in charts(metric).items()}
    writer.add_custom_scalars({"lockstep": page})
    writer.add_text("about", f"```\n{headline}\n```", step)
    text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
    writer.add_text("config", f"```yaml\n{text}```", step)
    # Without its columns, which TensorBoard finds by itself. The logger's own log_hyperparams would add the metrics as
    # curves of one point.
    _, *session = hparams(dict(hyper_parameters(config)), {})
    for summary in session:
        writer.file_writer.add_summary(summary)
