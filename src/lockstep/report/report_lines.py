"""Make the lines that a run prints when it starts and when it has completed."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.callbacks import Checkpoint
from lockstep.checkpoint import paths
from lockstep.config.check import Config
from lockstep.config.run_length import run_length
from lockstep.data import Splits
from lockstep.data.splits import TASKS, classes_of
from lockstep.launch.machine import computes_bf16
from lockstep.text import plural, short_path

LOG = logging.getLogger("lockstep")
WIDTH = 100  # columns of a start-up line; only paths are longer
CLASSES_WIDTH = 60  # columns for the names and counts of the classes
SMALL_SHARE, PHOTOGRAPH = 0.1, 224  # of a file's pixels; pixels of photographs in most nets
# An accuracy is at chance level if random guessing reaches it with at least this probability.
CHANCE_PROBABILITY = 0.05
CHANCE_STEPS = 100  # before that, chance level is normal


class StartLines(pl.Callback):
    """Prints a run's first lines. It waits until the optimizer exists, since the lines name its learning rate.

    Args:
        not_loaded: as of `start_lines`.
        notes: lines that follow; empty ones are left out.
        all_lines: whether the first lines are printed too; else only the notes.

    Attributes:
        lr: the optimizer's peak learning rate, as text.
    """

    lr = ""

    def __init__(
        self,
        config: Config,
        splits: Splits,
        folder: Path,
        not_loaded: Iterable[str],
        notes: Iterable[str],
        all_lines: bool = True,
    ) -> None:
        self._config, self._splits, self._folder = config, splits, folder
        self._not_loaded, self._notes, self._all_lines = not_loaded, notes, all_lines

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.lr = peak_lr(trainer.optimizers)
        if trainer.is_global_zero:
            what = self._config, self._splits, pl_module, self._not_loaded, self._folder, self.lr
            for line in filter(None, [*(start_lines(*what) if self._all_lines else ()), *self._notes]):
                LOG.info(line)


def peak_lr(optimizers: Sequence[Optimizer]) -> str:
    """Return the peak learning rates of the optimizers' schedules as text: `lr 0.01`, or `lr 0.01 to 0.05`.

    A schedule with a peak (`OneCycleLR`) names it. For any other schedule, the peak is the rate before the schedule
    changes it. The config's `lr` may differ from both.

    Args:
        optimizers: the run's optimizers, `trainer.optimizers`, with one parameter group at least.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = {float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups}
    return f"lr {min(peaks):g}" + f" to {max(peaks):g}" * (len(peaks) > 1)


def start_lines(
    config: Config, splits: Splits, module: nn.Module, not_loaded: Iterable[str], folder: Path, lr: str
) -> list[str]:
    """Return a run's first lines: model, data, step, length and folder.

    Args:
        not_loaded: names of the tensors that `init_from` has not filled.
        lr: the optimizer's peak learning rate, as text.
    """
    if config.lr_scaling != "none" and lr == f"lr {config.scaled_lr:g}":  # the optimizer does use the scaled rate
        lr += f" ({config.lr_scaling} from {config.lr:g} at {config.reference_batch_size})"
    length = length_text(config, len(splits.train))
    model_name, data_name = (str(group.get("name")) for group in (config.model, config.data))
    return [
        *wrap_parts(f"model {model_name}", parameters_text(module, not_loaded)),
        *wrap_parts(f"data {data_name}", *data_counts(splits)),
        *wrap_parts(*step_parts(config), lr),
        *wrap_parts(f"run {length}", precision_text(config), speed_text(module, config)),
        f"folder {short_path(folder)}",
    ]


def headline(config: Config, splits: Splits, folder: Path) -> str:
    """Return the description of a run for a dashboard, which adds the learning rate."""
    parts = [*step_parts(config), length_text(config, len(splits.train)), precision_text(config)]
    return "\n".join([*wrap_parts(*parts), str(folder)])


