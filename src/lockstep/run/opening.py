"""Opens the data set that a config names: once, in the parent, so that forked workers share its memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Subset

from lockstep.arithmetic.layout import Refusal
from lockstep.arithmetic.order import hash64
from lockstep.loading.augment import Augment
from lockstep.loading.datasets import Source, Splits, fingerprint
from lockstep.run.checks import checker
from lockstep.run.instantiate import instantiate
from lockstep.run.schema import Data

check_data = checker(Data)


def open_data(config: Mapping[str, Any], data_dir: str, seed: int = 0) -> Splits:
    """The splits of a data set, downloaded where that is needed and possible.

    Args:
        config: the `data` group. `val_fraction` (share of the training set that is held out), `split_seed` and
            `augment` are read here, `_target_` names the opener, and every other key is an option of it.
        data_dir: where downloaded sets lie or go, or the user's own images.
        seed: the run's seed, for an opener that takes `seed`. Ours don't: runs with other seeds see the same data.

    Raises:
        Refusal: missing, incomplete or damaged data, or an option out of range.
    """
    options = dict(check_data("data", config))
    held, split_seed = options.pop("val_fraction", 0.1), options.pop("split_seed", 0)
    augment = Augment(**(options.pop("augment", None) or {}))
    source = instantiate("data", options, data_dir=data_dir, seed=seed)
    if not isinstance(source, Source):
        made = type(source).__name__
        raise Refusal(f"data._target_={config['_target_']}: must return a lockstep.loading.Source, not {made}")
    if augment.crop >= source.spec.image_size:
        size = f"the images' {source.spec.image_size} pixels"
        raise Refusal(f"data.augment.crop={augment.crop}: must be less than {size}")
    train, val = (source.train, source.val) if source.val is not None else hold_out(source.train, held, split_seed)
    for name, dataset in (("training", train), ("test", source.test)):
        if dataset is not None and not len(dataset):
            raise Refusal(f"data={config.get('name')}: there is no {name} image")
    parts = [fingerprint(part) for part in (train, val, source.test) if part is not None]
    return Splits(train, val, source.test, source.spec, hashlib.sha256("".join(parts).encode()).hexdigest(), augment)


def hold_out(dataset: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    """`(train, val)`: the `fraction` of samples whose hash with `seed` is smallest is held out; both keep their order.

    The seed belongs to the data, not to the run: runs with other seeds are compared on the same validation set.
    """
    if not fraction:
        return dataset, None
    samples = len(dataset)
    by_hash = np.argsort(hash64(seed, 0x5B117, np.arange(samples)), kind="stable")
    held = max(1, round(fraction * samples))
    if held >= samples:
        raise Refusal(f"data.val_fraction={fraction:g}: of {samples} training images none would be left")
    return Subset(dataset, np.sort(by_hash[held:])), Subset(dataset, np.sort(by_hash[:held]))  # type: ignore[arg-type]
