"""torchvision's transforms, applied sample by sample. `fetch` seeds their random numbers by (seed, epoch, sample)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from lockstep.data.datasets import Ids, fetch, fingerprint, labels_of
from lockstep.errors import UserError

Moments = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
TRIED = 8  # samples that are made before a run begins


class Transformed:
    """A data set with transforms: its samples `(image, ...)` become `(tensor [C, H, W], ...)`.

    Args:
        dataset: map-style. If it has a method `whole(index)`, samples come from it, with images as they are stored;
            `dataset[index]` may have cropped them.
        transforms: functions of an image.
        key: the config key that lists them, for messages.

    Raises:
        UserError: a transform fails, or images have different sizes. `dataset[index]` raises it, too.
    """

    def __init__(self, dataset: Any, transforms: Sequence[Callable[[Any], Any]], key: str) -> None:
        from torchvision.transforms.v2.functional import to_image

        self.dataset, self.key = dataset, key
        self.names = getattr(dataset, "names", None)  # of image files
        self.transforms = [*transforms, to_image]
        self._sample = getattr(dataset, "whole", dataset.__getitem__)
        self._shape: torch.Size | None = None
        self._shape = self[0][0].shape

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        sample = self._sample(index)
        if not isinstance(sample, tuple | list):
            raise UserError(f"{self.key}: a sample is a {type(sample).__name__}: it must be (image, label)")
        image, *rest = sample
        for transform in self.transforms:
            try:
                image = transform(image)
            except Exception as error:
                name = getattr(transform, "__name__", type(transform).__name__)
                raise UserError(f"{self.key}: {name}: {str(error).partition(chr(10))[0]}") from error
        image = image.as_subclass(Tensor)
        if self._shape not in (None, image.shape):
            sizes = " and ".join(" x ".join(map(str, shape)) for shape in (self._shape, image.shape) if shape)
            raise UserError(
                f"{self.key} gives images of {sizes}: they must have one size; use RandomResizedCrop, or Resize and "
                "CenterCrop, of torchvision.transforms.v2"
            )
        return (image, *rest)

    @property
    def labels(self) -> Ids:
        """The labels of all samples; raises as `labels_of`."""
        return labels_of(self.dataset)

    def fingerprint(self) -> str:
        """Return the fingerprint of the data set without transforms."""
        return fingerprint(self.dataset)


def transformed(dataset: Any, transforms: Sequence[Callable[[Any], Any]], key: str) -> Any:
    """Return a data set, or a Subset, with transforms. Return it unchanged if there are none, or if it is None."""
    if dataset is None or not transforms:
        return dataset
    if type(dataset) is Subset:
        return Subset(transformed(dataset.dataset, transforms, key), dataset.indices)
    return Transformed(dataset, transforms, key)


def image_of(dataset: Any) -> Tensor:
    """Return the first image [C, H, W], after fetching some samples to see that they work."""
    tried = np.unique(np.linspace(0, len(dataset) - 1, TRIED).astype(np.int64))
    image: Tensor = fetch(dataset, tried)[0][0]
    return image


def moments(transforms: Sequence[Any]) -> Moments:
    """Return mean and standard deviation of the last `Normalize` among transforms; 0 and 1 if there is none."""
    from torchvision.transforms import Normalize, v2

    kinds = (Normalize, v2.Normalize)
    moments_of_each = [(tuple(each.mean), tuple(each.std)) for each in transforms if isinstance(each, kinds)]
    return moments_of_each[-1] if moments_of_each else ((0.0,), (1.0,))
