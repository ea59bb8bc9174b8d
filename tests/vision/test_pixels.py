"""Pixels of image files: transparency, values of fewer than 16 bits, other colour spaces, images that are too large."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from small_data import config, refusal_of, write_images
from written_shards import write_tar

from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.vision.data import ImageFiles, image_folder
from lockstep.vision.data.labelled import decode
from lockstep.vision.data.pixels import Reading

GREY_PNG, RGB_PNG, GREY_ALPHA_PNG, RGBA_PNG = 0, 2, 4, 6  # colour types


def write_png(path: Path, values: NDArray[Any], kind: int, transparent: bytes = b"") -> None:
    """Write a PNG file of 16 bits per channel, which Pillow writes for grey images only."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    chunks = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    chunks[1:1] = [chunk(b"tRNS", transparent)] if transparent else []
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def pictures(folder: Path) -> dict[str, Path]:
    """Write one picture in all ways: three greys, and transparent pixels with other colours below in each file."""
    rng = np.random.default_rng(0)
    grey = rng.choice(np.array([0, 80, 160], dtype=np.uint8), (9, 7))
    alpha = np.where(rng.random((9, 7)) < 0.4, 0, 255).astype(np.uint8)
    files: dict[str, Path] = {}

    def save(name: str, image: Image.Image, **options: Any) -> None:
        files[name] = folder / name
        image.save(files[name], **options)

    for below in (0, 255, 33):
        colour = np.where(alpha[..., None] > 0, grey[..., None], below).repeat(3, 2).astype(np.uint8)
        rgba = Image.fromarray(np.concatenate([colour, alpha[..., None]], 2))
        la = Image.fromarray(np.stack([colour[..., 0], alpha], 2))
        for ending in ("png", "tiff", "webp"):
            save(f"rgba{below}.{ending}", rgba, **({"lossless": True, "exact": True} if ending == "webp" else {}))
        save(f"la{below}.png", la)
        save(f"la{below}.tiff", la)
        save(f"la{below}.webp", la.convert("RGBA"), lossless=True)
        deep = np.concatenate([colour, alpha[..., None]], 2).astype(np.int64) * 257
        files[f"rgba{below}_16.png"], files[f"la{below}_16.png"] = folder / f"r{below}.png", folder / f"l{below}.png"
        write_png(files[f"rgba{below}_16.png"], deep, RGBA_PNG)
        write_png(files[f"la{below}_16.png"], deep[..., 2:], GREY_ALPHA_PNG)
    numbers = np.where(alpha > 0, 1 + grey // 80, 0).astype(np.uint8)
    palette = Image.fromarray(numbers).convert("P")
    palette.putdata(numbers.reshape(-1).tolist())
    palette.putpalette([9, 9, 9, 0, 0, 0, 80, 80, 80, 160, 160, 160])
    save("palette.png", palette, transparency=0)
    save("palette_bytes.png", palette, transparency=bytes([0, 255, 255, 255]))
    save("palette.gif", palette, transparency=0)
    key = np.where(alpha > 0, grey, 77).astype(np.uint8)
    save("grey_key.png", Image.fromarray(key), transparency=77)
    save("rgb_key.png", Image.fromarray(key).convert("RGB"), transparency=(77, 77, 77))
    for name, kind, values, count in (("grey", GREY_PNG, key, 1), ("rgb", RGB_PNG, key[..., None].repeat(3, 2), 3)):
        files[f"{name}_key_16.png"] = folder / f"{name}_key_16.png"
        transparent = struct.pack(f">{count}H", *[77 * 257] * count)
        write_png(files[f"{name}_key_16.png"], values.astype(np.int64) * 257, kind, transparent)
    tiff = files["rgba0.tiff"].read_bytes()  # with alpha that is multiplied in: black below, so nothing else changes
    associated, plain = struct.pack("<HHIHH", 338, 3, 1, 1, 0), struct.pack("<HHIHH", 338, 3, 1, 2, 0)
    assert plain in tiff
    files["associated.tiff"] = folder / "associated.tiff"
    files["associated.tiff"].write_bytes(tiff.replace(plain, associated))
    return files


@pytest.mark.parametrize(
    ("background", "behind"),
    [("white", (255, 255, 255)), (None, (255, 255, 255)), ("#102030", (16, 32, 48)), ([1, 2, 3], (1, 2, 3))],
)
def test_files_that_look_the_same_decode_the_same(tmp_path: Path, background: Any, behind: tuple[int, ...]) -> None:
    files = pictures(tmp_path)
    reading = Reading(background)
    colours = decode(files["rgba0.png"], None, "RGB", reading)
    hidden = torch.from_numpy(np.array(Image.open(files["rgba0.png"]))[..., 3] == 0)
    assert [plane[hidden].unique().tolist() for plane in colours] == [[value] for value in behind]
    assert sorted(colours[0][~hidden].unique().tolist()) == [0, 80, 160]
    greys = decode(files["rgba0.png"], None, "L", reading)
    for name, file in files.items():
        assert torch.equal(decode(file, None, "RGB", reading), colours), name
        assert torch.equal(decode(file, None, "L", reading), greys), name


def test_half_transparent_pixels_are_mixed(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (0, 100, 200, 51)).save(tmp_path / "a.png")
    assert decode(tmp_path / "a.png", None, "RGB")[:, 0, 0].tolist() == [204, 224, 244]
    assert decode(tmp_path / "a.png", None, "RGB", Reading("black"))[:, 0, 0].tolist() == [0, 20, 40]


def test_a_fourth_channel_that_is_not_alpha_is_left_out(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (10, 20, 30, 0)).save(tmp_path / "a.tiff")
    alpha, other = struct.pack("<HHIHH", 338, 3, 1, 2, 0), struct.pack("<HHIHH", 338, 3, 1, 0, 0)
    (tmp_path / "b.tiff").write_bytes((tmp_path / "a.tiff").read_bytes().replace(alpha, other))
    assert decode(tmp_path / "a.tiff", None, "RGB")[:, 0, 0].tolist() == [255] * 3
    assert decode(tmp_path / "b.tiff", None, "RGB")[:, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("background", ["whiteish", [1, 2], [1, 2, 256], [0.5, 0.5, 0.5], 7, "#00000000"])
def test_backgrounds_that_are_refused(tmp_path: Path, background: Any) -> None:
    line = refusal_of(open_data, config("image_folder", background=background), str(write_images(tmp_path)))
    assert "data.background=" in line
    assert "must be a colour, such as white or '#808080', or three numbers of 0 to 255" in line


def test_each_data_set_of_files_has_the_background(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "d" / part / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGBA", (4, 4), (number, 0, 0, 0)).save(tmp_path / "d" / part / name / f"{number}.png")
    files = sorted((tmp_path / "d").rglob("*.png"))
    names = [str(file.relative_to(tmp_path / "d")) for file in files]
    (tmp_path / "d" / "list.csv").write_text(
        "\n".join(["path,label", *(f"{each},{each.split('/')[1]}" for each in names)])
    )
    members = {
        name.partition("/")[2].replace("/", f"/{name[:2]}"): file.read_bytes()
        for name, file in zip(names, files, strict=True)
    }
    write_tar(tmp_path / "s" / "a.tar", members)
    sets = {
        "image_folder": ("d", {}),
        "image_list": ("d", {"csv": str(tmp_path / "d" / "list.csv")}),
        "shards": ("s", {}),
    }
    for name, (folder, options) in sets.items():
        for background, value in (("white", 255), ([7, 7, 7], 7)):
            splits = open_data(config(name, **options, background=background, image_size=8), str(tmp_path / folder))
            for part in (splits.train, splits.val, splits.test):
                assert part[0][0].unique().tolist() == [value], (name, background)
    assert ImageFiles(tmp_path / "d", 4, 3)[0][0].unique().tolist() == [255]
    assert ImageFiles(tmp_path / "d", 4, 1, background=[7, 7, 7])[0][0].unique().tolist() == [7]


# --- values of fewer bits in files of 16 ---


def ramp(bits: int) -> NDArray[np.uint16]:
    return np.linspace(0, 2**bits - 1, 64).round().astype(np.uint16).reshape(8, 8)


def write_ramps(root: Path, bits: int, ending: str = "png", **options: Any) -> Path:
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(ramp(bits)).save(root / name / f"{number}.{ending}", **options)
    return root


@pytest.mark.parametrize("ending", ["png", "tiff"])
@pytest.mark.parametrize("bits", [8, 10, 12, 14])
def test_fewer_bits_in_16_are_requested(tmp_path: Path, bits: int, ending: str) -> None:
    root = write_ramps(tmp_path, bits, ending)
    line = refusal_of(image_folder, str(root))
    assert f"of 16 bits that were checked have values up to {2**bits - 1:,} of 65,535: use data.bits={bits} if" in line
    assert "or data.bits=16 if they are dark" in line
    assert f"use data.bits={bits} if" in refusal_of(ImageFiles, root, 8, 1)
    image = image_folder(str(root), channels=1, image_size=8, bits=bits).train[0][0]
    assert image.flatten().tolist() == np.round(ramp(bits) * (255 / (2**bits - 1))).astype(int).flatten().tolist()
    assert ImageFiles(root, 8, 1, bits=bits)[0][0].max() == 255
    dark = image_folder(str(root), channels=1, image_size=8, bits=16).train[0][0]
    assert dark.flatten().tolist() == np.round(ramp(bits) / 257).astype(int).flatten().tolist()


def test_shards_and_lists_ask_for_the_bits(tmp_path: Path) -> None:
    root = write_ramps(tmp_path / "d", 12)
    files = sorted(root.rglob("*.png"))
    write_tar(tmp_path / "s" / "a.tar", {f"{each.parent.name}/{each.name}": each.read_bytes() for each in files})
    rows = [f"{each.parent.name}/{each.name},{each.parent.name}" for each in files]
    (root / "list.csv").write_text("\n".join(["path,label", *rows]))
    for data in (config("shards"), config("image_list", csv=str(root / "list.csv"))):
        folder = str(tmp_path / "s")
        assert "use data.bits=12 if" in refusal_of(open_data, data, folder)
        assert open_data({**data, "bits": 12, "image_size": 8}, folder).train[0][0].max() == 255
        assert "use data.bits=12 if" in refusal_of(open_data, data, folder), "an index hid it"


def test_16_bits_of_which_one_image_is_bright_are_read_as_they_are(tmp_path: Path) -> None:
    root = write_ramps(tmp_path, 12)
    Image.fromarray(ramp(16)).save(root / "dog" / "9.png")
    for name in ("cat", "dog"):
        Image.fromarray(np.zeros((8, 8), dtype=np.uint16)).save(root / name / "black.png")
    source = image_folder(str(root), channels=1, image_size=8, val_fraction=0, test_fraction=0)
    assert [source.train[number][0].max().item() for number in range(4)] == [16, 16, 16, 16]
    line = refusal_of(lambda: [image_folder(str(root), bits=12, val_fraction=0, test_fraction=0).train[9]])
    assert "dog/9.png can't be decoded (it has the value 65,535, more than 12 bits have: correct data.bits)" in line


@pytest.mark.parametrize("tag", [281, 341])
def test_a_tiff_file_that_states_its_bits_needs_no_key(tmp_path: Path, tag: int) -> None:
    root = write_ramps(tmp_path, 12, "tiff", tiffinfo={tag: 4095})
    image = image_folder(str(root), channels=1, image_size=8).train[0][0]
    assert image.flatten().tolist() == np.round(ramp(12) * (255 / 4095)).astype(int).flatten().tolist()


def test_a_tiff_file_of_packed_12_bits_is_scaled(tmp_path: Path) -> None:
    values = ramp(12).astype(int).flatten().tolist()
    packed = b"".join(struct.pack(">I", a << 12 | b)[1:] for a, b in zip(values[::2], values[1::2], strict=True))
    entries = {256: 8, 257: 8, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 8, 279: len(packed)}
    directory = struct.pack("<H", len(entries)) + b"".join(
        struct.pack("<HHII", *(t, 4, 1, v)) for t, v in entries.items()
    )
    (tmp_path / "a.tiff").write_bytes(struct.pack("<2sHI", b"II", 42, 8 + len(packed)) + packed + directory + bytes(4))
    assert (
        decode(tmp_path / "a.tiff", None, "L")[0].flatten().tolist()
        == np.round(ramp(12) * (255 / 4095)).astype(int).flatten().tolist()
    )


def test_colours_of_fewer_bits_are_requested_and_not_guessed(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        write_png(tmp_path / name / "0.png", ramp(12)[..., None].repeat(3, 2), RGB_PNG)
    assert "use data.bits=12 if" in refusal_of(image_folder, str(tmp_path))
    source = image_folder(str(tmp_path), bits=12, val_fraction=0, test_fraction=0)
    assert "colours of 16 bits can't be read as 12: save it with 8 bits" in refusal_of(lambda: source.train[0])
    assert image_folder(str(tmp_path), bits=16, val_fraction=0).train[0][0].max() == 15


@pytest.mark.parametrize("bits", [7, 17, 12.0, "12", True])
def test_bits_that_are_refused(tmp_path: Path, bits: Any) -> None:
    line = refusal_of(open_data, config("image_folder", bits=bits), str(write_images(tmp_path)))
    assert "data.bits=" in line


# --- others ---


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_lab_is_read(tmp_path: Path, mode: str) -> None:
    Image.new("LAB", (4, 4), (200, 128, 128)).save(tmp_path / "a.tiff")
    assert decode(tmp_path / "a.tiff", None, mode).float().std() < 1


def test_too_large_images_are_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_images(tmp_path, (".",))
    Image.new("L", (100, 41)).save(root / "cat" / "large.png")
    source = image_folder(str(root), val_fraction=0, test_fraction=0)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    large = f"{root / 'cat' / 'large.png'} (too large, 4,100 pixels: at most 4,000 can be read)"
    line = refusal_of(image_folder, str(root))
    assert f"1 of 13 image files that were checked can't be read, being too large: {large}: make it smaller" in line
    assert "repair" not in line
    assert f"left out: {large}" in image_folder(str(root), skip_broken=True).about
    with pytest.raises(UserError, match=r"large.png is too large, 4,100 pixels: .*: make it smaller, or data.skip_br"):
        [source.train[number] for number in range(13)]
    file = io.BytesIO()
    Image.new("L", (100, 41)).save(file, "PNG")
    members = {f"{name}/1.png": file.getvalue() for name in ("a", "b")}
    write_tar(tmp_path / "s" / "a.tar", members)
    assert "being too large" in refusal_of(open_data, config("shards"), str(tmp_path / "s"))


def test_a_file_without_rights_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_images(tmp_path, (".",))
    plain = open

    def failing(source: Any, mode: str) -> Any:
        if str(source).endswith("cat/3.png"):
            raise PermissionError(13, "Permission denied", str(source))
        return plain(source, mode)

    monkeypatch.setattr("lockstep.vision.data.pixels.open", failing, raising=False)
    assert "cat/3.png (Permission denied): repair or remove it" in refusal_of(image_folder, str(root))
