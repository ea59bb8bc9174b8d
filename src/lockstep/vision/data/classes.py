"""Turn labels into classes, by one rule for folders, lists, shards and the hub."""

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal

from lockstep.errors import UserError
from lockstep.text import join_names

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
# Selectors of a character's form, and a joiner that nothing shows.
VARIATIONS = {chr(code) for code in (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), *range(0x180B, 0x180E), 0x34F)}
FILLERS = set("\u115f\u1160\u3164\uffa0\u2800")  # letters and signs that look like blanks
# How programs write a missing value. `none` may be a class; Python writes `None`.
MISSING = {"nan", "-nan", "null", "n/a", "#n/a", "<na>"}
MISSING_AS_WRITTEN = {"None", "NA", "NaT"}


def clean(text: str) -> str:
    """Return a label in Unicode's form NFC, without what can't be seen at its ends."""
    text = unicodedata.normalize("NFC", text)
    start, stop = 0, len(text)
    while start < stop and _is_blank(text[start]):
        start += 1
    while stop > start and _is_blank(text[stop - 1]):
        stop -= 1
    return text[start:stop]


def class_names(
    counts: Mapping[str, int],
    where: str,
    place: Callable[[str], str] = lambda label: "",
    order: Sequence[str] | None = None,
    known_classes: Sequence[str] = (),
) -> tuple[dict[str, str], list[str]]:
    """Return the class of each label as it is written, and the classes in order.

    Args:
        counts: the number of samples of each label.
        where: the place of the labels, for messages.
        place: returns where a label is, for messages.
        order: the classes, if the data set lists them.
        known_classes: see `ordered`.

    Raises:
        UserError: A label is empty, a missing value or has control characters, or several look alike.
    """
    class_of = {label: clean(label) for label in counts}
    for label, name in class_of.items():
        at = ": ".join(filter(None, [where, place(label)]))
        if not name:
            raise UserError(f"{at}: the label {label!r} is empty: each image must have one")
        if odd := [each for each in name if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp")]:
            raise UserError(f"{at}: the label {label!r} has the character {odd[0]!r}, which can't be shown: remove it")
        if order is None and (name.lower() in MISSING or name in MISSING_AS_WRITTEN):
            right = "give a label, leave the image out, or call the class otherwise"
            raise UserError(f"{at}: the label {label!r} is how programs write a missing value: {right}")
    similar: dict[str, list[str]] = {}
    for label, name in class_of.items():
        similar.setdefault(_look(name), []).append(label)
    if several := [labels for labels in similar.values() if len(labels) > 1]:
        texts = [f"{label!r} ({counts[label]:,}{place(label) and f', {place(label)}'})" for label in several[0]]
        more = f"; and {len(several) - 1:,} more" if len(several) > 1 else ""
        raise UserError(f"{where}: labels that look alike: {join_names(texts, 5)}{more}: write them in one way")
    return class_of, ordered(class_of.values(), known_classes) if order is None else [*map(clean, order)]


def ordered(names: Collection[str], known_classes: Sequence[str] = ()) -> list[str]:
    """Return classes in order: as numbers if all are numbers, else as text.

    Args:
        names: of the classes.
        known_classes: those that a model was trained on. If they are the same, this is their order: older versions
            sorted otherwise.
    """
    known = {clean(str(name)): number for number, name in enumerate(known_classes)}
    if known and known.keys() == set(names):
        return sorted(names, key=known.__getitem__)
    return sorted(names, key=Decimal) if all(map(NUMBER.fullmatch, names)) else sorted(names)


def _is_blank(character: str) -> bool:
    return character.isspace() or character in FILLERS or unicodedata.category(character) in ("Cc", "Cf", "Zs")


def _look(name: str) -> str:
    """Return the same text for names that look alike. Single letters differ by case: `a` and `A` are often classes."""
    text = unicodedata.normalize("NFKC", "".join(" " if each in FILLERS else each for each in name))
    text = "".join(each for each in text if unicodedata.category(each) != "Cf" and each not in VARIATIONS)
    text = " ".join(text.split())
    if NUMBER.fullmatch(text):  # not by Decimal, which rounds long ones
        whole, _, part = text.lstrip("+-").partition(".")
        text = f"{whole.lstrip('0') or '0'}.{part.rstrip('0')}"
        return f"-{text}" if name.startswith("-") and text != "0." else text
    return unicodedata.normalize("NFKC", text.casefold()) if len(text) > 1 else text
