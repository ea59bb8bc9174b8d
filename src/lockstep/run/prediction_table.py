"""Write predictions to a CSV file, and show its first rows."""

import csv
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.errors import UserError
from lockstep.files import replacing

SHOWN_ROWS, SHOWN_WIDTH, LONGEST_CELL = 5, 100, 50  # of the table on the console: rows, characters, characters
FORMULA = tuple("=+-@\t\r")  # spreadsheets compute cells that begin with one of these


def write_predictions(
    path: Path, names: Sequence[Any], classes: Sequence[str], ids: Tensor, rows: Tensor, top_k: int | None = None
) -> list[str]:
    """Write a table with a row for each file.

    If all rows are probabilities of the classes (not negative, with the sum 1), a line has the most likely class and
    its probability, and then all probabilities; or only the `top_k` most likely classes with theirs. Other rows are
    written without change.

    Args:
        names: the files, in the order of the table.
        classes: names of the classes.
        ids: for each row the number of its file, int64 [n]; below 0: the row belongs to no file.
        rows: numbers, float64 [n, k].

    Returns:
        The files with an empty line, since they could not be decoded.

    Raises:
        UserError: `top_k` is given, but the rows are no probabilities of the classes.
    """
    known, count = rows[ids >= 0], rows.shape[1]
    sure = count == len(classes) and bool((known >= 0).all() and ((known.sum(1) - 1).abs() < 1e-4).all())
    if top_k and not sure:
        raise UserError(f"top_k={top_k}: the model's predict_step does not return class probabilities: leave it out")
    shown = [_inert(name, "'") for name in classes]
    columns = shown if count == len(classes) else [f"value_{number}" for number in range(count)]
    if sure:
        best, at = known.topk(top_k or 1)
        further = [f"{name}_{place}" for place in range(2, best.shape[1] + 1) for name in ("predicted", "probability")]
        columns = ["predicted", "probability", *further, *([] if top_k else columns)]
    place = dict(zip(ids[ids >= 0].tolist(), range(len(known)), strict=True))
    broken = []
    with replacing(path) as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
        table = csv.writer(text)
        table.writerow(["file", *columns])
        for index, name in enumerate(map(str, names)):
            row = place.get(index)
            if row is None:
                broken.append(name)
                cells = [""] * len(columns)
            else:
                cells = [] if sure and top_k else [f"{value:.6f}" for value in known[row].tolist()]
                if sure:
                    likely = zip(at[row].tolist(), best[row].tolist(), strict=True)
                    cells = [cell for label, value in likely for cell in (shown[label], f"{value:.6f}")] + cells
            table.writerow([_inert(name, "./"), *cells])
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
    """Return a cell that a spreadsheet does not compute: `mark` goes before a formula."""
    return mark + text if text.startswith(FORMULA) else text
