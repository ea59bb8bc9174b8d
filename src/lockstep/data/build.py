"""Opens the data set that a config names: once, in the parent, so that forked workers share its memory."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from lockstep.arithmetic.order import hash64
from lockstep.config.instantiate import instantiate
from lockstep.config.schema import Data
from lockstep.config.value_checks import checker
from lockstep.data.augment import Augment
from lockstep.data.datasets import Source, Spec, Splits, fetch, fingerprint, labels_of
from lockstep.data.lightning_data import source_of
from lockstep.data.transforms import image_of, moments, transformed
from lockstep.errors import UserError
from lockstep.launch.new_thread import in_new_thread

check_data = checker(Data)


@in_new_thread  # it calls user code, and the parent forks
def open_data(config: Mapping[str, Any], data_dir: str, seed: int = 0) -> Splits:
    """The splits of a data set, downloaded where that is needed and possible.

    Args:
        config: the `data` group. The keys that every data set has (run/schema.py) are read here, `_target_` names the
            opener, and every other key is an option of it.
        data_dir: where downloaded sets lie or go, or the user's own images.
        seed: the run's seed, for an opener that takes `seed`. Ours don't: runs with other seeds see the same data. One
            that splits by itself takes `val_fraction` and `split_seed`.

    Raises:
        UserError: missing, incomplete or damaged data, or an option out of range.
    """
    options = dict(check_data("data", config))
    val_fraction, split_seed = options.pop("val_fraction", 0.1), options.pop("split_seed", 0)
    augment = Augment(**(options.pop("augment", None) or {}))
    listed = options.pop("transforms", None) or {}
    mix, alpha, sampling = (options.pop(name, None) for name in ("mix", "mix_alpha", "sampling"))
    source = instantiate(
        "data", options, data_dir=data_dir, seed=seed, val_fraction=val_fraction, split_seed=split_seed
    )
    if isinstance(source, pl.LightningDataModule):
        source = source_of(source, split_seed)
    if not isinstance(source, Source):
        made = type(source).__name__
        right = "a lockstep.data.Source or a LightningDataModule"
        wrong = f"data._target_={config['_target_']}: must return {right}, not {made}"
        if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            raise UserError(f"{wrong}: docs/use/own-data.md shows a function that does")
        raise UserError(
            f"{wrong}: name a function of yours (docs/use/own-data.md) with the lines: train = {made}(...); "
            f"test = {made}(...); "
            "return Source(train, test, Spec(channels, image_size, classes))"
        )
    if source.val is not None:
        train, val = source.train, source.val
    else:
        train, val = hold_out(source.train, val_fraction, split_seed, source.val_candidates)
    for name, dataset in (("training", train), ("test", source.test)):
        if dataset is not None and not len(dataset):
            raise UserError(f"data={config.get('name')}: there is no {name} image")
    if sampling:
        labels_of(train)  # refused here, where it can't say them
    parts = [fingerprint(part) for part in (train, val, source.test) if part is not None]
    digest = hashlib.sha256("".join(parts).encode()).hexdigest()
    splits = Splits(train, val, source.test, source.spec, digest, augment, sampling is not None)
    splits = replace(splits, about=source.about, divided=source.divided)
    splits = with_transforms(splits, listed)
    splits = replace(splits, mix=mixing(mix, alpha, splits))
    if augment.crop >= splits.spec.image_size:
        size = f"the images' {splits.spec.image_size} pixels"
        raise UserError(f"data.augment.crop={augment.crop}: must be less than {size}")
    return splits


def make_transforms(part: str, listed: Mapping[str, Any], spec: Spec) -> list[Any]:
    """What `data.transforms.<part>` names."""
    numbers = {"channels": spec.channels, "image_size": spec.image_size}
    entries = enumerate(listed.get(part) or [])
    return [instantiate(f"data.transforms.{part}[{number}]", each, **numbers) for number, each in entries]


def with_transforms(splits: Splits, listed: Mapping[str, Any]) -> Splits:
    """The splits whose images pass through transforms, those of evaluation also in validation. Their spec is that of
    the images that come out.

    Raises:
        UserError: one can't be made, or applied; or images that come out differ in their size.
    """
    made = {part: make_transforms(part, listed, splits.spec) for part in ("train", "eval")}
    if not any(made.values()):
        return splits
    parts = {"train": "train", "val": "eval", "test": "eval"}
    keys = {name: f"data.transforms.{part}" for name, part in parts.items()}
    sets = {name: transformed(getattr(splits, name), made[part], keys[name]) for name, part in parts.items()}
    images = {name: image_of(dataset) for name, dataset in sets.items() if dataset is not None}
    shape = images["train"].shape
    for name, image in images.items():
        if image.shape != shape:
            sizes = [" x ".join(map(str, each)) for each in (image.shape, shape)]
            raise UserError(f"{keys[name]}: gives images of {sizes[0]}, data.transforms.train of {sizes[1]}")
    if len(shape) != 3 or shape[1] != shape[2]:
        raise UserError(f"data.transforms: gives images of {' x '.join(map(str, shape))}; they must be square")
    kinds = {image.is_floating_point(): keys[name] for name, image in images.items()}
    if len(kinds) > 1:
        raise UserError(
            f"{kinds[True]}: gives floats, {kinds[False]} uint8: give both the same ConvertImageDtype, Normalize"
        )
    floats = {moments(made[parts[name]]) for name, image in images.items() if image.is_floating_point()}
    if len(floats) > 1:
        raise UserError("data.transforms: training and evaluation must normalise alike")
    mean, std = floats.pop() if floats else (splits.spec.mean, splits.spec.std)
    if not {len(mean), len(std)} <= {1, shape[0]}:
        raise UserError(f"data.transforms: gives {shape[0]} channels, and there are means of {len(mean)}")
    mean, std = mean * (shape[0] // len(mean)), std * (shape[0] // len(std))
    spec = replace(splits.spec, channels=shape[0], image_size=shape[1], mean=mean, std=std)
    return replace(splits, **sets, spec=spec)


def for_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's `data` group without what only training takes from it."""
    options = {key: value for key, value in config.items() if key not in ("mix", "mix_alpha", "sampling")}
    listed = (config.get("transforms") or {}).get("eval")
    return {**options, "transforms": {"train": listed, "eval": listed}} if "transforms" in config else options


