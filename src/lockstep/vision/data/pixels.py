"""Turn the pixels of any image file into those of 8 bits without transparency."""

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageColor

from lockstep.text import plural

TOO_DEEP = "32 bits per channel: save it with 8 bits per channel"  # for messages
BITS = tuple(range(8, 17))  # of values that may be stored in 16
FEWER_BITS = (8, 10, 12, 14)  # what microscopes and cameras store in 16
SCALES = {2**bits - 1 for bits in range(9, 16)}  # the largest values of other depths
BITS_PER_SAMPLE, MAX_VALUE, EXTRA_SAMPLES, TYPED_MAX_VALUE = 258, 281, 338, 341  # tags of TIFF
WIDTH, LENGTH, ORIENTATION = 256, 257, 274  # tags of TIFF; the last one of EXIF, too
TURNED = (5, 6, 7, 8)  # orientations that swap width and height


@dataclass(frozen=True)
class Reading:
    """How the pixels of files are read.

    Attributes:
        background: the colour behind transparent pixels, a name that Pillow knows, `#rrggbb`, or red, green and blue
            in 0..255.
        bits: of the values in files of 16 bits; None: 16, or as many as a TIFF file states.

    Raises:
        ValueError: One of them is out of range.
    """

    background: str | Sequence[int] | None = "white"
    bits: int | None = None

    def __post_init__(self) -> None:
        right = "must be a colour, such as white or '#808080', or three numbers of 0 to 255"
        try:
            colour_or_name = (
                "white" if self.background is None else self.background
            )  # a run before this option has none
            colour = ImageColor.getrgb(colour_or_name) if isinstance(colour_or_name, str) else tuple(colour_or_name)
        except (ValueError, TypeError):
            raise ValueError(f"background={self.background}: {right}") from None
        if len(colour) != 3 or not all(type(value) is int and 0 <= value <= 255 for value in colour):
            raise ValueError(f"background={self.background}: {right}")
        object.__setattr__(self, "background", colour)
        if self.bits is not None and (type(self.bits) is not int or self.bits not in BITS):
            raise ValueError(f"bits={self.bits}: must be {BITS[0]} to {BITS[-1]}, or null")


AS_USUAL = Reading()


