"""The judge of samples: whether a sample is the same when it is fetched again, and what has changed that gives them."""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lockstep.data.datasets import ArrayDataset, Ids, fetch, innermost_dataset
from lockstep.data.seeding import Generators
from lockstep.errors import StepRefused, UserError

LOG = logging.getLogger("lockstep")
COMPARED = 4  # samples that are fetched again
SEEDED = (
    "draw from the global generators of torch, Python or numpy, which are seeded for each sample, and not from one "
    "that is made for each sample (numpy.random.default_rng()); keep no state between calls (a counter, a cycle), and "
    "do not write into what the data set keeps; if the class has uses_random_numbers = False, remove it, since samples "
    "are then not seeded (lockstep docs own-data)"
)


class Repeats:
    """The check of some of the samples that a process fetches first.

    Args:
        name: the data set in words, such as `training`.
        exact: whether samples that differ are refused.
        speaks: whether they are named: on one rank.
    """

    def __init__(self, name: str, exact: bool | str, speaks: bool) -> None:
        self.name, self.exact, self.speaks = name, exact, speaks
        self.is_due = True

    def check(self, dataset: Any, ids: Ids, seed: int, epochs: Ids, generators: Generators) -> None:
        """Check the samples once; see `other_sample`."""
        self.is_due = False
        other = other_sample(dataset, ids[:COMPARED], seed, epochs[:COMPARED], generators)
        if other is None:
            return
        wrong = f"sample {other} of the {self.name} set is another one when it is fetched again: {SEEDED}"
        if self.exact:
            raise StepRefused(f"exact=true: {wrong}")
        if self.speaks:
            LOG.warning("%s", wrong)


def other_sample(dataset: Any, ids: Ids, seed: int, epochs: Ids, generators: Generators | None = None) -> int | None:
    """Return the number of a sample that is another one when it is fetched again; None if there is none.

    Each sample is fetched for its epoch, then for the next one, since what a transform writes into the data set may be
    the same for the same random numbers, and for its epoch again, in another order and in the first one.

    Args:
        dataset: see `fetch`.
        ids: see `fetch`.
        seed: see `fetch`.
        epochs: see `fetch`.
        generators: see `fetch`.
    """
    if type(innermost_dataset(dataset)) in (ArrayDataset, TensorDataset):
        return None
    fetches = range(len(ids))

    def digests(order: range, later: int) -> dict[int, str]:
        return {
            at: digest_of_batch(fetch(dataset, ids[at : at + 1], seed, epochs[at : at + 1] + later, generators))
            for at in order
        }

    try:
        first = digests(fetches, 0)
        digests(fetches, 1)
        again = digests(fetches[::-1], 0)
        twice = digests(fetches, 0)  # what a sample's own counter changes each second time was the same in the third
    except UserError:
        raise
    except Exception as error:  # a `collate_fn` may need several samples
        LOG.debug("samples are not compared: %s", error)
        return None
    return next((int(ids[at]) for at in fetches if not first[at] == again[at] == twice[at]), None)


def digest_of_batch(batch: Any) -> str:
    """Return a SHA-256 of a batch, in hex. Objects whose content is unknown have none."""
    digest = hashlib.sha256()
    waiting = [batch]
    while waiting:
        value = waiting.pop()
        digest.update(type(value).__name__.encode())
        if isinstance(value, Tensor):
            array = value.detach().cpu().contiguous().flatten()
            digest.update(repr((value.dtype, value.shape)).encode() + array.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            waiting += [each for pair in value.items() for each in pair]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, bool | int | float | complex | str | bytes):
            digest.update(repr(value).encode())
        elif hasattr(value, "tobytes"):  # of numpy and PIL
            digest.update(value.tobytes())
        else:
            waiting += vars(value).values() if hasattr(value, "__dict__") else []
    return digest.hexdigest()


def numbers_of(owner: Any, inner: type, kinds: tuple[type, ...], above: str = "") -> dict[str, Any]:
    """Return the numbers of a sampler or an iterable data set by their names, also those of its class.

    Args:
        owner: the object.
        inner: the class of objects in it, and in its lists, whose numbers are returned too.
        kinds: the types of numbers, and of what has some.
        above: what comes before the names.
    """
    numbers: dict[str, Any] = {above + "content": owner} if isinstance(owner, list | tuple) else {}
    holders = (*type(owner).__mro__[::-1], owner)
    attributes = {name: value for holder in holders for name, value in getattr(holder, "__dict__", {}).items()}
    for name, value in attributes.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not any(isinstance(part, inner) for part in parts):
            if isinstance(value, kinds) and not name.startswith("__"):  # Python's, and the notes of Lightning
                numbers[above + name] = value
            continue
        for number, part in enumerate(parts):
            place = f"{above}{name}." if part is value else f"{above}{name}[{number}]."
            numbers |= numbers_of(part, inner, kinds, place) if isinstance(part, inner) else {}
    return numbers


def _is_plain(value: Any) -> bool:
    """Check whether a value is a number, a text, or a container of such."""
    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)


def changed_number(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first name of which two results of `numbers_of` have other numbers; empty if there is none."""

    def same(one: Any, other: Any) -> bool:
        if _is_plain(one) and _is_plain(other):
            return bool(one == other)
        try:
            return bool(np.array_equal(np.asarray(one), np.asarray(other)))
        except (TypeError, ValueError):  # they do not form arrays
            return True

    return next((name for name in before if name in now and not same(before[name], now[name])), "")
