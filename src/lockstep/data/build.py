"""Opening the data set of a config: once, in the parent process, so that forked workers share its memory."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from lockstep.arithmetic.order import hash64
from lockstep.config.instantiate import instantiate
from lockstep.config.schema import Data, chosen_fold
from lockstep.config.value_checks import checker
from lockstep.data.augment import Augment
from lockstep.data.datasets import (
    Ids,
    Weights,
    checked_weights,
    content_of,
    fetch,
    fingerprint,
    labels_of,
    read_labels,
    weights_of,
)
from lockstep.data.splits import Source, Spec, Splits, classes_of
from lockstep.data.streams import checked_borders
from lockstep.data.transforms import with_transforms
from lockstep.data.user_data import source_of
from lockstep.errors import UserError
from lockstep.launch.process_lifetime import in_new_thread
from lockstep.text import join_names, plural

check_data = checker(Data)


@in_new_thread  # it calls user code, which must not leave threads or CUDA in the parent, since the parent forks
def open_data(config: Mapping[str, Any], data_dir: str, seed: int = 0, known_classes: Sequence[str] = ()) -> Splits:
    """Open the data set of a config and return its splits. Download it if it is missing.

    Args:
        config: the `data` group. This function reads the keys that every data set has (config/schema.py). `_target_`
            names the opener, which gets the other keys as options.
        data_dir: folder of downloaded data sets, or of the user's own images.
        seed: the run's seed, for an opener that takes `seed`. Ours do not, so runs with other seeds see the same data.
            An opener that splits the data itself takes `val_fraction` and `split_seed`; with folds `val_fraction` is 0.
        known_classes: the classes of a checkpoint that is to be tested, for an opener that takes `known_classes`. It
            then keeps their order, if they are those of the data.
    """
    group = check_data("data", config)
    folding = chosen_fold(group)
    val_fraction = 0.0 if folding else group.get("val_fraction", 0.1)  # an opener must not hold out a part of its own
    split_seed = group.get("split_seed", 0)
    options = {key: value for key, value in group.items() if key not in Data.__annotations__}
    offers = {"data_dir": data_dir, "seed": seed, "val_fraction": val_fraction, "split_seed": split_seed}
    source = _open_source(options, **offers, known_classes=known_classes)
    for name, dataset in (("training", source.train), ("validation", source.val), ("test", source.test)):
        if dataset is not None and not len(dataset):
            raise UserError(
                f"data={config.get('name')}: {options['_target_']} has returned no {name} samples, with "
                f"data_dir={data_dir}: it needs at least one"
            )
    shard_borders = None
    if source.window is not None:
        others = {"sampling": group.get("sampling"), "folds": group.get("folds"), "val_fraction": val_fraction}
        shard_borders = checked_borders(source, others)
    elif not known_classes:
        refuse_untrained_classes(source)
    if folding and source.val is not None:
        has = f"data={config.get('name')} brings its own validation set"
        raise UserError(f"data.folds={folding[0]}: {has}: leave data.folds out, or make that set a part of train")
    train, val, about = split_validation(source, val_fraction, folding, split_seed)
    mix, sampling = group.get("mix"), group.get("sampling")
    for key, value in {"mix": mix, "sampling": sampling}.items():
        if value and source.spec.task != "classification":
            is_for = "is for data with one class per sample"
            raise UserError(f"data.{key}={value} {is_for}, and this data set is for {source.spec.task}: leave it out")
    weights = training_weights(source, train)
    if sampling and weights is not None:
        both = f"data.sampling={sampling} and the sample_weights of the data both decide which samples are drawn"
        raise UserError(f"{both}: leave one of them out")
    parts = [fingerprint(part) for part in (train, val, source.test) if part is not None]
    if weights is not None:
        parts.append(hashlib.sha256(weights.tobytes()).hexdigest())
        about = "; ".join(filter(None, [about, "an epoch's samples are drawn by sample_weights, with replacement"]))
    if source.window is not None:  # a run that continues with other windows would lose or repeat samples
        assert shard_borders is not None
        parts.append(hashlib.sha256(f"window {source.window} ".encode() + shard_borders.tobytes()).hexdigest())
        reads = f"each piece of a step reads {plural(source.window, 'shard')} at a time"
        about = "; ".join(filter(None, [about, reads]))
    splits = Splits(
        train,
        val,
        source.test,
        source.spec,
        fingerprint=hashlib.sha256("".join(parts).encode()).hexdigest(),
        augment=Augment(**(group.get("augment") or {})),
        about=about,
        split_by_opener=source.split_by_opener,
        labels=read_labels(train) if sampling else None,
        weights=weights,
        window=source.window,
        shard_borders=shard_borders,
        content=content_of(part for part in (train, val, source.test) if part is not None),
        file_sizes=source.file_sizes,
    )
    splits = with_transforms(splits, group.get("transforms") or {})
    splits = replace(splits, mix=mixing(mix, group.get("mix_alpha"), splits))
    crop, image_size = splits.augment.crop, splits.spec.image_size
    if crop >= image_size:
        raise UserError(f"data.augment.crop={crop}: must be less than the image size, {image_size}")
    return splits


def _open_source(options: Mapping[str, Any], **offers: Any) -> Source:
    """Call the opener of a `data` group and return its Source.

    Args:
        options: `_target_` and the opener's own options.
        offers: arguments for an opener that takes them; a LightningDataModule's random numbers get `split_seed`.
    """
    source = instantiate("data", options, **offers)
    if isinstance(source, pl.LightningDataModule):
        return source_of(source, offers["split_seed"])
    if isinstance(source, Source):
        return source
    made = type(source).__name__
    remedy = "it must return a lockstep.Source or a LightningDataModule (lockstep docs own-data)"
    wrong = f"data._target_={options['_target_']} returned a {made}: {remedy}"
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise UserError(wrong)
    if type(source) in (tuple, list):
        raise UserError(f"{wrong}: return Source(train, test, Spec(channels, image_size, classes))")
    raise UserError(
        f"{wrong}; write a function with the lines: train = {made}(...); test = {made}(...); "
        "return Source(train, test, Spec(channels, image_size, classes))"
    )


def training_weights(source: Source, train: Any) -> Weights | None:
    """Return the weight of each training sample, float64 [n]; None if the data give no weights.

    Args:
        source: gives weights for all samples of its training set, or has a training set that does.
        train: what is left of that training set for training.

    Raises:
        UserError: as of `checked_weights`; or all training samples have the weight 0.
    """
    weights = weights_of(source.train)
    if source.sample_weights is not None:
        weights = checked_weights(source.sample_weights, len(source.train), "sample_weights")
    if weights is None:
        return None
    if train is not source.train:  # a part is held out
        weights = weights[train.indices]
    if not weights.any():
        raise UserError("data: sample_weights: all training samples have the weight 0: some must have more")
    return weights


def refuse_untrained_classes(source: Source) -> None:
    """Refuse data in which a class has images for the validation or the test, and none for the training."""
    if source.spec.task != "classification":
        return
    counts = {}
    for name, dataset in (("training", source.train), ("validation", source.val), ("test", source.test)):
        if (labels := labels_of(dataset)) is None:
            continue
        known = labels[(labels >= 0) & (labels < source.spec.num_classes)]
        counts[name] = np.bincount(known, minlength=source.spec.num_classes)
    for name in ("validation", "test"):
        untrained = np.flatnonzero((counts.get(name, 0) > 0) & (counts.get("training", 1) == 0))
        if len(untrained):
            classes = join_names((source.spec.classes[each] for each in untrained), 5)
            images = plural(int(counts[name][untrained].sum()), f"{name} image")
            raise UserError(f"data: {images} of classes without a training image: {classes}: train must have some")


def mixing(name: str | None, alpha: float | None, splits: Splits) -> Any:
    """Return torchvision's MixUp or CutMix for the classes of a data set; None if `name` is None.

    Args:
        alpha: `data.mix_alpha`, the parameter of the beta distribution; None: 1.
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

    alpha = 1.0 if alpha is None else alpha
    if not torch.tensor(alpha) > 0:  # torch's distribution looks no more, once torch.compile has been imported
        raise UserError(f"data.mix_alpha={alpha:g} is too small for a beta distribution: use 0.2, for example")
    return {"mixup": v2.MixUp, "cutmix": v2.CutMix}[name](alpha=alpha, num_classes=splits.spec.num_classes)


