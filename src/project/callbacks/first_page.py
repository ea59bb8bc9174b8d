"""What TensorBoard shows at first sight: validation of all runs, a page of the curves that matter, the run in one
picture, texts, HParams."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import OmegaConf
from torch.utils.tensorboard.summary import hparams

from lockstep import hyper_parameters

# TensorBoard's first page shows the groups of tags by their names, and opens the first two.
FIRST = {"val/acc": "headline/val_acc", "val/loss": "headline/val_loss"}  # so these curves are drawn there once more
PICTURE = "view/run"  # of each run one: below the curves in which runs can be compared
HEIGHT = 2.2  # inches of a picture
COUNTS = ("/correct", "/count")

FORKED = "(_step|_epoch)?"  # what Lightning adds to a name that is logged both at steps and at epochs' ends
# Title -> tags (regular expressions); a chart each, all on one page.
CHARTS = {
    "training loss": [f"^train/loss{FORKED}$"],
    "validation loss": [f"^val/loss{FORKED}$"],
    "training accuracy": [f"^train/acc{FORKED}$"],
    "validation accuracy": [f"^val/acc{FORKED}$"],
    "speed, samples per second": ["^workers/samples_per_second$"],
    "a step and its waiting for data, seconds": ["^workers/step_seconds$", "^workers/data_wait$"],
    "peak memory, GiB": ["^workers/peak_gib$"],
    "validation accuracy of each class": ["^val_class/"],
    "norm of the gradient": ["^train/grad_norm$"],
    "learning rate": ["^train/lr$"],
}


class TensorBoard(TensorBoardLogger):
    """Lightning's, with the curves of FIRST on the first page, and without what is no news as a curve: the epoch, a
    straight line, and counts, which are accuracies."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        shown = {tag: value for tag, value in metrics.items() if tag != "epoch" and not tag.endswith(COUNTS)}
        super().log_metrics(shown | {FIRST[tag]: value for tag, value in shown.items() if tag in FIRST}, step)


def figure(height: float, title: str) -> Any:
    """A matplotlib figure as large as TensorBoard shows pictures, 340 pixels by 220 if it is HEIGHT high: of larger
    ones it leaves out pixels, and letters with them."""
    from matplotlib.figure import Figure  # not pyplot's, which may open a window

    made = Figure((3.4, height), dpi=100, layout="constrained")
    made.suptitle(title, fontsize=9)
    return made


def draw(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Any:
    """Loss and accuracy of training and validation, by tag; a figure."""
    made = figure(HEIGHT, title)
    for axes, name in zip(made.subplots(1, 2), ("loss", "acc"), strict=True):
        for split, style in (("train", "C0-"), ("val", "C1o-")):
            if points := curves.get(f"{split}/{name}"):
                axes.plot(*zip(*points, strict=True), style, label=split, linewidth=1.2, markersize=2.5)
                axes.legend(fontsize=8, frameon=False)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.locator_params(axis="x", nbins=3)
        axes.grid(alpha=0.3)
    return made


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def write(writer: Any, step: int, config: Mapping[str, Any], headline: str) -> None:
    """Page, texts, and the run's row of the HParams page, by a SummaryWriter."""
    writer.add_custom_scalars({"lockstep": {title: ["Multiline", tags] for title, tags in CHARTS.items()}})
    writer.add_text("about", f"```\n{headline}\n```", step)
    text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
    writer.add_text("config", f"```yaml\n{text}```", step)
    # The run's hyper-parameters, without columns to show: which of them differ between runs, scripts/dashboard.py sees.
    # The logger's own log_hyperparams would draw the metrics as points of their own.
    _, *session = hparams(dict(hyper_parameters(config)), {})
    for summary in session:
        writer.file_writer.add_summary(summary)
