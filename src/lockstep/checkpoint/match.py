"""Find the tensors of a file that belong to a module, whatever prefixes their names have."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = dict[str, Tensor]
Shapes: TypeAlias = Mapping[str, torch.Size]
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # names that wrappers insert
FIRST = ("state_dict", "model", "model_state_dict")  # of sets that fit equally well, these come first
AVERAGE = {"ema", "swa", "avg", "average", "averaged", "averaging", "averager", "shadow"}
DEPTH = 5  # of mappings in mappings


@dataclass(frozen=True)
class Match:
    """Tensors of a file under the names of a module.

    Attributes:
        path: the keys of the mappings they are in, joined by dots; empty: in none.
        label: where they are in the file: the keys of mappings and the prefix of their names, joined by dots.
        prefix: what was removed from the beginning of their names.
        tensors: the tensors by the module's names. Some may have names or shapes that the module lacks.
        num_fitting: how many have a name and a shape of the module.
        num_weights: how many of these have two dimensions or more.
    """

    path: str
    label: str
    prefix: str
    tensors: Tensors
    num_fitting: int
    num_weights: int

    @property
    def is_average(self) -> bool:
        """Whether the label says that these are averaged weights, such as `model_ema`."""
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", self.label)
        return any(word.lower() in AVERAGE for word in words)


def sets_of(content: Any) -> dict[str, Tensors]:
    """Return all sets of named tensors in a file's content, by their keys joined by dots."""
    sets: dict[str, Tensors] = {}
    seen: set[int] = set()

    def search(mapping: Mapping[Any, Any], path: tuple[str, ...]) -> None:
        if id(mapping) in seen or len(path) > DEPTH:
            return
        seen.add(id(mapping))
        named = {key: value for key, value in mapping.items() if isinstance(key, str)}
        if tensors := {key: value for key, value in named.items() if isinstance(value, Tensor)}:
            sets[".".join(path)] = tensors
        for key, value in named.items():
            if isinstance(value, Mapping):
                search(value, (*path, key))

    if isinstance(content, Mapping):
        search(content, ())
    return sets


def matches(shapes: Shapes, sets: Mapping[str, Tensors]) -> list[Match]:
    """Return the ways in which sets of tensors fit a module, the best one first.

    Names fit as they are, without prefixes that wrappers add (`module.`, `_orig_mod.`), without the first words that
    all names below them share (`model.backbone.`), and as those of a part of the module (`conv1.weight` as
    `net.conv1.weight`). Averaged weights come after all others.

    Args:
        shapes: the shapes of the module's tensors, by name.
        sets: the sets of a file, see `sets_of`.
    """
    places = _places(shapes)
    candidates = []
    for path, tensors in sets.items():
        seen = set()
        for names, prefix in _renamings(tensors):
            fits = Counter(
                add
                for new, old in names.items()
                for add in places.get(new, ())
                if tensors[old].ndim > 1 and _fits(shapes, add + new, tensors[old])
            )
            if not fits:
                continue
            best = _matched(path, prefix, names, tensors, max(fits, key=lambda add: (fits[add], add == "")), shapes)
            fitting = frozenset(id(value) for name, value in best.tensors.items() if _fits(shapes, name, value))
            if fitting not in seen:
                seen.add(fitting)
                candidates.append(best)
    return sorted(candidates, key=lambda each: (each.is_average, -each.num_weights, -each.num_fitting, _order(each)))


def _places(shapes: Shapes) -> dict[str, list[str]]:
    """Return the prefixes with which a name is one of a module's names, by this name."""
    places: dict[str, list[str]] = {}
    for prefix in _prefixes(shapes):
        for name in shapes:
            if name.startswith(prefix):
                places.setdefault(name[len(prefix) :], []).append(prefix)
    return places


def _order(match: Match) -> int:
    first = match.label.partition(".")[0]
    return FIRST.index(first) if first in FIRST else len(FIRST)


def _fits(shapes: Shapes, name: str, value: Tensor) -> bool:
    return shapes.get(name) == value.shape


def _matched(path: str, prefix: str, names: Mapping[str, str], tensors: Tensors, add: str, shapes: Shapes) -> Match:
    """Return the match of a renaming: `names` maps new names to those in the file, and `add` comes before them."""
    renamed = {add + new: tensors[old] for new, old in names.items()}
    fitting = [value for name, value in renamed.items() if _fits(shapes, name, value)]
    label = ".".join(filter(None, (path, prefix.rstrip("."))))
    return Match(path, label, prefix, renamed, len(fitting), sum(value.ndim > 1 for value in fitting))


def _renamings(names: Iterable[str]) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the ways to shorten names: new names with the old ones, and the prefix that was removed."""
    originals = list(names)
    variants = [{name: name for name in originals}]
    if any(WRAPPERS & set(name.split(".")) for name in originals):
        unwrapped = {".".join(word for word in name.split(".") if word not in WRAPPERS): name for name in originals}
        if len(unwrapped) == len(originals):
            variants.append(unwrapped)
    for variant in variants:
        for prefix in _prefixes(variant):
            inside = {new[len(prefix) :]: old for new, old in variant.items() if new.startswith(prefix)}
            yield inside, prefix


def _prefixes(names: Iterable[str]) -> dict[str, None]:
    """Return prefixes of names, in order: none, each first word, and with it the words that all names below share."""
    below: dict[str, list[list[str]]] = {}
    for name in names:
        words = name.split(".")
        if len(words) > 1:
            below.setdefault(words[0], []).append(words[:-1])
    prefixes = {"": None}
    for listed in below.values():
        common = listed[0]
        for words in listed:
            same = next((at for at, (a, b) in enumerate(zip(common, words, strict=False)) if a != b), None)
            common = common[: min(len(common), len(words)) if same is None else same]
        for length in range(1, len(common) + 1):
            prefixes[".".join(common[:length]) + "."] = None
    return prefixes
