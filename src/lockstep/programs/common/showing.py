"""Tables in Markdown, and the look of all plots."""

from collections.abc import Iterable, Sequence
from typing import Any

# Okabe and Ito, Color Universal Design, 2008. Yellow is left out: it is too light for a line on white.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
)  # fmt: skip
GREY = "#8C8C8C"
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X<>"


def markdown(names: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table. The first column is text; the others are aligned to the right."""
    cells = [list(names), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in cells
    )


def our_pyplot() -> Any:
    """Return matplotlib.pyplot with the look of our plots and no window.

    The import takes a second, so call this only where something is drawn.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    look: dict[Any, Any] = {"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "axes.spines.top": False}
    look |= {"axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8, "savefig.dpi": 130}
    pyplot.rcParams.update(look | {"figure.constrained_layout.use": True})
    return pyplot


def style(number: int) -> dict[str, Any]:
    """Return the plot options of line `number`.

    No two of the first 70 lines share both colour and marker, so they can be told apart without colour too.
    """
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number % len(LINES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markerfacecolor": "none",  # markers of lines that coincide stay visible
    }
