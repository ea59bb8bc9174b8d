"""Images that people bring, of any size, mode, depth and turn, damaged or not: right pixels, or a refusal of one line.

What is right is computed here from the generated pixels, or read by Pillow alone.
"""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import Edit, damaged, edits, often, refused_line, result_or_line
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from lockstep.vision.data.folders import open_classes
from lockstep.vision.data.masks import MaskedFiles
from lockstep.vision.data.options import ImageOptions

ORIENTATION = 0x0112  # the tag of EXIF
# What turns a stored image upright, by the tag's value.
UPRIGHT = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels, 1),
}
KINDS = {  # the modes that a format keeps without loss
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "BMP": ("1", "L", "P", "RGB"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"),
    "PPM": ("1", "L", "RGB", "I;16"),
    "GIF": ("L", "P"),
    "WEBP": ("RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK"),  # with a loss: as Pillow reads it
}
SUFFIXES = (".png", ".jpg", ".tif", ".gif", ".bmp", ".webp", ".ppm", ".JPEG")  # of which most are wrong ones


@dataclass
class Picture:
    """A file, and the upright pixels [height, width, 3] that it shows on white; None if nobody can tell."""

    kind: str
    mode: str
    content: bytes
    shown: np.ndarray | None


def shown(stored: np.ndarray, mode: str, palette: np.ndarray) -> np.ndarray | None:
    """Return the colours of stored values, 0..255, on white."""
    match mode:
        case "1":
            return np.repeat(stored[..., :1] % 2 * 255.0, 3, 2)
        case "L":
            return np.repeat(stored[..., :1] * 1.0, 3, 2)
        case "P":
            return palette[stored[..., 0].astype(np.int64) % len(palette)] * 1.0
        case "RGB":
            return stored[..., :3] * 1.0
        case "I;16":
            return np.repeat((stored[..., :1] * 257.0 + stored[..., 1:2] % 2 - 1 * (stored[..., :1] > 0)) / 257, 3, 2)
        case "LA":
            alpha = stored[..., 3:] / 255
            return np.repeat(stored[..., :1] * alpha + 255 * (1 - alpha), 3, 2)
        case "RGBA":
            alpha = stored[..., 3:] / 255
            return stored[..., :3] * alpha + 255 * (1 - alpha)
        case "CMYK":
            return (255 - stored[..., :3]) * (255.0 - stored[..., 3:]) / 255
    return None


@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    kind = draw(st.sampled_from([*KINDS]))
    mode = draw(st.sampled_from(KINDS[kind]))
    size = draw(array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=draw(st.sampled_from([3, 40]))))
    stored = draw(arrays(np.uint8, (*size, 4), elements=st.integers(0, 255), fill=st.integers(0, 255)))
    palette = draw(arrays(np.uint8, (draw(st.integers(2, 256)), 3)))
    orientation = draw(st.sampled_from([1, *UPRIGHT])) if kind in ("PNG", "TIFF", "WEBP", "JPEG") else 1
    match mode:
        case "1":
            image = Image.fromarray(stored[..., 0] % 2 * np.uint8(255)).convert("1", dither=Image.Dither.NONE)
        case "P":
            stored = stored % np.uint8(min(255, len(palette)))
            image = Image.frombytes(mode, (size[1], size[0]), stored[..., 0].tobytes())
            image.putpalette(palette.tobytes())
        case "I;16":
            deep = stored[..., 0].astype(np.uint16) * 257 + stored[..., 1] % 2 - (stored[..., 0] > 0)
            image = Image.fromarray(deep)
        case "I":
            image = Image.fromarray(stored[..., 0].astype(np.int32))
        case "F":
            image = Image.fromarray(stored[..., 0].astype(np.float32))
        case "LA":
            image = Image.frombytes(mode, (size[1], size[0]), stored[..., (0, 3)].tobytes())
        case _:
            image = Image.frombytes(mode, (size[1], size[0]), stored[..., : len(mode)].tobytes())
    options: dict[str, Any] = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    if orientation != 1 or draw(st.booleans()):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options |= {"exif": exif} if kind != "TIFF" else {"tiffinfo": {ORIENTATION: orientation}}
        options = options if kind in ("PNG", "TIFF", "WEBP", "JPEG") else {}
    file = io.BytesIO()
    image.save(file, kind, **options)
    colours = shown(stored, mode, palette)
    if kind == "JPEG":
        with Image.open(file) as lossy:
            colours = np.asarray(lossy.convert("RGB")) * 1.0
    return Picture(kind, mode, file.getvalue(), None if colours is None else UPRIGHT[orientation](colours))


