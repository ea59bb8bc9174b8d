"""Modules and data sets with one fault each, which `lockstep.testing` must find; and one of each without a fault."""

import os
import random
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from user_modules import CLASSES, SIZE, LitDigits

from lockstep import ArrayDataset, Source, Spec

# --- modules ----------------------------------------------------------------------------------------------------------


class Sound(LitDigits):
    """What a module may have: dropout, state of one evaluation, a short name for its metrics, noise from torch."""

    def extend(self):
        self.dropout, self.outputs = nn.Dropout(0.2), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(self.dropout(x) + 0.1 * torch.randn_like(x)), y)

    def validation_step(self, batch, batch_idx):
        self.outputs.append(len(batch[1]))
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.outputs.clear()


class Sum(LitDigits):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="sum")


class Reads(LitDigits):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


class OnHost(LitDigits):
    def extend(self):
        self.scale = torch.ones(CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x) * self.scale, y)


class Neighbours(LitDigits):
    def forward(self, x):
        return self.net(x) - self.net(x).mean(0)


class BatchStatistics(LitDigits):
    def extend(self):
        self.net.insert(0, nn.BatchNorm2d(1, track_running_stats=False))


class Counts(LitDigits):
    count = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step(batch, batch_idx) / self.count


class CountsInHooks(LitDigits):
    """One that counts outside of `training_step`, in a hook of each piece."""

    count = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.count += self.training
        return batch

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.count


class ByRank(LitDigits):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.global_rank)


class PythonDraws(LitDigits):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * random.random()


class NumpyDraws(LitDigits):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * np.random.rand()  # noqa: NPY002


class CustomGenerator(LitDigits):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * np.random.default_rng().random()


class SystemDraws(LitDigits):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * random.SystemRandom().random()


class Iterates(LitDigits):
    def extend(self):
        self.others = iter(range(10**6))

    def training_step(self, batch, batch_idx):
        next(self.others)
        return super().training_step(batch, batch_idx)


class Masked(LitDigits):
    """A mean over the samples that have a label."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y.where(y > 0, -100))


class WrongWeight(Masked):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "weight": len(batch[1])}


class Contrasts(LitDigits):
    def training_step(self, batch, batch_idx):
        z = F.normalize(self(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z), device=z.device))


class Rescales(LitDigits):
    """One that sets a trained weight in each call."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[1].weight.div_(self.net[1].weight.norm())
        return super().training_step(batch, batch_idx)


class CountsSamples(LitDigits):
    def extend(self):
        self.register_buffer("samples", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        self.samples += len(batch[1])
        return super().training_step(batch, batch_idx)


class Clamps(LitDigits):
    """One that clips in the backward pass."""

    def extend(self):
        self.net[1].register_full_backward_hook(lambda layer, inputs, outputs: None)
        self.net[2].register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0].clamp(-1e-3, 1e-3),))


class OtherWeights(LitDigits):
    def extend(self):
        self.net[1].weight.data = torch.from_numpy(np.random.default_rng().normal(size=(16, SIZE**2))).float() / SIZE


class NotPlain(LitDigits):
    def extend(self):
        self.hparams["activation"] = F.relu


class NotExported(LitDigits):
    def forward(self, x):
        return self.net(x) if x.mean() > 0 else self.net(-x)


class Resized(LitDigits):
    """One whose evaluation changes images outside `forward`."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] / 2, batch[1]


class NoForward(pl.LightningModule):
    """One that has no test either."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, CLASSES))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Still(LitDigits):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Infinite(LitDigits):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / 0


class Fails(LitDigits):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("the shapes do not fit")


class CountsBatches(LitDigits):
    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test/loss", F.cross_entropy(self(x), y), batch_size=1)


class Collects(LitDigits):
    def on_test_epoch_start(self):
        self.wrong = 0

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.wrong += int((self(x).argmax(1) != y).sum())

    def on_test_epoch_end(self):
        self.log("test/wrong", float(self.wrong))


# What the judge says about each of these modules, whoever asks it: a run, `lockstep parity` or `ModuleTests`.
JUDGED = {
    "Sound": "",
    "Sum": "training_step returns a loss that grows with the number of samples .*, as reduction='mean' gives it, not a",
    "Masked": "training_step returns a mean over something else than samples .*: return {'loss': loss, 'weight'",
    "WrongWeight": "by the weight that training_step returns: the weight must be the denominator of the loss",
    "Neighbours": "in evaluation, the output of forward for a sample depends on the other samples of its batch",
    "BatchStatistics": r"in evaluation, the output of net.0 \(BatchNorm2d\) for .*running statistics \(track_running",
    "Contrasts": "the loss of a sample depends on the other samples of its piece .*: give pieces=1, on one device",
    "Counts": r"another loss .* it depends on a state that it changes itself \(count\), .*self.global_step, or",
    "ByRank": "another loss for the same samples on another rank, .*: let it follow from the samples, .* global_rank",
    "PythonDraws": r"another loss .* since it draws random numbers .* \(Python's random\): draw from torch's default",
    "NumpyDraws": r"another loss .* since it draws random numbers .* \(numpy's np.random\): draw from torch's default",
    "CustomGenerator": r"another loss .* no part of the module, .* without a seed \(numpy's default_rng\(\), .*: draw",
    "SystemDraws": r"another loss .* no part of the module, .*, random.SystemRandom\(\)\), the clock, .*: draw",
    "Iterates": r"values from an iterator that the module keeps \(others\), .*, or choose them by the number",
    "Rescales": r"training_step changes parameters itself \(net.1.weight\), .*: change them .* in on_train_batch_end",
    "CountsSamples": r"the buffer samples of the module \(CountsSamples\) depends on the samples of a piece, .*per",
    "Clamps": "the gradient of net.1.weight.* is not in proportion to the loss, .* on_before_optimizer_step",
}