def without_training_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `data` group without the settings that only training uses, for an evaluation."""
    options = {key: value for key, value in config.items() if key not in ("mix", "mix_alpha", "sampling")}
    transforms = config.get("transforms")
    if "transforms" not in config or not isinstance(transforms, Mapping | None):  # the second is refused later
        return options
    listed = (transforms or {}).get("eval")
    return {**options, "transforms": {"train": listed, "eval": listed}}


# --- validation: a share or a fold, a pure function of a seed and the labels, the same on every layout and machine ---


def split_validation(
    source: Source, fraction: float, folding: tuple[int, int] | None, seed: int
) -> tuple[Any, Any, str]:
    """Return a source's training set, its validation set or None, and a line about the data for the log.

    Args:
        source: its own validation set is used if it has one.
        folding: the number of folds, and the one for validation; None: no folds.

    Raises:
        UserError: as of `hold_out` and `validation_fold`.
    """
    if source.val is not None:
        return source.train, source.val, source.about
    if folding is None:
        labels = classes_of(source.train, source.spec)  # None: unknown, or wrong, which is refused later
        return *hold_out(source.train, fraction, seed, source.val_candidates, labels), source.about
    val_ids, line = validation_fold(source.train, source.spec, *folding, seed)
    train, val = divide(source.train, val_ids, source.val_candidates)
    return train, val, "; ".join(filter(None, [source.about, line]))


def hold_out(
    dataset: Any, fraction: float, seed: int, val_candidates: Any = None, labels: Ids | None = None
) -> tuple[Any, Any]:
    """Split a data set into training and validation; both keep the order of samples.

    Args:
        fraction: share of the samples for validation: those whose hashes with `seed` are the smallest.
        seed: belongs to the data, not to the run, so that runs with other seeds use the same validation set.
        val_candidates: if `dataset` augments its samples itself, the same samples without augmentation.
        labels: the class of each sample, int64 [n]; one sample of each class stays for training, if a class
            has more than one. None: unknown.

    Returns:
        `(train, val)`; `val` is None if `fraction` is 0.
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
    may_leave = np.ones(samples, dtype=bool)
    if labels is not None:
        classes, class_of = np.unique(labels, return_inverse=True)
        largest = np.zeros(len(classes), dtype=hashes.dtype)
        np.maximum.at(largest, class_of, hashes)
        may_leave = hashes < largest[class_of]
        if not may_leave.any():  # each class has one sample, so that of some must leave
            may_leave[:] = True
    val_size = min(val_size, int(may_leave.sum()))
    last = np.partition(hashes[may_leave], val_size - 1)[val_size - 1]
    return divide(dataset, np.flatnonzero(may_leave & (hashes <= last)), val_candidates)


