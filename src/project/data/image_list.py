"""Open the images of a CSV file that lists paths and labels."""

import csv
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import Source, UserError
from project.data.labelled import PARTS, LabelledFiles, check_headers, decodable, image_spec, split

COLUMNS = ("path", "label", "split")


def image_list(
    csv: str | None,
    image_size: int = 32,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    skip_broken: bool = False,
) -> Source:
    """Open the images that a CSV file lists in its columns `path` (relative to the file's folder) and `label`.

    A third column, `split`, may have train, val or test. Without it the images of each class are split. Without val,
    a part of train is used for validation. conf/data/image_list.yaml describes the options.

    Raises:
        UserError: The file, a column, a path or a label is missing, or there is only one class.
    """
    image_spec(image_size, channels, mean, std, ())  # refuse bad options first
    if not isinstance(skip_broken, bool):
        raise ValueError(f"skip_broken={skip_broken}: must be true or false")
    if not isinstance(csv, str):
        raise UserError("data.csv must be given: data.csv=<file>, with the columns path and label")
    file = Path(csv).expanduser().absolute()
    rows = read(file)
    for row in rows:
        at = f"{file}: row {row['row']}"
        if not row["path"] or not row["label"]:
            raise UserError(f"{at} has no {'label' if row['path'] else 'path'}: each row must have both")
        if row.get("split", "train") not in PARTS:
            raise UserError(f"{at}: split is {row['split'] or 'empty'}: it must be train, val or test")
        if not os.path.isfile(file.parent / row["path"]):
            raise UserError(
                f"{at}: there is no file {file.parent / row['path']}: paths must be relative to the list's folder"
            )
    about = ""
    if skip_broken and rows:
        names, none = np.array([row["path"] for row in rows]), np.zeros(len(rows), dtype=np.int64)
        every = LabelledFiles(file.parent, names, none, image_size, channels)
        (good,), left_out = decodable([every])
        rows = [rows[index] for index in good]
        about = f"image_list: {left_out}"
    labels = {row["label"] for row in rows}
    classes = sorted(labels, key=int) if all(label.isdecimal() for label in labels) else sorted(labels)
    if len(classes) < 2:
        raise UserError(
            f"{file} has {f'only one label, {classes[0]}' if classes else 'no rows'}: it must have two labels at least"
        )
    number_of = {label: number for number, label in enumerate(classes)}
    numbers = [number_of[row["label"]] for row in rows]
    names = np.array([row["path"] for row in rows])
    files = LabelledFiles(file.parent, names, np.array(numbers), image_size, channels)
    if "split" in rows[0]:
        of = np.array([PARTS.index(row["split"]) for row in rows])
        parts = [files.part(np.flatnonzero(of == part)) for part in range(len(PARTS))]
        train, val, test = (part if len(part) else None for part in parts)
        if train is None:
            raise UserError(f"{file}: no row has the split train: some must have it")
        if val is None:
            train, val, _ = split(train, val_fraction, 0, split_seed)
    else:
        train, val, test = split(files, val_fraction, test_fraction, split_seed)
    if not skip_broken:
        check_headers([files])
    spec = image_spec(image_size, channels, mean, std, classes)
    return Source(train, test, spec, val, about=about, divided="split" not in rows[0])


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, by column. The key `row` has the line number.

    Raises:
        UserError: The file can't be read or has other columns, or a row has more values than columns.
    """
    try:
        with open(file, newline="", encoding="utf-8-sig") as text:
            table = csv.reader(text, skipinitialspace=True)
            lines = [(table.line_num, values) for values in table if values]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.csv={file}: can't be read ({getattr(error, 'strerror', None) or error})") from error
    columns = lines[0][1] if lines else []
    if not {"path", "label"} <= set(columns) <= set(COLUMNS):
        expected = "its first row must be path,label or path,label,split"
        raise UserError(f"{file}: its columns are {', '.join(columns) or 'none'}: {expected}")
    for number, values in lines:
        if len(values) > len(columns):
            why = f"{len(values)} values for {len(columns)} columns: put a value with a comma in quotes"
            raise UserError(f"{file}: row {number} has {why}")
    return [{"row": number, **dict(zip_longest(columns, values, fillvalue=""))} for number, values in lines[1:]]
