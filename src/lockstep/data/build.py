"""Opening the data set of a config: once, in the parent process, so that forked workers share its memory."""

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
from lockstep.config.schema import Data, chosen_fold
from lockstep.config.value_checks import checker
from lockstep.data.augment import Augment
from lockstep.data.datasets import Ids, Source, Spec, Splits, fetch, fingerprint, labels_of
from lockstep.data.folds import validation_fold
from lockstep.data.lightning_data import source_of
from lockstep.data.transforms import image_of, moments, transformed
from lockstep.errors import UserError
from lockstep.launch.process_lifetime import in_new_thread

check_data = checker(Data)


@in_new_thread  # it calls user code, which must not leave threads or CUDA in the parent, since the parent forks
def open_data(config: Mapping[str, Any], data_dir: str, seed: int = 0) -> Splits:
    """Open the data set of a config and return its splits. Download it if it is missing.

    Args:
        config: the `data` group. This function reads the keys that every data set has (config/schema.py). `_target_`
            names the opener, which gets the other keys as options.
        data_dir: folder of downloaded data sets, or of the user's own images.
        seed: the run's seed, for an opener that takes `seed`. Ours do not, so runs with other seeds see the same data.
            An opener that splits the data itself takes `val_fraction` and `split_seed`; with folds `val_fraction` is 0.

    Raises:
        UserError: data are missing, incomplete or damaged, or an option is out of range.
    """
    options = dict(check_data("data", config))
    val_fraction, split_seed = options.pop("val_fraction", 0.1), options.pop("split_seed", 0)
    folding = chosen_fold(options)
    options = {key: value for key, value in options.items() if key not in ("folds", "fold")}
    val_fraction = 0.0 if folding else val_fraction  # an opener must not hold out a part of its own
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
        remedy = "it must return a lockstep.Source or a LightningDataModule (docs/use/own-data.md)"
        wrong = f"data._target_={config['_target_']} returned a {made}: {remedy}"
        if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            raise UserError(wrong)
        raise UserError(
            f"{wrong}; write a function with the lines: train = {made}(...); test = {made}(...); "
            "return Source(train, test, Spec(channels, image_size, classes))"
        )
    about = source.about
    if source.val is not None:
        if folding:
            has = f"data={config.get('name')} brings its own validation set"
            raise UserError(f"data.folds={folding[0]}: {has}: leave data.folds out, or make that set a part of train")
        train, val = source.train, source.val
    elif folding:
        val_ids, line = validation_fold(source.train, source.spec, *folding, split_seed)
        train, val = divide(source.train, val_ids, source.val_candidates)
        about = "; ".join(filter(None, [about, line]))
    else:
        train, val = hold_out(source.train, val_fraction, split_seed, source.val_candidates)
    for name, dataset in (("training", train), ("test", source.test)):
        if dataset is not None and not len(dataset):
            raise UserError(f"data={config.get('name')}: the {name} set is empty: it needs at least one image")
    for key, value in {"mix": mix, "sampling": sampling}.items():
        if value and source.spec.task != "classification":
            is_for = "is for data with one class per sample"
            raise UserError(f"data.{key}={value} {is_for}, and this data set is for {source.spec.task}: leave it out")
    if sampling:
        labels_of(train)  # raises now if the labels are unknown
    parts = [fingerprint(part) for part in (train, val, source.test) if part is not None]
    digest = hashlib.sha256("".join(parts).encode()).hexdigest()
    splits = Splits(train, val, source.test, source.spec, digest, augment, sampling is not None)
    splits = replace(splits, about=about, split_by_opener=source.split_by_opener)
    splits = with_transforms(splits, listed)
    splits = replace(splits, mix=mixing(mix, alpha, splits))
    if augment.crop >= splits.spec.image_size:
        raise UserError(f"data.augment.crop={augment.crop}: must be less than the image size, {splits.spec.image_size}")
    return splits


def make_transforms(part: str, listed: Mapping[str, Any], spec: Spec) -> list[Any]:
    """Return the transforms that `data.transforms.<part>` lists.

    Args:
        part: `train` or `eval`.
        listed: the `data.transforms` group.
        spec: gives the transforms' `channels` and `image_size`.
    """
    numbers = {"channels": spec.channels, "image_size": spec.image_size}
    entries = enumerate(listed.get(part) or [])
    return [instantiate(f"data.transforms.{part}[{number}]", each, **numbers) for number, each in entries]