def as_evaluated(images: Any, config: Mapping[str, Any], spec: Spec) -> Any:
    """Images that are to be predicted, after the transforms of evaluation; `config` is the `data` group."""
    transforms = make_transforms("eval", config.get("transforms") or {}, spec)
    processed = transformed(images, transforms, "data.transforms.eval")
    shape, wanted = tuple(processed[0][0].shape), (spec.channels, spec.image_size, spec.image_size)
    if shape != wanted:
        sizes = [" x ".join(map(str, each)) for each in (shape, wanted)]
        raise UserError(f"data.transforms.eval: gives {sizes[0]} of these images, and the model takes {sizes[1]}")
    return processed


def mixing(name: str | None, alpha: float | None, splits: Splits) -> Any:
    """torchvision's MixUp or CutMix for the classes of a data set; None where none is named."""
    if name is None:
        if alpha is not None:
            raise UserError(f"data.mix_alpha={alpha:g}: nothing is mixed; give data.mix=mixup or cutmix too")
        return None
    sample = fetch(splits.train, np.zeros(1, dtype=np.int64))
    image, label = sample if isinstance(sample, tuple | list) and len(sample) == 2 else (None, None)
    if not (isinstance(image, Tensor) and isinstance(label, Tensor) and (image.ndim, label.ndim) == (4, 1)):
        raise UserError(f"data.mix={name}: mixes images [n, C, H, W] with one label each, and this data set has others")
    from torchvision.transforms import v2

    try:
        return {"mixup": v2.MixUp, "cutmix": v2.CutMix}[name](alpha=alpha or 1.0, num_classes=splits.spec.num_classes)
    except ValueError:
        raise UserError(f"data.mix_alpha={alpha:g}: there is no beta distribution of it; 0.2, say") from None


def hold_out(dataset: Any, fraction: float, seed: int, as_evaluated: Any = None) -> tuple[Any, Any]:
    """`(train, val)`: the `fraction` of samples whose hash with `seed` is smallest is held out; both keep their order.

    The seed belongs to the data, not to the run: runs with other seeds are compared on the same validation set.

    Args:
        as_evaluated: where `dataset` augments its samples itself, the same without.
    """
    if not fraction:
        return dataset, None
    samples = len(dataset)
    by_hash = np.argsort(hash64(seed, 0x5B117, np.arange(samples)), kind="stable")
    val_size = max(1, round(fraction * samples))
    if val_size >= samples:
        raise UserError(f"data.val_fraction={fraction:g}: of {samples} training images none would be left")
    if as_evaluated is None:
        as_evaluated = dataset
    if len(as_evaluated) != samples:
        raise UserError(f"data: the Source's val_candidates has {len(as_evaluated)} samples, its train {samples}")
    train_ids, val_ids = np.sort(by_hash[val_size:]), np.sort(by_hash[:val_size])
    return Subset(dataset, train_ids), Subset(as_evaluated, val_ids)  # type: ignore[arg-type]