def wrap_parts(*parts: str) -> list[str]:
    """Join parts to lines of at most WIDTH columns. A part that is longer gets a line of its own."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + len(part) + 3 <= WIDTH:
            lines[-1] += f" | {part}"
        else:
            lines.append("  " * bool(lines) + part)
    return lines


def step_parts(config: Config) -> list[str]:
    """Return texts about the step and its layout."""
    layout = config.layout
    parts = [layout.describe(), f"{layout.strategy} on {layout.accelerator}"]
    if layout.exact:
        parts.append("exact" if layout.exact is True else f"exact={layout.exact}")
    return parts


def length_text(config: Config, num_samples: int) -> str:
    """Return the length of a run, and the key that limits it, as text."""
    length = run_length(config, num_samples)
    limit = {"max_steps": length.steps, "max_epochs": length.epochs}[length.ends_by]
    return f"{plural(length.steps_per_epoch, 'step')} per epoch, {length.steps} in all ({length.ends_by}={limit})"


def parameters_text(module: nn.Module, not_loaded: Iterable[str]) -> str:
    """Return how many parameters a module has, and how many are frozen or newly initialised, as text.

    A newly initialised parameter is counted among the trained or the frozen ones too.

    Args:
        not_loaded: names of the tensors that the file of `init_from` has not filled, see `LoadedWeights.not_loaded`.
            Names of buffers are ignored.
    """
    sizes = [(name, each.numel(), each.requires_grad) for name, each in module.named_parameters()]
    new_names, total = set(not_loaded), sum(size for _, size, _ in sizes)
    num_trained = sum(size for _, size, trains in sizes if trains)
    num_new = sum(size for name, size, _ in sizes if name in new_names)
    parts = [f"{num_trained:,} trained, {total - num_trained:,} frozen"] * (num_trained < total)
    parts += [f"{num_new:,} newly initialised"] * bool(num_new)
    return f"{total:,} parameters" + f": {', '.join(parts)}" * bool(parts)


def precision_text(config: Config) -> str:
    """Return the precision as text. In float32 on a GPU that has TF32, say which products are rounded to it."""
    gpu = config.layout.accelerator == "gpu"
    if not (gpu and config.precision == "32-true" and computes_bf16("gpu")):  # the same GPUs have bf16 and TF32
        return config.precision
    products = {"auto": "TF32 in convolutions", True: "TF32", False: "no TF32"}[config.speed.tf32]
    return f"{config.precision} ({products})"


def speed_text(module: nn.Module, config: Config) -> str:
    """Return the choices that affect speed, as text: memory format, compilation, CUDA graphs, CPU threads."""
    weights = [p for p in module.parameters() if p.ndim == 4 and min(p.shape[1:]) > 1]
    last = bool(weights) and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    threads = torch.get_num_threads()
    chosen = [("channels_last", last), ("compiled", config.compile), ("CUDA graphs", config.speed.cuda_graphs)]
    return ", ".join([*(name for name, is_chosen in chosen if is_chosen), plural(threads, "thread")])


def data_counts(splits: Splits) -> list[str]:
    """Return texts about the sizes of the splits and the classes. Few classes are listed with their sample counts."""
    sizes = ", ".join(f"{name} {size:,}" for name, size in splits.sizes.items() if size is not None)
    names = splits.spec.classes
    if len(names) < 2:
        return [sizes]
    classes = f"{len(names)} {TASKS[splits.spec.task]}"
    counts = splits.class_counts() if len(names) * 4 <= CLASSES_WIDTH else None  # a class takes 4 columns at least
    if counts is not None and not all(name.isdecimal() for name in names):  # names that are numbers add nothing
        counts_text = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        classes += f": {counts_text}" * (len(counts_text) <= CLASSES_WIDTH)
    return [sizes, classes]


def images_lines(splits: Splits) -> list[str]:
    """Return lines about image files: their sizes, the size that they get, crop and flip; none without files."""
    if not splits.file_sizes:
        return []
    by_area = sorted(splits.file_sizes, key=math.prod)
    size, augment = splits.spec.image_size, splits.augment
    smallest, largest = (f"{width} x {height}" for width, height in (by_area[0], by_area[-1]))
    files = f"{smallest} to {largest}" if smallest != largest else smallest
    line = f"images {size} x {size}, from files of {files} ({len(by_area)} looked at)"
    line += f"; crop={augment.crop} flip={str(augment.flip).lower()}"
    lines = [line + ": data.augment.flip=false if left and right differ, as in digits or letters" * augment.flip]
    width, height = by_area[len(by_area) // 2]
    if (share := size**2 / (width * height)) < SMALL_SHARE:
        keeps = f"data.image_size={max(PHOTOGRAPH, 2 * size)} keeps more"
        if size >= min(width, height):  # no size keeps more of a long file
            keeps = "the square in its middle; cut such files into squares to use all of them"
        lines.append(f"of a file of {width} x {height} only {share:.1%} of the pixels are left: {keeps}")
    return lines


# --- lines of a completed run ---


def end_lines(config: Config, folder: Path, callbacks: Iterable[pl.Callback]) -> list[str]:
    """Return the lines about the files of a completed run and their use. A sweep's job has none."""
    if (folder.parent / "multirun.yaml").exists():
        return []
    run, outputs = short_path(folder), short_path(config.outputs)
    best = next((f"best.ckpt: {each.best}" for each in callbacks if isinstance(each, Checkpoint) and each.best), "")
    curves = f"to look at the curves: tensorboard --logdir {outputs}" * (folder / "tensorboard").is_dir()
    predict = f"to predict: python src/predict.py checkpoint={run} images=<folder>" * paths.folder(folder).is_dir()
    return list(filter(None, [f"completed: {run}", *wrap_parts(best, curves), predict]))


def chance_level_line(metrics: Mapping[str, float], splits: Splits, lr: str) -> str | None:
    """Return a warning for a run whose accuracy is at chance level; None for any other run.

    It is at chance level if always guessing the most common class reaches it, or if guessing at random reaches it with
    at least CHANCE_PROBABILITY. The run's accuracy is that of the test, or of validation if there is no test. There is
    no warning for samples without a class.

    Args:
        metrics: the run's metrics, such as `test/acc`.
        lr: the optimizer's peak learning rate, as text.
    """
    split = next((split for split in ("test", "val") if f"{split}/acc" in metrics), None)
    num_classes = splits.spec.num_classes
    dataset = getattr(splits, split) if split else None
    if dataset is None or num_classes < 2 or (labels := classes_of(dataset, splits.spec)) is None:
        return None
    from scipy.special import bdtrc  # it takes a tenth of a second, which a start needs not wait for

    accuracy, samples = metrics[f"{split}/acc"], len(labels)
    correct, most_common = round(accuracy * samples), int(np.bincount(labels).max()) / samples
    # the probability that guessing has more than `correct - 1` right
    if accuracy > most_common and bdtrc(correct - 1, samples, 1 / num_classes) < CHANCE_PROBABILITY:
        return None
    guessing = f"always guessing the most common class gives {most_common:.4f}"
    return f"{split}/acc {accuracy:.4f} is chance level ({guessing}): the usual cause is the learning rate, {lr}"
