"""torchvision's transforms, applied sample by sample. `fetch` seeds their random numbers by (seed, epoch, sample)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from lockstep.data.datasets import Wrapper, fetch, fingerprint
from lockstep.data.splits import Spec, Splits
from lockstep.errors import UserError

Moments = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
TRIED = 8  # samples that are made before a run begins


class Transformed(Wrapper):
    """A data set with transforms: its samples `(image, ...)` become `(tensor [C, H, W], ...)`.

    Args:
        dataset: map-style. If it has a method `whole(index)`, samples come from it, with images as they are stored;
            `dataset[index]` may have cropped them.
        key: the config key that lists them, for messages.

    Raises:
        UserError: a transform fails, or images have different sizes. `dataset[index]` raises it, too.
    """

    def __init__(self, dataset: Any, transforms: Sequence[Callable[[Any], Any]], key: str) -> None:
        from torchvision.transforms.v2.functional import to_image

        super().__init__(dataset)
        self.key = key
        self.names = getattr(dataset, "names", None)  # of image files
        self.transforms = [*transforms, to_image]
        self._sample = getattr(dataset, "whole", dataset.__getitem__)
        if hasattr(dataset, "collate_fn"):
            self.collate_fn = dataset.collate_fn
        self._shape: torch.Size | None = None
        self._shape = self[0][0].shape

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        sample = self._sample(index)
        if not isinstance(sample, tuple | list):
            raise UserError(f"{self.key}: a sample is a {type(sample).__name__}: it must be (image, label)")
        image, *rest = sample
        image = _copied(image)
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

    def fingerprint(self) -> str:
        """Return the fingerprint of the data set without transforms."""
        return fingerprint(self.dataset)


def _copied(image: Any) -> Any:
    """Return a copy of an image that may be a view of the data set's memory, into which transforms may write.

    A PIL image that is still an open file is none.
    """
    if isinstance(image, Tensor):
        return image.clone()
    in_memory = isinstance(image, np.ndarray) or (hasattr(image, "tobytes") and getattr(image, "fp", None) is None)
    return image.copy() if in_memory else image


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


# --- the transforms of a config ---


def make_transforms(part: str, listed: Mapping[str, Any], spec: Spec) -> list[Any]:
    """Return the transforms that `data.transforms.<part>` lists."""
    from lockstep.config.instantiate import instantiate  # it imports Hydra, which `lockstep.Trainer` does without

    numbers = {"channels": spec.channels, "image_size": spec.image_size}
    entries = enumerate(listed.get(part) or [])
    return [instantiate(f"data.transforms.{part}[{number}]", each, **numbers) for number, each in entries]


def with_transforms(splits: Splits, listed: Mapping[str, Any]) -> Splits:
    """Return splits with transforms applied to their images, and with the spec of the resulting images.

    Validation and test use the transforms of evaluation.
    """
    made = {part: make_transforms(part, listed, splits.spec) for part in ("train", "eval")}
    if not any(made.values()):
        return splits
    if splits.spec.task == "segmentation":
        right = "use data.augment, which shifts and flips both"
        raise UserError(f"data.transforms would change images without their masks: leave it out, or {right}")
    parts = {"train": "train", "val": "eval", "test": "eval"}
    keys = {name: f"data.transforms.{part}" for name, part in parts.items()}
    sets = {name: transformed(getattr(splits, name), made[part], keys[name]) for name, part in parts.items()}
    images = {name: image_of(dataset) for name, dataset in sets.items() if dataset is not None}
    shape = images["train"].shape
    for name, image in images.items():
        if image.shape != shape:
            sizes = [" x ".join(map(str, each)) for each in (image.shape, shape)]
            raise UserError(f"{keys[name]} gives images of {sizes[0]}: they must be {sizes[1]}, as in training")
    if len(shape) != 3 or shape[1] != shape[2]:
        raise UserError(f"data.transforms gives images of {' x '.join(map(str, shape))}: they must be square")
    kinds = {image.is_floating_point(): keys[name] for name, image in images.items()}
    if len(kinds) > 1:
        raise UserError(
            f"{kinds[True]} gives float images and {kinds[False]} uint8 images: give both the same ConvertImageDtype "
            "and Normalize"
        )
    moments_of_floats = {moments(made[parts[name]]) for name, image in images.items() if image.is_floating_point()}
    if len(moments_of_floats) > 1:
        raise UserError("data.transforms.train and data.transforms.eval differ in Normalize: use the same mean and std")
    mean, std = moments_of_floats.pop() if moments_of_floats else (splits.spec.mean, splits.spec.std)
    if not {len(mean), len(std)} <= {1, shape[0]}:
        raise UserError(
            f"data.transforms gives images of {shape[0]} channels with {len(mean)} means and {len(std)} standard "
            f"deviations: there must be {shape[0]} of each, or 1"
        )
    mean, std = mean * (shape[0] // len(mean)), std * (shape[0] // len(std))
    spec = replace(splits.spec, channels=shape[0], image_size=shape[1], mean=mean, std=std)
    return replace(splits, **sets, spec=spec)


def as_evaluated(images: Any, config: Mapping[str, Any], spec: Spec) -> Any:
    """Apply the transforms of evaluation to images that will be predicted. Return the transformed data set."""
    transforms = make_transforms("eval", config.get("transforms") or {}, spec)
    processed = transformed(images, transforms, "data.transforms.eval")
    shape, wanted = tuple(processed[0][0].shape), (spec.channels, spec.image_size, spec.image_size)
    if shape != wanted:
        sizes = [" x ".join(map(str, each)) for each in (shape, wanted)]
        raise UserError(f"data.transforms.eval gives images of {sizes[0]}: the model takes {sizes[1]}")
    return processed