# --- data sets --------------------------------------------------------------------------------------------------------

SPEC = Spec(1, SIZE, tuple("abc"))
IMAGES = np.random.default_rng(0).integers(0, 256, (60, 1, SIZE, SIZE), dtype=np.uint8)
LABELS = np.arange(60) % CLASSES
NAMES = [f"class {number}" for number in range(30)]


class Items:
    """Items without a fault; `labels` are known."""

    labels = LABELS

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(IMAGES[index]), torch.tensor(int(LABELS[index]))


def turned(image: Any, generator: Any) -> Any:
    return torch.rot90(image, int(generator.integers(4)), (1, 2))


class Augmented(Items):
    """Augmented as it should be: from a global generator, sample by sample."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return torch.rot90(image, int(torch.randint(4, ())), (1, 2)), label


class Unseeded(Items):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return turned(image, np.random.default_rng()), label


class DrawsNothing(Augmented):
    uses_random_numbers = False


class Counted(Items):
    """Items that depend on how often one was fetched."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        image, label = super().__getitem__(index)
        return image + self.count, label


class DrawnTogether(Items):
    """A whole batch at once, with one draw for each of its samples."""

    def __getitems__(self, indices: Any) -> Any:
        images, labels = zip(*(self[int(index)] for index in indices), strict=True)
        shifts = torch.randint(100, (len(images), 1, 1, 1), dtype=torch.uint8)
        return torch.stack(images) + shifts, torch.stack(labels)


class OtherLengths(Items):
    asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return len(LABELS) - self.asked % 2


class TurnedLabels(Items):
    labels = LABELS[::-1].copy()


class FloatLabels(Items):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label.float()


class Texts(Items):
    """Items in a dict."""

    def __getitem__(self, index: int) -> Any:
        return dict(zip(("image", "label"), super().__getitem__(index), strict=True))


class Integers(Items):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image.int(), label


class SharedFile(Items):
    """Items of a file that was opened before processes were forked: each moves the others' position."""

    def __init__(self, path: Path, delay: float = 0) -> None:
        path.write_bytes(IMAGES.tobytes())
        self.path, self.process = path, os.getpid()
        self.file = os.open(path, os.O_RDONLY)
        self.delay = delay  # of the first sample in one of two forks

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.process:
            self.process = os.getpid()
            if self._number() % 2:
                time.sleep(self.delay)
        size = SIZE * SIZE
        os.lseek(self.file, index * size, os.SEEK_SET)
        time.sleep(0.005)
        content = os.read(self.file, size).ljust(size)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(1, SIZE, SIZE), super().__getitem__(index)[
            1
        ]

    def _number(self) -> int:
        """Return how many forks have come so far, this one included."""
        for number in count(1):
            with suppress(FileExistsError):
                self.path.with_name(f"fork {number}").touch(exist_ok=False)
                return number
        raise AssertionError


def sound() -> Source:
    return Source(Augmented(), Items(), SPEC, val_candidates=Items())


class LazyFile(SharedFile):
    """The same without the fault: each process opens the file when it first fetches."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        os.close(self.file)
        self.file = -1

    def __getitem__(self, index: int) -> Any:
        if self.file < 0:
            self.file = os.open(self.path, os.O_RDONLY)
        return super().__getitem__(index)


class FailingFork(Items):
    """It can't be fetched in a process that is a fork of the one that has opened it."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.process:
            raise OSError("no such file here")
        return super().__getitem__(index)


def lazy_file(folder: str) -> Source:
    return Source(LazyFile(Path(folder) / "images"), Items(), SPEC)


def failing_fork() -> Source:
    return Source(FailingFork(), Items(), SPEC)


def shared_file(folder: str, delay: float) -> Source:
    return Source(SharedFile(Path(folder) / "images", delay), Items(), SPEC)


def shuffled() -> Source:
    order = np.random.default_rng().permutation(len(IMAGES))
    return Source(ArrayDataset(IMAGES[order], LABELS[order]), Items(), SPEC)


def classes_of_a_set() -> Source:
    return Source(Items(), Items(), Spec(1, SIZE, tuple(set(NAMES))))