def divide(dataset: Any, val_ids: Ids, val_candidates: Any = None) -> tuple[Any, Any]:
    """Return the training and the validation samples of a data set; both keep the order of samples.

    Args:
        val_ids: numbers of the samples for validation, sorted.
        val_candidates: as of `hold_out`.
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


def assign_folds(labels: Ids, folds: int, seed: int) -> Ids:
    """Return the fold of each sample, int64 [n].

    The samples are sorted by class, and within a class by a hash of `seed` and their number. The folds take turns. So
    the sizes of two folds differ by at most one, in all and in each class.

    Args:
        labels: the class of each sample, int64 [n].
    """
    by_class = np.lexsort((hash64(seed, 0xF01D, np.arange(len(labels))), labels))
    assigned = np.empty(len(labels), dtype=np.int64)
    assigned[by_class] = np.arange(len(labels)) % folds
    return assigned


def validation_fold(dataset: Any, spec: Spec, folds: int, fold: int, seed: int) -> tuple[Ids, str]:
    """Return the ids of the samples of a fold, sorted, and a line about it for the log.

    If the labels are unknown without making samples, the folds are chosen by the hash alone, and the line states it.
    """
    stratified = ", each class alike"
    if (labels := labels_of(dataset)) is None:
        labels = np.zeros(len(dataset), dtype=np.int64)
        stratified = " by chance, since the data set has no attribute labels or targets with one class for each sample"
    classes, counts = np.unique(labels, return_counts=True)
    least = int(counts.argmin())
    if counts[least] < folds:
        label, count = int(classes[least]), int(counts[least])
        name = spec.classes[label] if 0 <= label < spec.num_classes else label
        right = f"use data.folds={count} or less" if count > 1 else "each class must have two at least"
        raise UserError(f"data.folds={folds}: the class {name} has {plural(count, 'training sample')}: {right}")
    ids = np.flatnonzero(assign_folds(labels, folds, seed) == fold)
    return ids, f"cross-validation: fold {fold} of {folds} (0 to {folds - 1}) is for validation{stratified}"
