"""What TensorBoard shows at first sight: a page of the curves that matter, the run as text, its graph, its HParams."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import OmegaConf
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

LOG = logging.getLogger("lockstep.dashboard")  # to train.log only
COMPARED = ("val/acc", "val/loss", "test/acc", "test/loss", "throughput/samples_per_second")  # on the HParams page
LEFT_OUT = ("callbacks", "logger", "debug", "outputs", "data_dir", "resume", "name")  # no hyper-parameters

FORKED = "(_step|_epoch)?"  # what Lightning adds to a name that is logged both at steps and at epochs' ends
# Title -> tags (regular expressions); a chart each, all on one page.
CHARTS = {
    "loss": [f"^train/loss{FORKED}$", f"^val/loss{FORKED}$"],
    "accuracy": [f"^train/acc{FORKED}$", f"^val/acc{FORKED}$"],
    "speed, samples per second": ["^throughput/samples_per_second$"],
    "where a step's time goes, seconds": ["^split/"],
    "speed of each rank, its samples per second of computing": ["^rank_speed/"],
    "peak memory, GiB": ["^memory/peak_gib$", "^rank_memory/"],
    "validation accuracy of each class": ["^val_class/"],
    "norm of the gradient": ["^grad_norm$"],
    "learning rate": ["^lr$"],
}


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def write(writer: SummaryWriter, step: int, config: Mapping[str, Any], headline: str) -> None:
    """Page, texts, and the run's row of the HParams page."""
    writer.add_custom_scalars({"lockstep": {title: ["Multiline", tags] for title, tags in CHARTS.items()}})
    writer.add_text("about", f"```\n{headline}\n```", step)
    text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
    writer.add_text("config", f"```yaml\n{text}```", step)
    # The row shows the last point of curves that the run has anyway. The logger's own log_hyperparams would ask for
    # their values now, and draw them as points of their own.
    columns, row, _ = hparams(dict(hyper_parameters(config)), dict.fromkeys(COMPARED, 0.0))
    for summary in (columns, row):
        _file(writer).add_summary(summary)


def end(writer: SummaryWriter) -> None:
    """The HParams page is told that the run has ended well."""
    _file(writer).add_summary(hparams({}, {})[2])


def _file(writer: SummaryWriter) -> Any:
    return writer.file_writer


def hyper_parameters(config: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, bool | int | float | str]]:
    """The plain leaves of a config by dotted key, without what is null or no hyper-parameter."""
    for key, value in config.items():
        if value is None or key.startswith("_") or (not above and key in LEFT_OUT):
            continue
        if isinstance(value, Mapping):
            yield from hyper_parameters(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, bool | int | float | str) else str(value)


def add_graph(writer: SummaryWriter, trainer: Trainer, module: LightningModule) -> None:
    """The model, traced in evaluation mode, so that neither running statistics nor random state move. It takes as long
    as a few steps."""
    try:
        example: Any = module.example_input_array
        if example is None:
            spec = trainer.datamodule.splits.spec  # type: ignore[attr-defined]
            example = torch.zeros(1, spec.channels, spec.image_size, spec.image_size)
        with torch.no_grad():
            writer.add_graph(module, example.to(next(module.parameters())), use_strict_trace=False)
    except Exception as error:  # what can't be traced is anybody's guess, and training goes on without a picture
        LOG.info("no graph of the model: %s", str(error).partition("\n")[0])
