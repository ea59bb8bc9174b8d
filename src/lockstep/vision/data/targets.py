"""Read the targets of listed images from the columns of their table: a class, labels, numbers, or a mask."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UserError
from lockstep.text import join_names
from lockstep.vision.data.classes import class_names

Rows = Sequence[Mapping[str, Any]]
LIKE = {"labels": "[cat,dog]", "values": "[age]", "classes": "[background,cat]"}


@dataclass(frozen=True)
class Columns:
    """The columns that have the target of an image.

    Attributes:
        task: as of `lockstep.Spec`.
        names: of the columns.
        key: the option that names them; empty for the column `label`.
        classes: of a segmentation, the names of the classes.
    """

    task: str
    names: tuple[str, ...]
    key: str = ""
    classes: tuple[str, ...] = ()


def columns(labels: Any, values: Any, mask: Any, classes: Any) -> Columns:
    """Return the columns that the options of an opener name.

    Raises:
        ValueError: Two options exclude each other, or one is no list of names.
    """
    chosen = {name: value for name, value in {"labels": labels, "values": values, "mask": mask}.items() if value}
    if len(chosen) > 1:
        first, second = list(chosen)[:2]
        raise ValueError(f"{second}={chosen[second]}: an image has one kind of target: leave it or data.{first} out")
    for name, value in {"labels": labels, "values": values, "classes": classes}.items():
        if value is not None and not _is_list_of_names(value):
            raise ValueError(f"{name}={value}: must be a list of different names, {LIKE[name]} for example")
    if classes and not mask:
        raise ValueError(f"classes={classes}: are those of masks: give data.mask=<column>, or leave it out")
    if mask and (not isinstance(mask, str) or not 2 <= len(classes or ()) < 256):
        raise ValueError(
            f"mask={mask}: must be a column, with data.classes={LIKE['classes']}, in the order of its pixels"
        )
    if labels:
        return Columns("multi_label", tuple(labels), "labels")
    if values:
        return Columns("regression", tuple(values), "values")
    if mask:
        return Columns("segmentation", (mask,), "mask", tuple(map(str, classes)))
    return Columns("classification", ("label",))


def _is_list_of_names(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return listed and len({str(each) for each in value}) == len(value)


def table_lines(table: Any, where: str) -> list[tuple[int, list[str]]]:
    """Return the rows of a CSV reader that are not empty, each with the number of its line.

    Raises:
        UserError: A value has a line break, or a quotation mark is not closed or has text behind it. A reader that is
            not strict would take the next rows into the value, or leave the mark out.
    """
    lines: list[tuple[int, list[str]]] = []
    end = 0  # the line in which the row before ended
    while True:
        try:
            values = next(table)
        except StopIteration:
            return lines
        except csv.Error as error:
            right = "close the quotation mark of a value at its end, and double those inside"
            raise UserError(f"{where}: row {end + 1} can't be read ({error}): {right}") from error
        if broken := [each for each in values if "\n" in each or "\r" in each]:
            what = f"the value {broken[0][:20]!r} of row {end + 1} ends in row {table.line_num}"
            raise UserError(f"{where}: {what}: a value must be in one line: close its quotation mark, or double it")
        end = table.line_num
        lines += [(end, values)] if values else []


def read_targets(
    file: Path, rows: Rows, of: Columns, known_classes: Sequence[str] = ()
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the targets of all rows, and the names of the classes, labels or values.

    Args:
        file: the table, for messages.
        rows: its rows, by column.
        of: the columns with the targets.
        known_classes: see `classes.ordered`.

    Returns:
        The targets: classes, int64 [n]; labels or numbers, float32 [n, k]; of masks nothing, float32 [n, 0].

    Raises:
        UserError: A value is missing or out of range, or there is only one class.
    """
    if of.task == "segmentation":
        for row in rows:
            if not os.path.isfile(mask := file.parent / row[of.names[0]]):
                raise UserError(
                    f"{file}: row {row['row']}: there is no mask {mask}: paths are relative to the list's folder"
                )
        return np.zeros((len(rows), 0), dtype=np.float32), of.classes
    if of.task != "classification":
        numbers = [
            [_number(f"{file}: row {row['row']}", name, row[name], of.task) for name in of.names] for row in rows
        ]
        return np.array(numbers, dtype=np.float32).reshape(len(rows), len(of.names)), of.names
    rows_of: dict[str, list[str]] = {}
    for row in rows:
        rows_of.setdefault(row["label"], []).append(str(row["row"]))
    counts = {label: len(numbers) for label, numbers in rows_of.items()}
    class_of, classes = class_names(
        counts, str(file), lambda label: f"row {join_names(rows_of[label])}", known_classes=known_classes
    )
    if len(classes) < 2:
        only = f"only one label, {classes[0]}" if classes else "no rows"
        raise UserError(f"{file} has {only}: it must have two labels at least")
    number_of = {name: number for number, name in enumerate(classes)}
    return np.array([number_of[class_of[row["label"]]] for row in rows]), tuple(classes)


def _number(at: str, name: str, text: str, task: str) -> float:
    """Return a cell as a number."""
    right = "must be 0 or 1" if task == "multi_label" else "must be a number"
    try:
        number = float(text.replace("_", "?"))  # Python takes 1_5 for 15
    except ValueError:
        raise UserError(f"{at}: {name} is {text or 'empty'}: {right}") from None
    if not math.isfinite(np.float32(number)) or (task == "multi_label" and number not in (0, 1)):
        raise UserError(f"{at}: {name} is {text}: {right}")
    return number