def with_transforms(splits: Splits, listed: Mapping[str, Any]) -> Splits:
    """Return splits with transforms applied to their images, and with the spec of the resulting images.

    Validation and test use the transforms of evaluation.

    Args:
        splits: the splits without transforms.
        listed: the `data.transforms` group.

    Raises:
        UserError: a transform can't be made or applied, or the resulting images do not fit together.
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


def without_training_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `data` group without the settings that only training uses, for an evaluation."""
    options = {key: value for key, value in config.items() if key not in ("mix", "mix_alpha", "sampling")}
    listed = (config.get("transforms") or {}).get("eval")
    return {**options, "transforms": {"train": listed, "eval": listed}} if "transforms" in config else options


def as_evaluated(images: Any, config: Mapping[str, Any], spec: Spec) -> Any:
    """Apply the transforms of evaluation to images that will be predicted. Return the transformed data set.

    Args:
        images: a data set of images.
        config: the `data` group.
        spec: the images that the model takes.

    Raises:
        UserError: the transforms give images of another size.
    """
    transforms = make_transforms("eval", config.get("transforms") or {}, spec)
    processed = transformed(images, transforms, "data.transforms.eval")
    shape, wanted = tuple(processed[0][0].shape), (spec.channels, spec.image_size, spec.image_size)
    if shape != wanted:
        sizes = [" x ".join(map(str, each)) for each in (shape, wanted)]
        raise UserError(f"data.transforms.eval gives images of {sizes[0]}: the model takes {sizes[1]}")
    return processed


def mixing(name: str | None, alpha: float | None, splits: Splits) -> Any:
    """Return torchvision's MixUp or CutMix for the classes of a data set; None if `name` is None.

    Args:
        name: `data.mix`: `mixup`, `cutmix` or None.
        alpha: `data.mix_alpha`, the parameter of the beta distribution; None: 1.
        splits: the data set.

    Raises:
        UserError: an option is out of range, or the data set's samples can't be mixed.
    """
    if name is None:
        if alpha is not None:
            raise UserError(f"data.mix_alpha={alpha:g} has no effect without data.mix: use data.mix=mixup or cutmix")
        return None
    sample = fetch(splits.train, np.zeros(1, dtype=np.int64))
    image, label = sample if isinstance(sample, tuple | list) and len(sample) == 2 else (None, None)
    if not (isinstance(image, Tensor) and isinstance(label, Tensor) and (image.ndim, label.ndim) == (4, 1)):
        raise UserError(f"data.mix={name}: the data set must give images [C, H, W] with one label each")
    from torchvision.transforms import v2

    try:
        return {"mixup": v2.MixUp, "cutmix": v2.CutMix}[name](alpha=alpha or 1.0, num_classes=splits.spec.num_classes)
    except ValueError:
        raise UserError(
            f"data.mix_alpha={alpha:g} is too small for a beta distribution: use 0.2, for example"
        ) from None


def hold_out(dataset: Any, fraction: float, seed: int, val_candidates: Any = None) -> tuple[Any, Any]:
    """Split a data set into training and validation; both keep the order of samples.

    Args:
        dataset: the data set.
        fraction: share of the samples for validation: those whose hashes with `seed` are the smallest.
        seed: belongs to the data, not to the run, so that runs with other seeds use the same validation set.
        val_candidates: if `dataset` augments its samples itself, the same samples without augmentation.

    Returns:
        `(train, val)`; `val` is None if `fraction` is 0.

    Raises:
        UserError: no training sample would remain, or `val_candidates` has another length.
    """
    if not fraction:
        return dataset, None
    samples = len(dataset)
    hashes = hash64(seed, 0x5B117, np.arange(samples))  # all differ
    val_size = max(1, round(fraction * samples))
    if val_size >= samples:
        raise UserError(
            f"data.val_fraction={fraction:g} leaves no image for training, of {samples}: use a smaller share"
        )
    return divide(dataset, np.flatnonzero(hashes < np.partition(hashes, val_size)[val_size]), val_candidates)


def divide(dataset: Any, val_ids: Ids, val_candidates: Any = None) -> tuple[Any, Any]:
    """Return the training and the validation samples of a data set; both keep the order of samples.

    Args:
        dataset: the data set.
        val_ids: numbers of the samples for validation, sorted.
        val_candidates: as of `hold_out`.

    Raises:
        UserError: `val_candidates` has another length.
    """
    samples = len(dataset)
    if val_candidates is None:
        val_candidates = dataset
    if len(val_candidates) != samples:
        raise UserError(
            f"data: the Source's val_candidates has {len(val_candidates)} samples: it must have {samples}, as its train"
        )
    in_val = np.zeros(samples, dtype=bool)
    in_val[val_ids] = True
    train_ids = np.flatnonzero(~in_val)
    return Subset(dataset, train_ids), Subset(val_candidates, val_ids)  # type: ignore[arg-type]
