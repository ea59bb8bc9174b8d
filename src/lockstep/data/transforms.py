"""torchvision's transforms, sample by sample. What is random in them follows from (seed, epoch, sample), by `fetch`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from lockstep.data.datasets import Ids, fetch, fingerprint, labels_of
from lockstep.errors import UserError

Moments = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
TRIED = 8  # samples, before a run begins


class Transformed:
    """A data set whose images pass through transforms, from `(image, ...)` to `(tensor [C, H, W], ...)`.

    Args:
        dataset: map-style. If its class has a method `whole(index)`, that gives the samples, with images as they are
            stored; `dataset[index]` may have cut them to size already.
        transforms: functions of an image.
        key: where the config names them, for messages.

    Raises:
        UserError: a transform fails, or gives images of several sizes; as does asking for such a sample.
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
            raise UserError(f"{self.key}: the data set's samples are no (image, label)")
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
                f"{self.key}: gives images of {sizes}; one size for all comes from RandomResizedCrop, or Resize and "
                "CenterCrop, of torchvision.transforms.v2"
            )
        return (image, *rest)

    @property
    def labels(self) -> Ids:
        return labels_of(self.dataset)

    def fingerprint(self) -> str:
        return fingerprint(self.dataset)


def transformed(dataset: Any, transforms: Sequence[Callable[[Any], Any]], key: str) -> Any:
    """A data set, or a part of one, whose images pass through transforms, if there are any."""
    if dataset is None or not transforms:
        return dataset
    if type(dataset) is Subset:
        return Subset(transformed(dataset.dataset, transforms, key), dataset.indices)
    return Transformed(dataset, transforms, key)


def image_of(dataset: Any) -> Tensor:
    """The first image [C, H, W], when some more have been tried."""
    tried = np.unique(np.linspace(0, len(dataset) - 1, TRIED).astype(np.int64))
    image: Tensor = fetch(dataset, tried)[0][0]
    return image


def moments(transforms: Sequence[Any]) -> Moments:
    """What float images have been normalised with: by the last `Normalize`; values from 0 to 1 by none."""
    from torchvision.transforms import Normalize, v2

    kinds = (Normalize, v2.Normalize)
    moments_of_each = [(tuple(each.mean), tuple(each.std)) for each in transforms if isinstance(each, kinds)]
    return moments_of_each[-1] if moments_of_each else ((0.0,), (1.0,))
