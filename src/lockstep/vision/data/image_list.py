"""Open the images of a CSV file that lists paths and labels, numbers or masks."""

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

from lockstep.data.splits import Source
from lockstep.errors import UserError
from lockstep.vision.data.classes import clean
from lockstep.vision.data.labelled import (
    PARTS,
    LabelledFiles,
    check_headers,
    decodable,
    unique_images,
)
from lockstep.vision.data.masks import MaskedFiles
from lockstep.vision.data.options import ImageOptions, with_image_options
from lockstep.vision.data.targets import Columns, columns, read_targets, table_lines


@with_image_options
def image_list(
    csv: str | None,
    options: ImageOptions,
    skip_broken: bool = False,
    labels: Sequence[str] | None = None,
    values: Sequence[str] | None = None,
    mask: str | None = None,
    classes: Sequence[str] | None = None,
    unlabelled: int | None = None,
) -> Source:
    """Open the images that a CSV file lists in its columns `path` (relative to the file's folder) and `label`.

    Other columns take the place of `label`: `labels` are 0 or 1 each, `values` are numbers, and `mask` has the path of
    an image whose pixels are numbers of `classes`, or `unlabelled`. A column `split` may have train, val or test.
    Without it the images, or those of each class, are split. Without val, a part of train is used for validation.
    data/image_list.yaml describes the options.

    Raises:
        UserError: The file, a column, a path or a target is missing or not valid, there is only one class, or an image
            is in two parts or has two targets.
    """
    target = columns(labels, values, mask, classes)
    if not isinstance(skip_broken, bool):
        raise ValueError(f"skip_broken={skip_broken}: must be true or false")
    if not isinstance(csv, str):
        raise UserError("data.csv must be given: data.csv=<file>, with the columns path and label")
    file = Path(csv).expanduser().absolute()
    rows = read(file, target)
    for row in rows:
        at = f"{file}: row {row['row']}"
        if missing := [name for name in ("path", *target.names) if not clean(row[name])]:
            raise UserError(f"{at} has no {missing[0]}: each row must have {' and '.join(('path', *target.names))}")
        if row.get("split", "train") not in PARTS:
            raise UserError(f"{at}: split is {row['split'] or 'empty'}: it must be train, val or test")
        try:
            is_file = "\0" not in row["path"] and S_ISREG(os.stat(file.parent / row["path"]).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            is_file = False
        except OSError as error:
            raise UserError(f"{at}: {file.parent / row['path']} can't be read ({error.strerror})") from error
        if not is_file:
            raise UserError(
                f"{at}: there is no file {file.parent / row['path']}: paths must be relative to the list's folder"
            )
    ids, again = unique_images(
        [file.parent / row["path"] for row in rows],
        [", ".join(clean(row[name]) for name in target.names) for row in rows],
        [row.get("split", "") for row in rows],
        lambda number: f"{file}: row {rows[number]['row']} ({rows[number]['path']})",
    )
    rows = [rows[index] for index in ids]
    left_out = ""
    if skip_broken and rows:
        names, none = np.array([row["path"] for row in rows]), np.zeros(len(rows), dtype=np.int64)
        every = LabelledFiles(file.parent, names, none, 0, options.channels, reading=options.reading)
        (good,), left_out = decodable([every])
        rows = [rows[index] for index in good]
    targets, names_of_targets = read_targets(file, rows, target, options.known_classes)
    if not rows:
        raise UserError(f"{file} has no rows: it must have one for each image")
    names = np.array([row["path"] for row in rows])
    files = LabelledFiles(file.parent, names, targets, 0, options.channels, reading=options.reading)
    options, file_sizes = options.with_size([files])
    if target.task == "segmentation":
        masks = np.array([row[target.names[0]] for row in rows])
        of_masks = masks, len(target.classes), unlabelled
        size, channels, reading = files.image_size, files.channels, files.reading
        files = MaskedFiles(file.parent, names, targets, size, channels, *of_masks, reading=reading)
    elif unlabelled is not None:
        raise ValueError(f"unlabelled={unlabelled}: is a value of masks: give data.mask=<column>, or leave it out")
    if "split" in rows[0]:
        of = np.array([PARTS.index(row["split"]) for row in rows])
        parts = [files.part(np.flatnonzero(of == part)) for part in range(len(PARTS))]
        train, val, test = (part if len(part) else None for part in parts)
        if train is None:
            raise UserError(f"{file}: no row has the split train: some must have it")
        if val is None:
            train, val, _ = replace(options, test_fraction=0).split(train)
    else:
        train, val, test = options.split(files)
    check_headers([files])
    if isinstance(files, MaskedFiles):
        files.check_masks()
    spec = options.spec(names_of_targets, target.task)
    texts = "; ".join(filter(None, [left_out, again]))
    about = texts and f"image_list: {texts}"
    return Source(train, test, spec, val, about=about, split_by_opener="split" not in rows[0], file_sizes=file_sizes)


def read(file: Path, of: Columns) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, by column. The key `row` has the line number.

    Args:
        file: the file.
        of: the columns that it must have beside `path`. If an option names them, further ones are ignored.

    Raises:
        UserError: The file can't be read or has other columns, a row has more values than columns, or a value has a
            line break, as behind a quotation mark that is not closed.
    """
    try:
        with open(file, newline="", encoding="utf-8-sig") as text:
            lines = table_lines(csv.reader(text, skipinitialspace=True, strict=True), f"data.csv={file}")
    except UnicodeDecodeError as error:
        raise UserError(f"data.csv={file}: can't be read ({error}): save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"data.csv={file}: can't be read ({error.strerror})") from error
    head = [*map(clean, lines[0][1])] if lines else []
    needed = {"path", *of.names}
    if double := [name for name in (*needed, "split") if head.count(name) > 1]:
        raise UserError(f"{file}: it has {head.count(double[0])} columns {double[0]}: rename or remove all but one")
    if of.key and not needed <= set(head):
        lacks = next(name for name in ("path", *of.names) if name not in head)
        where = f"data.{of.key}: " if lacks != "path" else ""
        raise UserError(f"{where}{file} has no column {lacks}: its columns are {', '.join(head) or 'none'}")
    if not of.key and not needed <= set(head) <= needed | {"split"}:
        expected = "its first row must be path,label or path,label,split"
        others = "; data.labels, data.values and data.mask name columns with other targets" * ("path" in head)
        raise UserError(f"{file}: its columns are {', '.join(head) or 'none'}: {expected}{others}")
    for number, values in lines:
        if len(values) > len(head):
            why = f"{len(values)} values for {len(head)} columns: put a value with a comma in quotes"
            raise UserError(f"{file}: row {number} has {why}")
    rows = [{"row": number, **dict(zip_longest(head, values, fillvalue=""))} for number, values in lines[1:]]
    return [{**row, "split": clean(str(row["split"]))} if "split" in row else row for row in rows]
