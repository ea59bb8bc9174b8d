"""Write predictions to a CSV file, and show its first rows."""

import csv
import io
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from lockstep.data import Spec
from lockstep.errors import UserError
from lockstep.files import replacing

SHOWN_ROWS, SHOWN_WIDTH, LONGEST_CELL = 5, 100, 50  # of the table on the console: rows, characters, characters
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
FORMULA = tuple("=+-@\t\r")  # spreadsheets compute cells that begin with one of these


def are_probabilities(spec: Spec, ids: Tensor, rows: Tensor) -> bool:
    """Check whether rows are probabilities of the classes; see `write_predictions`."""
    known = rows[ids >= 0]
    sums_to_one = bool((known >= 0).all() and ((known.sum(1) - 1).abs() < 1e-4).all())
    return rows.shape[1] == len(spec.classes) and sums_to_one


def note_on_numbers(module: str, spec: Spec, ids: Tensor, rows: Tensor) -> str:
    """Return a line if the rows of a module without `predict_step` look like probabilities and are none; else ""."""
    if spec.task != "classification" or rows.ndim > 2 or are_probabilities(spec, ids, rows):
        return ""
    return (
        f"the numbers are the output of {module}.forward, not probabilities: for those give it a predict_step that "
        "returns self(batch[0]).softmax(1)"
    )


def write_predictions(
    path: Path, names: Sequence[Any], spec: Spec, ids: Tensor, rows: Tensor, top_k: int | None = None
) -> list[str]:
    """Write a table with a row for each file.

    If samples have one class each and all rows are probabilities of the classes (not negative, with the sum 1), a line
    has the most likely class and its probability, and then all probabilities; or only the `top_k` most likely classes
    with theirs. Other rows are written without change.

    Args:
        names: the files, in the order of the table.
        spec: the description of the images, with the names of the classes.
        ids: for each row the number of its file, int64 [n]; below 0: the row belongs to no file.
        rows: numbers, float64 [n, k].
        top_k: number of classes in a line; None: all.

    Returns:
        The files with an empty line, since they could not be decoded.

    Raises:
        UserError: `top_k` is given, but the rows are no probabilities of the classes.
    """
    known, count, classes = rows[ids >= 0], rows.shape[1], spec.classes
    probabilities = spec.task == "classification" and are_probabilities(spec, ids, rows)
    if top_k and not probabilities:
        raise UserError(f"top_k={top_k}: the model's predict_step does not return class probabilities: leave it out")
    shown = [_inert(name, "'") for name in classes]
    columns = shown if count == len(classes) else [f"value_{number}" for number in range(count)]
    if probabilities:
        best, labels = known.topk(top_k or 1)
        further = [f"{name}_{place}" for place in range(2, best.shape[1] + 1) for name in ("predicted", "probability")]
        columns = ["predicted", "probability", *further, *([] if top_k else columns)]

    def cells(row: int) -> list[str]:
        each = [] if probabilities and top_k else [f"{value:.6f}" for value in known[row].tolist()]
        likely = zip(labels[row].tolist(), best[row].tolist(), strict=True) if probabilities else ()
        return [cell for label, value in likely for cell in (shown[label], f"{value:.6f}")] + each

    return _write_table(path, names, columns, ids, cells)


def write_masks(path: Path, names: Sequence[Any], spec: Spec, ids: Tensor, masks: Tensor) -> list[str]:
    """Write masks as PNG files into the folder `masks`, and a table with the share of each class in a mask.

    Args:
        path: the table's file; the folder is beside it.
        names: the files, in the order of the table.
        spec: the description of the images, with the names of the classes.
        ids: for each mask the number of its file, int64 [n]; below 0: the mask belongs to no file.
        masks: the class of each pixel, uint8 [n, H, W].

    Returns:
        The files with an empty line, since they could not be decoded.
    """
    folder, known, numbers = path.parent / "masks", masks[ids >= 0], ids[ids >= 0].tolist()
    folder.mkdir(exist_ok=True)
    files = [f"{number:06d}_{Path(str(names[number])).stem}.png" for number in numbers]  # two folders may have one name
    for name, mask in zip(files, known, strict=True):
        Image.fromarray(mask.numpy()).save(folder / name)

    def cells(row: int) -> list[str]:
        shares = known[row].flatten().long().bincount(minlength=spec.num_classes) / known[row].numel()
        return [f"masks/{files[row]}", *(f"{share:.6f}" for share in shares.tolist())]

    columns = ["mask", *(_inert(name, "'") for name in spec.classes)]
    return _write_table(path, names, columns, ids, cells)


def _write_table(
    path: Path, names: Sequence[Any], columns: Sequence[str], ids: Tensor, cells: Callable[[int], list[str]]
) -> list[str]:
    """Write a table with a row for each file. Return the files without a prediction, whose cells are empty.

    Args:
        names: the files, in the order of the table.
        columns: names of the columns after the first one, `file`.
        ids: for each prediction the number of its file; below 0: it belongs to no file.
        cells: returns the cells of a prediction from its number among those with a file.
    """
    known = ids[ids >= 0].tolist()
    row_of = dict(zip(known, range(len(known)), strict=True))
    broken = []
    with replacing(path) as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
        table = csv.writer(text)
        table.writerow(["file", *columns])
        for index, name in enumerate(map(str, names)):
            row = row_of.get(index)
            if row is None:
                broken.append(name)
            table.writerow([_inert(name, "./"), *([""] * len(columns) if row is None else cells(row))])
        text.detach()
    return broken


def first_rows(path: Path) -> str:
    """Return the first rows of a table as text, with as many columns as a terminal shows."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(itertools.islice(csv.reader(file), SHOWN_ROWS + 1))
        more = next(file, None) is not None
    rows = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    fitting = sum(end <= SHOWN_WIDTH for end in itertools.accumulate(width + 2 for width in widths))
    lines = ["  ".join(map(str.ljust, row[: max(1, fitting)], widths)).rstrip() for row in rows]
    return "\n".join([*lines, *["..."] * more])


def _printable(cell: str) -> str:
    """Return a cell without control characters, shortened at the front to LONGEST_CELL."""
    cell = cell if len(cell) <= LONGEST_CELL else f"...{cell[3 - LONGEST_CELL :]}"  # the end of a path matters more
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cell)


def _inert(text: str, mark: str) -> str:
    """Return a cell that a spreadsheet does not compute: `mark` goes before a formula. A number is none."""
    return mark + text if text.startswith(FORMULA) and not NUMBER.fullmatch(text) else text
