"""Show the mistakes of a classifier: accuracy by class, and a grid of the worst mistakes."""

import time
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.splits import Spec
from lockstep.launch.process_group import gather_objects
from lockstep.lightning.epochs import is_last_step
from lockstep.step.timing import exclude_from_timing
from lockstep.vision.callbacks.first_page import boards

MOST_CLASSES = 100  # most classes for curves of each class
MISTAKES = 10  # number of shown mistakes, those with the largest loss
COLUMNS = 5  # mistakes in a row
NAME_LENGTH = 7  # shown characters of a class's name
HEIGHT = 2.2  # inches


class Pictures(Callback):
    """Shows on TensorBoard which samples a classifier gets wrong.

    After each validation it logs the accuracy of each class (`val_class/<class>`). After the test it draws the worst
    mistakes (`wrong/`). It draws them after the last validation if there is no test, and after other validations from
    time to time.

    A forward hook reads the output of `forward` in evaluation. So the callback works with any module that calls
    `self(x)` on a batch `(x, y)` and gets logits or log-probabilities, one for each class. For other modules, and for
    tasks other than classification, it draws nothing. Every rank counts its samples, and rank zero draws.

    Args:
        seconds: shortest time between two validations that are drawn.
    """

    # An extra that records which settings affect the weights reads this attribute, and leaves this callback out.
    changes_weights = False

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._next_drawing = time.monotonic() + seconds  # a validation that ends later is drawn
        self._hook: Any = None  # the forward hook during an evaluation
        self._last_pass: tuple[Any, Any] = (None, None)  # input and output of the last forward pass
        self._must_gather: bool  # whether the counts of all processes must be added
        self._counts: Tensor  # see `count_classes`
        self._mistakes: Mistakes

    def _start_counting(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not boards(trainer):
            return
        data = trainer.datamodule
        if data.splits.spec.task != "classification":
            return
        # Several replicas (processes that have a whole network each) count a part of the samples each. The parts of a
        # divided network count all samples each.
        self._must_gather = data.layout.replicas > 1
        shape = 2, data.splits.spec.num_classes + 1
        self._counts = torch.zeros(shape, dtype=torch.int64, device=pl_module.device)
        self._mistakes = Mistakes(data.splits.spec)

        def store_pass(module: Any, args: tuple[Any, ...], output: Any) -> None:
            self._last_pass = (args[0] if args else None), output

        self._hook = pl_module.register_forward_hook(store_pass)

    def _count(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        (images, logits), self._last_pass = self._last_pass, (None, None)
        if self._hook is None or not isinstance(batch, tuple | list) or len(batch) != 2:
            return
        x, y = batch
        # A rank without samples of the split evaluates one sample that does not count.
        is_counted = images is x and trainer.datamodule.num_local_samples(_split(trainer)) > 0
        classes = len(self._mistakes.classes)
        if is_counted and _is_classification_batch(x, logits, y, classes):
            valid = ((y >= 0) & (y < classes)).all()  # stays on the device: the host would wait for it
            count_classes(self._counts, logits, y, valid)
            self._mistakes.add(x, logits, y, valid)

    def _remove_hook(self, *args: Any, **kwargs: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._last_pass = None, (None, None)

    def _finish(self, trainer: Any, pl_module: LightningModule) -> None:
        if self._hook is None:
            return
        self._remove_hook()
        split, step, data = _split(trainer), trainer.global_step, trainer.datamodule
        with exclude_from_timing(trainer):
            local = self._counts[:, :-1].cpu()
            hits, counts = (torch.stack(gather_objects(local)).sum(0) if self._must_gather else local).tolist()
            is_last = split == "test" or (data.splits.test is None and is_last_step(trainer))
            must_draw = is_last or trainer.strategy.broadcast(time.monotonic() >= self._next_drawing)
            if must_draw and self._must_gather:
                self._mistakes.gather()
            if not trainer.is_global_zero or not any(counts):
                return
            if split == "val" and len(counts) <= MOST_CLASSES:
                rows = zip(self._mistakes.classes, hits, counts, strict=True)
                accuracies = {f"val_class/{name}": hit / count for name, hit, count in rows if count}
                for board in boards(trainer):
                    board.log_metrics(accuracies, step)
            if must_draw:
                wrong = sum(counts) - sum(hits)
                drawing = self._mistakes.draw(f"{split}, step {step}: the worst of {wrong:,} mistakes")
                for board in boards(trainer):
                    board.experiment.add_figure(f"wrong/{split}_mistakes", drawing, step)
                self._next_drawing = time.monotonic() + self._seconds

    on_validation_start = on_test_start = _start_counting
    on_validation_batch_end = on_test_batch_end = _count
    on_validation_end = on_test_end = _finish
    on_exception = _remove_hook


def count_classes(counts: Tensor, logits: Tensor, y: Tensor, valid: Tensor) -> None:
    """Count n samples: logits [n, classes], labels [n], and whether they count [].

    torchmetrics' own classes read numbers of each batch, for which the host would wait for a GPU.

    Args:
        counts: for each class the samples that are classified rightly, and all samples, int64 [2, classes + 1]. The
            last column is of samples that do not count.
    """
    column = torch.where(valid, y, counts.shape[1] - 1)
    counts.index_add_(1, column, torch.stack([logits.argmax(dim=1) == y, torch.ones_like(y)]).long())


Mistake = tuple[float, int, int, float, NDArray[np.uint8]]  # see `Mistakes.worst`


class Mistakes:
    """Collects the wrongly classified samples with the largest loss, on the device of the samples."""

    def __init__(self, spec: Spec, most: int = MISTAKES) -> None:
        self.classes = [str(name) for name in spec.classes]
        self._spec = spec
        self._most = most
        self._moments: list[Tensor] = []  # mean and standard deviation of each channel
        self._values: list[Tensor] = []  # losses, labels, predictions, their probabilities, images; the worst first

    def add(self, x: Tensor, logits: Tensor, y: Tensor, valid: Tensor | bool = True) -> None:
        """Add n samples: normalised images x [n, c, h, w], logits or log-probabilities [n, classes], labels y [n].

        Args:
            valid: whether they count. On a device, so that the host need not wait for it.
        """
        logs = logits.detach().double().log_softmax(dim=1)
        top_logs, predictions = logs.max(dim=1)
        losses = -logs.gather(1, y.clamp(0, logs.shape[1] - 1)[:, None])[:, 0]
        losses = losses.where((predictions != y) & valid & ~losses.isnan(), -1.0)  # -1: not a mistake
        indices = losses.topk(min(self._most, len(y))).indices
        spec = self._spec
        self._moments = self._moments or [x.new_tensor(each).view(-1, 1, 1) for each in (spec.mean, spec.std)]
        mean, std = self._moments
        pixels = ((x[indices] * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        more = [*(values[indices] for values in (losses, y, predictions, top_logs.exp())), pixels.permute(0, 2, 3, 1)]
        both = [torch.cat(pair) for pair in zip(self._values, more, strict=True)] if self._values else more
        order = both[0].argsort(descending=True, stable=True)[: self._most]
        self._values = [values[order] for values in both]

    @cached_property
    def worst(self) -> list[Mistake]:
        """At most `most` mistakes, the worst first. Read it after the last batch.

        Each has the loss, the label, the prediction, its probability and the image, uint8 [size, size, channels].
        """
        if not self._values:
            return []
        *columns, images = self._values
        rows = zip(*(values.tolist() for values in columns), images.cpu().numpy(), strict=True)
        return [each for each in rows if each[0] >= 0]

    def gather(self) -> None:
        """Keep the worst mistakes of all ranks. Every rank must call this."""
        mistakes = chain.from_iterable(gather_objects(self.worst))
        self.worst = sorted(mistakes, key=lambda mistake: mistake[0], reverse=True)[: self._most]

    def draw(self, title: str) -> Any:
        """Return a figure of the images, with the predicted class, its probability and the true class below each."""
        from matplotlib.figure import Figure  # pyplot's may open a window

        rows = max(1, -(-len(self.worst) // COLUMNS))
        # 340 pixels wide, as TensorBoard shows pictures: it would shrink larger ones, and no letter could be read.
        drawing = Figure((3.4, max(HEIGHT, 0.25 + rows)), dpi=100, layout="constrained")
        drawing.suptitle(title, fontsize=9)
        for axes in drawing.subplots(rows, COLUMNS, squeeze=False).flat:
            axes.axis("off")
        for axes, (_, label, predicted, probability, image) in zip(drawing.axes, self.worst, strict=False):
            axes.imshow(image[..., : 3 if image.shape[-1] >= 3 else 1], cmap="gray", vmin=0, vmax=255)
            caption = (
                f"{self.classes[predicted][:NAME_LENGTH]} {probability:.0%}\nis {self.classes[label][:NAME_LENGTH]}"
            )
            axes.set_title(caption, fontsize=8, y=-0.55)
        return drawing


def _split(trainer: Trainer) -> str:
    return "test" if trainer.testing else "val"


def _is_classification_batch(x: Any, logits: Any, y: Any, classes: int) -> bool:
    """Check whether these are images [n, C, H, W], a score for each class [n, classes] and labels [n]."""
    return (
        all(isinstance(part, Tensor) for part in (x, logits, y))
        and logits.is_floating_point()
        and logits.shape == (len(x), classes)
        and y.dtype == torch.int64
        and y.shape == (len(x),)
        and x.ndim == 4
    )
