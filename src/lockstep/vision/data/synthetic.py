"""Make synthetic images."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.datasets import ArrayDataset
from lockstep.data.splits import Source, Spec


def synthetic(
    samples: int = 2000,
    channels: int = 1,
    image_size: int = 28,
    num_classes: int = 10,
    sample_seed: int = 0,
    task: str = "classification",
) -> Source:
    """Make synthetic images that can be learnt: one part of a random pattern per class, three parts of noise.

    Of another task, half of an image is noise, the other half the patterns, each times its label or value; or, for a
    segmentation, a rectangle with the pattern of its class on a background without one.

    Args:
        samples: number of training images; there are a fifth as many test images.
        channels: channels of an image.
        image_size: pixels.
        num_classes: number of classes.
        sample_seed: seed of the images, separate from the run's seed, so that all runs have the same data.
        task: as of `lockstep.Spec`.

    Raises:
        ValueError: An option is out of range.
    """
    sizes = {"samples": samples, "channels": channels, "image_size": image_size, "num_classes": num_classes}
    for name, value in {**sizes, "sample_seed": sample_seed}.items():
        least = {"num_classes": 1 if task in ("multi_label", "regression") else 2, "sample_seed": 0}.get(name, 1)
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value}: must be a whole number of at least {least}")
    rng = np.random.default_rng(sample_seed)
    pattern = rng.integers(0, 256, (num_classes, channels, image_size, image_size), dtype=np.uint8)

    def make(count: int) -> ArrayDataset:
        labels = np.arange(count) % num_classes
        noise: NDArray[Any] = rng.integers(0, 256, (count, channels, image_size, image_size), dtype=np.uint8)
        for at in range(0, count, 10_000):  # in parts, since memory may hold the images once but not three times
            part = noise[at : at + 10_000]
            part -= part >> 2
            part += pattern[labels[at : at + 10_000]] >> 2
        return ArrayDataset(noise, labels)

    def make_other(count: int) -> ArrayDataset:
        if task == "segmentation":
            targets = rectangles(rng, count, image_size, num_classes)
            shares = (targets[:, None] == np.arange(1, num_classes)[:, None, None]) * np.int64(255)
            shown = np.einsum("nkhw,kchw->nchw", shares, pattern[1:].astype(np.int64))
        else:
            most = 255 if task == "regression" else 1
            numbers = rng.integers(0, most + 1, (count, num_classes))
            shown = np.einsum("nk,kchw->nchw", numbers * (255 // most), pattern.astype(np.int64)) // num_classes
            targets = (numbers / most).astype(np.float32)
        noise = rng.integers(0, 256, shown.shape)
        return ArrayDataset(((shown // 255 + noise) // 2).astype(np.uint8), targets)

    classes = tuple(map(str, range(num_classes)))
    spec = Spec(channels, image_size, classes, (0.5,) * channels, (0.23,) * channels, task)
    make = make if task == "classification" else make_other
    train = make(samples)
    return Source(train, make(max(num_classes, samples // 5)), spec)


def rectangles(rng: np.random.Generator, count: int, image_size: int, num_classes: int) -> NDArray[np.uint8]:
    """Return masks [count, image_size, image_size] of class 0, each with a rectangle of another class."""
    low = rng.integers(0, image_size, (2, count, 1))
    high = low + rng.integers(1, image_size + 1, (2, count, 1))
    rows, columns = ((low <= np.arange(image_size)) & (np.arange(image_size) < high)).astype(np.uint8)
    inside: NDArray[np.uint8] = rows[:, :, None] * columns[:, None, :]
    return inside * rng.integers(1, num_classes, (count, 1, 1), dtype=np.uint8)