def opened(folder: Path, name: str, content: bytes, channels: int, size: int = 8) -> Any:
    """Return a data set of one image."""
    path = folder / "some" / name
    path.parent.mkdir(exist_ok=True)
    for other in path.parent.iterdir():
        other.unlink()
    path.write_bytes(content)
    return open_classes(folder, ImageOptions(size, channels))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.mark.usefixtures("whole_run")
@often(40)
@given(picture=pictures(), ending=st.sampled_from(SUFFIXES), channels=st.sampled_from([1, 3]))
def test_pixels_are_those_that_were_stored(folder: Path, picture: Picture, ending: str, channels: int) -> None:
    files = opened(folder, f"image{ending}", picture.content, channels)
    if picture.shown is None:
        line = refused_line(lambda: files[0])
        assert "32 bits per channel" in line
        return
    image, label = files.whole(0)
    right = picture.shown if channels == 3 else picture.shown @ [[0.299], [0.587], [0.114]]
    assert (tuple(image.shape), label) == ((channels, *right.shape[:2]), 0)
    far = np.abs(image.numpy().transpose(1, 2, 0) - right).max()
    assert far <= (2 if picture.mode in ("CMYK", "LA", "RGBA") else 1), far
    assert files[0][0].shape == (channels, 8, 8)


def test_the_control_a_wrong_turn_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[ORIENTATION] = 6
    Image.frombytes("L", (3, 2), bytes(range(0, 240, 40))).save(file, "PNG", exif=exif)
    stored = np.repeat(np.arange(0, 240, 40.0).reshape(2, 3, 1), 3, 2)
    picture = Picture("PNG", "L", file.getvalue(), UPRIGHT[6](stored))
    check: Any = test_pixels_are_those_that_were_stored
    check.hypothesis.inner_test(folder, picture, ".png", 3)
    monkeypatch.setattr("lockstep.vision.data.labelled.ImageOps.exif_transpose", lambda image, in_place: None)
    with pytest.raises(AssertionError):
        check.hypothesis.inner_test(folder, picture, ".png", 3)


@pytest.mark.usefixtures("whole_run")
@often(40)
@given(picture=pictures(), edits=edits(4, 64), channels=st.sampled_from([1, 3]))
def test_damage_is_refused_or_as_pillow_shows_it(
    folder: Path, picture: Picture, edits: list[Edit], channels: int
) -> None:
    content = damaged(picture.content, edits)
    files = opened(folder, "image.png", content, channels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(content)) as image:
                size = image.size
                image.load()
        except Exception:  # what Pillow can't load can't be right
            refused_line(lambda: files[0])
            return
        sample, line = result_or_line(lambda: files[0])
        if not line:
            assert sample[0].shape == (channels, 8, 8)
            assert sorted(files.whole(0)[0].shape[1:]) == sorted(size)


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "I;16"])
def test_a_tiff_file_that_its_exif_data_turn(folder: Path, mode: str, orientation: int) -> None:
    """Pillow scrambles the pixels of such a file that is not compressed, if it is opened by its path."""
    image = Image.frombytes(mode, (3, 2), bytes(range(24))[: 6 * {"CMYK": 4, "I;16": 2}.get(mode, 1)])
    content = io.BytesIO()
    image.save(content, "TIFF", tiffinfo={ORIENTATION: orientation})
    actual = opened(folder, "image.tif", content.getvalue(), channels=1).whole(0)[0][0].numpy()
    content = io.BytesIO()
    image.save(content, "TIFF")
    upright = opened(folder, "image.tif", content.getvalue(), channels=1).whole(0)[0][0].numpy()
    assert np.array_equal(actual, UPRIGHT[orientation](upright))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_a_mask_has_the_size_of_the_upright_image(tmp_path: Path, kind: str) -> None:
    options = {"tiffinfo": {ORIENTATION: 6}} if kind == "TIFF" else {"exif": Image.Exif()}
    if kind == "PNG":
        options["exif"][ORIENTATION] = 6
    Image.new("L", (3, 2)).save(tmp_path / "image", kind, **options)
    for number, size in enumerate([(2, 3), (3, 2)]):
        Image.new("L", size).save(tmp_path / f"mask{number}", "PNG")
    names, masks = np.array(["image"] * 2), np.array(["mask0", "mask1"])
    files = MaskedFiles(tmp_path, names, np.zeros((2, 0)), 2, 1, masks, 2, None)
    assert files[0][1].shape == (2, 2)
    assert "a mask of 3 x 2 pixels: must have 2 x 3" in refused_line(lambda: files[1])
