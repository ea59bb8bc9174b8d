"""Pictures for the dashboard, drawn with Pillow: matplotlib would cost a run a second to start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Picture = NDArray[np.uint8]  # [H, W, 3]

# Blue and vermilion of Okabe and Ito (Color universal design, 2008): told apart with any kind of colour vision.
RIGHT, WRONG, INK, FAINT = (0, 114, 178), (213, 94, 0), (30, 30, 30), (225, 225, 225)
MOST_NUMBERS = 25  # classes up to which a matrix has names and numbers in it
MOST_LETTERS = 14  # of a class name
COLUMNS, TILE = 6, 112  # of the images that were got wrong; pixels of one


def confusion(matrix: NDArray[np.int64], classes: Sequence[str], title: str) -> Picture:
    """A confusion matrix [C, C] of counts: rows are the truth, columns the prediction.

    A cell's colour is its share of the row: blue on the diagonal, vermilion off it, where even a single sample is seen.
    """
    count = len(matrix)
    labelled = count <= MOST_NUMBERS
    cell = 44 if labelled else max(4, 900 // count)
    names = [_short(name) for name in classes]
    font, small = ImageFont.load_default(15), ImageFont.load_default(13)
    longest = int(max(small.getlength(name) for name in names)) if labelled else 0
    upright = longest > cell - 6
    left, top = 46 + longest, 66 + (longest if upright else 14)
    width = max(left + count * cell + 60, 480)
    image = Image.new("RGB", (width, top + count * cell + 14), "white")
    draw = ImageDraw.Draw(image)
    draw.text((12, 8), title, INK, font)
    step_batch = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    for row in range(count):
        for column in range(count):
            at = left + column * cell, top + row * cell
            part = float(step_batch[row, column])
            strength = part if row == column else min(1.0, 0.2 + 1.6 * part) if part else 0.0
            colour = _mix(RIGHT if row == column else WRONG, strength)
            edge = FAINT if labelled else None
            draw.rectangle((*at, at[0] + cell - 1, at[1] + cell - 1), fill=colour, outline=edge)
            if labelled and matrix[row, column]:
                ink = "white" if strength > 0.5 else INK
                centre = at[0] + cell / 2, at[1] + cell / 2
                draw.text(centre, _count(int(matrix[row, column])), ink, small, anchor="mm")
    if not labelled:
        draw.rectangle((left - 1, top - 1, left + count * cell, top + count * cell), outline=FAINT)
    draw.text((left + 2, 34), "predicted", INK, font)
    _upright(image, "truth", (12, top), font)
    for number, name in enumerate(names if labelled else []):
        middle = number * cell + cell / 2
        draw.text((left - 6, top + middle), name, INK, small, anchor="rm")
        if upright:
            _upright(image, name, (int(left + middle - 8), top - 6), small, above=True)
        else:
            draw.text((left + middle, top - 6), name, INK, small, anchor="ms")
    return np.asarray(image)


def wrong(images: Picture, captions: Sequence[tuple[str, str]], title: str) -> Picture:
    """A sheet of images uint8 [n, H, W, 3], each above two lines: what it was taken for, and what it is."""
    font, small = ImageFont.load_default(15), ImageFont.load_default(13)
    rows, gap, lines = -(-len(images) // COLUMNS), 14, 40
    size = COLUMNS * (TILE + gap) + gap, 38 + rows * (TILE + lines + gap)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((gap, 8), title, INK, font)
    for number, (pixels, (said, truth)) in enumerate(zip(images, captions, strict=True)):
        x, y = gap + number % COLUMNS * (TILE + gap), 38 + number // COLUMNS * (TILE + lines + gap)
        enlarge = Image.Resampling.NEAREST if pixels.shape[0] < TILE else Image.Resampling.BILINEAR
        sheet.paste(Image.fromarray(pixels).resize((TILE, TILE), enlarge), (x, y))
        draw.rectangle((x - 1, y - 1, x + TILE, y + TILE), outline=FAINT)
        draw.text((x, y + TILE + 4), _short(said, 18), WRONG, small)
        draw.text((x, y + TILE + 20), _short(truth, 18), RIGHT, small)
    return np.asarray(sheet)


def _short(name: str, letters: int = MOST_LETTERS) -> str:
    return name if len(name) <= letters else name[: letters - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _count(number: int) -> str:
    return str(number) if number < 10_000 else f"{number / 1000:.0f}k"


def _mix(colour: tuple[int, int, int], strength: float) -> tuple[int, ...]:
    return tuple(round(255 + (part - 255) * strength) for part in colour)


def _upright(image: Image.Image, text: str, at: tuple[int, int], font: Any, above: bool = False) -> None:
    """Text that runs from below to above, with its upper end at `at`, or its lower end."""
    width, height = int(font.getlength(text)) + 2, 20
    strip = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(strip).text((1, 1), text, INK, font)
    turned = strip.rotate(90, expand=True)
    image.paste(turned, (at[0], at[1] - width) if above else at)
