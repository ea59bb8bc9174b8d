"""What TensorBoard shows at first sight: a page of the curves that matter, the run as text, its graph, its HParams."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from omegaconf import OmegaConf
from torch.utils.tensorboard import SummaryWriter

from lockstep.callbacks.pictures import data_spec

LOG = logging.getLogger("lockstep.dashboard")  # to train.log only
FINAL = ("val/acc", "val/loss", "test/acc", "test/loss")  # what the HParams page compares runs by, beside the speed
LEFT_OUT = (
    "callbacks",
    "logger",
    "debug",
    "outputs",
    "data_dir",
    "resume",
    "name",
)  # of the config: no hyper-parameter

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


def write(writer: SummaryWriter, step: int, config: Mapping[str, Any] | None, headline: str | None) -> None:
    """Page and texts."""
    writer.add_custom_scalars({"lockstep": {title: ["Multiline", tags] for title, tags in CHARTS.items()}})
    if headline is not None:
        writer.add_text("about", f"```\n{headline}\n```", step)
    if config is not None:
        text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
        writer.add_text("config", f"```yaml\n{text}```", step)


def write_row(folder: str, config: Mapping[str, Any], metrics: Mapping[str, float], step: int) -> None:
    """The run's row of the HParams page, anew, in `<folder>/final`.

    It is a run of its own for TensorBoard, with `final/<metric>` and nothing else, and it names no experiment: then the
    page takes its columns from the rows of all runs, shows which hyper-parameters differ, and has these metrics only.
    """
    from tensorboard.plugins.hparams import summary_v2
    from torch.utils.tensorboard.summary import hparams

    shutil.rmtree(Path(folder) / "final", ignore_errors=True)  # else TensorBoard would show the old values too
    with SummaryWriter(f"{folder}/final") as writer:
        files = writer._get_file_writer()
        assert files is not None
        run = Path(os.path.relpath(Path(folder).parent, str(config.get("outputs", "."))))
        trial = f"{run.name} of {run.parent}"  # the page shows its beginning
        files.add_summary(summary_v2.hparams_pb(dict(hyper_parameters(config)), trial_id=trial))
        for tag, value in metrics.items():
            writer.add_scalar(f"final/{tag}", value, step)
        if metrics:
            files.add_summary(hparams({}, {})[2])  # the session has ended well


def hyper_parameters(config: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, bool | int | float | str]]:
    """The plain leaves of a config by dotted key, without what is null or no hyper-parameter."""
    for key, value in config.items():
        if value is None or key.startswith("_") or (not above and key in LEFT_OUT):
            continue
        if isinstance(value, Mapping):
            yield from hyper_parameters(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, bool | int | float | str) else str(value)


def _example(trainer: Trainer, module: LightningModule) -> torch.Tensor | None:
    """An input of the module: its own, else an image of the data's shape."""
    if isinstance(module.example_input_array, torch.Tensor):
        return module.example_input_array.to(next(module.parameters()))
    spec = data_spec(trainer)
    if spec is None:
        return None
    shape = 1, spec.channels, spec.image_size, spec.image_size
    return torch.zeros(shape, device=module.device, dtype=next(module.parameters()).dtype)


def add_graph(writer: SummaryWriter, trainer: Trainer, module: LightningModule) -> None:
    """The model, traced in evaluation mode, so that neither running statistics nor random state move. It takes as long
    as a few steps."""
    try:
        example = _example(trainer, module)
        if example is not None:
            with torch.no_grad():
                writer.add_graph(module, example, use_strict_trace=False)
    except Exception as error:  # what can't be traced is anybody's guess, and training goes on without a picture
        LOG.info("no graph of the model: %s", str(error).partition("\n")[0])