@contextlib.contextmanager
def open_image(source: Path | io.BytesIO) -> Iterator[Image.Image]:
    """Open an image of a file, or of its bytes, in a `with` block.

    Pillow does not get the path: by a path it maps an uncompressed TIFF file into memory, and then scrambles the pixels
    of one whose orientation swaps width and height.
    """
    with contextlib.ExitStack() as stack:
        file: Any = source if isinstance(source, io.BytesIO) else stack.enter_context(open(source, "rb"))
        yield stack.enter_context(Image.open(file))


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height of an image that is not yet loaded, when its EXIF data have turned it upright."""
    tags: Any = getattr(image, "tag_v2", None)
    width, height = image.size if tags is None else (tags[WIDTH], tags[LENGTH])  # Pillow may have swapped a TIFF file's
    return (height, width) if image.getexif().get(ORIENTATION) in TURNED else (width, height)


def too_deep(image: Image.Image) -> bool:
    """Check whether an image has 32 bits per channel. In such images no values are defined as black and white.

    Pillow reads PNG and PPM files of 16 bits as 32 bits; these are not too deep.
    """
    return image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM"))


def largest_value(image: Image.Image, bits: int | None = None) -> int | None:
    """Return the value of white in an image of 16 bits that is not yet loaded; None for one of 8 bits.

    A PNG file's chunk sBIT says nothing about it: by the standard, values are scaled to 16 bits all the same.

    Args:
        image: an open file.
        bits: see `Reading`.
    """
    tiles: Any = getattr(image, "tile", None) or ()
    stored = [each[3] if isinstance(each[3], str) else str(each[3] and each[3][0]) for each in tiles if len(each) > 3]
    if not image.mode.startswith("I") and not any(";16" in each for each in stored):
        return None
    if image.format == "PPM":  # Pillow scales them
        return 2**16 - 1
    if bits is not None:
        return int(2**bits) - 1
    tags: Any = getattr(image, "tag_v2", {})
    depth = tags.get(BITS_PER_SAMPLE) or (16,)
    scales = [2 ** max(depth) - 1, *(max(np.atleast_1d(tags.get(tag, 0))) for tag in (TYPED_MAX_VALUE, MAX_VALUE))]
    return next((int(scale) for scale in scales if scale in SCALES), 2**16 - 1)


def of_8_bits(image: Image.Image, largest: int | None) -> Image.Image:
    """Scale a loaded image of 16 bits to 8 bits. Pillow would make all values above 255 white.

    Args:
        image: of one grey channel, or of colours, of which Pillow gives 8 of the 16 bits.
        largest: from `largest_value`.

    Raises:
        ValueError: The image has larger values, or colours of fewer bits than 16.
    """
    transparent: Any = image.info.get("transparency")
    if largest is None:
        return image
    if not image.mode.startswith("I"):
        if largest < 2**16 - 1:
            raise ValueError(f"colours of 16 bits can't be read as {largest.bit_length()}: save it with 8 bits")
        if isinstance(transparent, tuple):  # in 16 bits, too
            image.info["transparency"] = tuple(value >> 8 for value in transparent)
        return image
    values = np.asarray(image).astype(np.int64)
    if (peak := int(values.max())) > largest:
        raise ValueError(f"it has the value {peak:,}, more than {largest.bit_length()} bits have: correct data.bits")
    grey = Image.fromarray(((values * 255 + largest // 2) // largest).astype(np.uint8))
    if not isinstance(transparent, int):
        return grey
    return Image.merge("LA", (grey, Image.fromarray(((values != transparent) * 255).astype(np.uint8))))


def composed(image: Image.Image, background: Any) -> Image.Image:
    """Return an image with a colour behind its transparent pixels, whose own colours are undefined."""
    if not is_transparent(image):
        return image.convert("RGB") if image.mode == "LAB" else image  # Pillow makes no grey of LAB
    image = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(image, mask=image)
    return canvas


def is_transparent(image: Image.Image) -> bool:
    """Check whether an image can have transparent pixels. The fourth channel of a TIFF file may be something else."""
    if image.format == "TIFF" and image.mode in ("LA", "RGBA"):
        tags: Any = image
        return not {1, 2}.isdisjoint(np.atleast_1d(tags.tag_v2.get(EXTRA_SAMPLES, 0)).tolist())
    return image.has_transparency_data


def highest_value(image: Image.Image) -> int | None:
    """Return the highest value of an open file of 16 bits; None if the file states how many are used, or for 8."""
    if image.format == "PPM" or largest_value(image) != 2**16 - 1:
        return None
    if image.mode.startswith("I"):
        return int(np.asarray(image).max())
    return max(int(high) for _, high in image.convert("RGB").getextrema()) * 257  # type: ignore[misc]


def fewer_bits_text(highest: Sequence[int]) -> str:
    """Return what is wrong if none of some images of 16 bits uses more than 14; else an empty text."""
    peak = max(highest)
    if not 0 < peak < 2 ** FEWER_BITS[-1]:  # 0: all black, which says nothing
        return ""
    bits = next(bits for bits in FEWER_BITS if peak < 2**bits)
    checked = f"the {plural(len(highest), 'image')} of 16 bits that were checked have values up to {peak:,} of 65,535"
    return f"{checked}: use data.bits={bits} if their values have {bits} bits, or data.bits=16 if they are dark"


def too_large_text(error: BaseException) -> str:
    """Return the sizes in Pillow's error about an image above its limit: `200,000,000 pixels, at most ...`."""
    numbers = [int(each) for each in re.findall(r"\d+", str(error))]
    limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    return f"too large, {numbers[0]:,} pixels: at most {limit:,} can be read" if numbers else "too large"
