"""Folders, lists and shards that people bring: the images that are there, each once, or a refusal of one line.

What is right is known from what was generated.
"""

import csv
import io
import itertools
import json
import shutil
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fuzzing import Edit, damaged, edits, often, result_or_line
from hypothesis import assume, event, example, given
from hypothesis import strategies as st
from PIL import Image
from small_data import config
from written_shards import write_tar

from lockstep.data.build import open_data

pytestmark = pytest.mark.usefixtures("whole_run")

SMALL = {"image_size": 2, "augment": {"crop": 0, "flip": False}}
# Names of classes: plain ones, and those that look alike, are numbers, missing values, or can hardly be seen.
PLAIN = ("cat", "dog", "eel", "7", "10", "9")
ODD = (
    "Cat",
    " cat",
    "\uff43at",
    "07",
    "7.0",
    "é",
    "e\u0301",
    "nan",
    "None",
    "-",
    "a b",
    "a,b",
    '"',
    "#",
    "\u200b",
    "ö" * 60,
)
NAMES = st.sampled_from([*PLAIN, *PLAIN, *ODD]) | st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=6
).filter(lambda name: name not in (".", ".."))
FILES = ("1.png", "2.PNG", "3.jpg", "4.tif", "deep/5.png", "deep/er/6.bmp", "7.x.png", "é.png", " 8.png", "#9.png")
OTHERS = ("a.txt", "Thumbs.db", ".hidden.png", "no_ending", ".DS_Store", "__MACOSX/1.png", ".git/1.png", "a.png.bak")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data_sets")


def png(number: int = 0) -> bytes:
    """Return an image that tells its number by its pixels."""
    file = io.BytesIO()
    Image.frombytes("RGB", (2, 2), bytes([number % 256, number // 256, 7]) * 4).save(file, "PNG")
    return file.getvalue()


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def as_shown(name: str) -> str:
    """Return the class of a label, as Unicode compares texts, without what can't be seen at its ends."""
    blank = "\u2800\u3164\u115f\u1160\uffa0" + "".join(
        each for each in name if each.isspace() or unicodedata.category(each) in ("Cc", "Cf", "Zs")
    )
    return unicodedata.normalize("NFC", name).strip(blank)


def samples_of(part: Any) -> list[tuple[int, int]]:
    """Return the number that each image shows, and its class."""
    samples = [part[index] for index in range(len(part))] if part is not None else []
    return [(int(image[0, 0, 0]) + 256 * int(image[1, 0, 0]), int(label)) for image, label in samples]


def check_samples(splits: Any, right: dict[int, str]) -> None:
    """Check that all images are there, once, with their classes."""
    actual = [each for part in (splits.train, splits.val, splits.test) for each in samples_of(part)]
    assert len(actual) == len(right)
    assert {number: splits.spec.classes[label] for number, label in actual} == right
    assert sorted(set(right.values())) == sorted(splits.spec.classes)


# --- folders ----------------------------------------------------------------------------------------------------------


@dataclass
class Folder:
    """Images by path; and whether they are as the page on image folders asks for."""

    images: dict[str, int]
    others: list[str]
    plain: bool


@st.composite
def folders(draw: st.DrawFn) -> Folder:
    layout = draw(
        st.sampled_from([("",), ("train/", "test/"), ("train/", "val/", "test/"), ("train/",), ("Train/", "test/")])
    )
    plain = draw(st.booleans())
    names = st.sampled_from(PLAIN) if plain else NAMES
    classes = draw(st.lists(names, min_size=2 if plain else 1, max_size=4, unique=True))
    images: dict[str, int] = {}
    for part, name in itertools.product(layout, classes):
        files = draw(st.lists(st.sampled_from(FILES), min_size=1 if plain else 0, max_size=5, unique=True))
        for file in files:
            images[f"{part}{name}/{file}"] = len(images)
    folder = st.sampled_from([*layout, *(f"{part}{name}/" for part in layout for name in classes)])
    others = draw(st.lists(st.tuples(folder, st.sampled_from(OTHERS)).map("".join), max_size=3))
    return Folder(images, others, plain and layout not in (("train/",), ("Train/", "test/")))


@often(30)
@given(what=folders())
@example(what=Folder({"cat/1.png": 0, "dog/1.png": 1}, [], plain=True))
def test_folders(home: Path, what: Folder) -> None:
    root = emptied(home / "folder")
    try:
        for path, number in what.images.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(png(number))
        for path in what.others:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(png(999))
    except OSError:  # names that this file system does not have
        assume(False)
    splits, line = result_or_line(lambda: open_data(config("image_folder", **SMALL), str(root)))
    event("accepted" if splits else "refused")
    assert splits or not what.plain, line
    if splits:
        hidden = {path for path in what.images if any(each.startswith(".") for each in path.split("/"))}
        place = 1 if next(iter(what.images)).startswith(("train/", "val/", "test/")) else 0
        right = {number: as_shown(path.split("/")[place]) for path, number in what.images.items() if path not in hidden}
        check_samples(splits, right)


# --- lists ------------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """The text of a list, and the labels that its rows mean, by number of image."""

    content: bytes
    meant: dict[int, str] = field(default_factory=dict)
    plain: bool = False


CELLS = NAMES | st.sampled_from(["", " ", "\n", "a\nb", "a;b", "'a'", "=1", "\uff11"])


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Generate what a spreadsheet or a script writes."""
    plain = draw(st.booleans())
    count = draw(st.integers(2, 8))
    labels = st.sampled_from(PLAIN[:2]) if plain else CELLS  # train has both
    rows: list[list[str]] = []
    meant: dict[int, str] = {}
    for number in range(count):
        label = PLAIN[number] if plain and number < 2 else draw(labels)
        path = (
            f"{number}.png" if plain else draw(st.sampled_from([f"{number}.png", f"./{number}.png", f" {number}.png"]))
        )
        rows.append([path, label])
        meant[number] = as_shown(label)
    head = ["path", "label"]
    if draw(st.booleans()):
        head.append("split")
        splits = ["train", "val", "test"]
        for number, row in enumerate(rows):
            row.append(
                "train" if number < 2 else draw(st.sampled_from(splits if plain else [*splits, "Train", "", "dev"]))
            )
    order = draw(st.permutations(range(len(head))))
    dialect: dict[str, Any] = {
        "delimiter": "," if plain else draw(st.sampled_from([",", ",", ";", "\t"])),
        "quoting": draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])),
        "lineterminator": draw(st.sampled_from(["\n", "\r\n"])),
    }
    text = io.StringIO()
    csv.writer(text, **dialect).writerows([each[at] for at in order] for each in [head, *rows])
    content = text.getvalue()
    if not plain and draw(st.booleans()):  # a hand has edited it
        lines = content.splitlines(keepends=True)
        at = draw(st.integers(0, len(lines) - 1))
        edit = draw(st.sampled_from(["double", "drop", "blank", "swap", "cell"]))
        changed = {
            "double": [lines[at], lines[at]],
            "drop": [],
            "blank": [lines[at], "\n"],
            "swap": [",".join(reversed(lines[at].strip().split(","))) + "\n"],
            "cell": [lines[at].rstrip() + ",x\n"],
        }[edit]
        lines[at : at + 1] = changed
        content, meant = "".join(lines), {}
    coding = draw(st.sampled_from(["utf-8", "utf-8-sig"] if plain else ["utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    return Table(content.encode(coding, "replace"), meant if coding.startswith("utf-8") else {}, plain)


@often(40)
@given(table=tables())
def test_lists(home: Path, table: Table) -> None:
    root = emptied(home / "list")
    for number in range(8):
        (root / f"{number}.png").write_bytes(png(number))
    (root / "list.csv").write_bytes(table.content)
    changes = {"csv": str(root / "list.csv"), **SMALL}
    splits, line = result_or_line(lambda: open_data(config("image_list", **changes), "nowhere"))
    event("accepted" if splits else "refused")
    assert splits or not table.plain, line
    if splits and table.meant:
        check_samples(splits, table.meant)
    elif splits:
        actual = [each for part in (splits.train, splits.val, splits.test) for each in samples_of(part)]
        assert max(Counter(number for number, _ in actual).values()) == 1, "an image counts once"


# --- shards -----------------------------------------------------------------------------------------------------------


@dataclass
class Members:
    """The members of a tar file in order, and the class that each image's number should have; None: nobody can tell."""

    members: list[tuple[str, bytes]]
    meant: dict[int, str]
    plain: bool


@st.composite
def tar_members(draw: st.DrawFn) -> Members:
    plain, form = draw(st.booleans()), draw(st.sampled_from(["folders", "cls", "json", "mixed"]))
    plain = plain and form != "mixed"
    members: list[tuple[str, bytes]] = []
    meant: dict[int, str] = {}
    for number in range(draw(st.integers(2, 7))):
        label = PLAIN[number] if plain and number < 2 else draw(st.sampled_from(PLAIN) if plain else NAMES)
        of_form = form if form != "mixed" else draw(st.sampled_from(["folders", "cls", "json", "none"]))
        key = f"{label}/{number}" if of_form == "folders" else f"{number:04}"
        prefix = "" if plain else draw(st.sampled_from(["", "", "./", ".git/"]))
        label_first = draw(st.booleans())
        text = {"cls": label.encode(), "json": json.dumps({"label": label}).encode()}.get(of_form)
        of_image = [(f"{prefix}{key}.png", png(number))]
        of_label = [(f"{prefix}{key}.{of_form}", text)] if text is not None else []
        members += of_label + of_image if label_first else of_image + of_label
        meant[number] = as_shown(label)
    if not plain and draw(st.booleans()):
        at = draw(st.integers(0, len(members) - 1))
        other = draw(st.integers(0, len(members) - 1))
        members[at], members[other] = members[other], members[at]
        meant = {}
    return Members(members, meant, plain)


def opened_shards(root: Path) -> Any:
    return result_or_line(lambda: open_data(config("shards", **SMALL, index_dir=str(root.parent / "index")), str(root)))


@often(30)
@given(what=tar_members())
def test_shards(home: Path, what: Members) -> None:
    shutil.rmtree(home / "index", ignore_errors=True)
    root = emptied(home / "shards")
    write_tar(root / "all.tar", dict(what.members))
    splits, line = opened_shards(root)
    event("accepted" if splits else "refused")
    assert splits or not what.plain, line
    if splits:
        actual = [each for part in (splits.train, splits.val, splits.test) for each in samples_of(part)]
        assert len({number for number, _ in actual}) == len(actual), "an image counts once"
        assert len(actual) == sum(name.endswith(".png") and ".git" not in name for name, _ in what.members)
        for number, label in actual:
            assert splits.spec.classes[label] == what.meant.get(number, splits.spec.classes[label])


TAR = {
    f"{number}.{ending}": content
    for number in range(4)
    for ending, content in (("cls", b"ab"[number % 2 :][:1]), ("png", png(number)))
}


@pytest.mark.parametrize("kind", ["tar", "parquet"])
@often(30)
@given(edits=edits(4, 16))
def test_damaged_shards(home: Path, kind: str, edits: list[Edit]) -> None:
    """Each image that is read has the pixels that were written, or is refused: PNG files have checksums."""
    shutil.rmtree(home / "index", ignore_errors=True)
    root = emptied(home / "damaged")
    if kind == "tar":
        content = write_tar(root / "all.tar", TAR).read_bytes()
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [{"bytes": png(number), "path": f"{number}.png"} for number in range(4)]
        pq.write_table(pa.table({"image": rows, "label": [0, 1, 0, 1]}), root / "all.parquet")
        content = (root / "all.parquet").read_bytes()
    (root / f"all.{kind}").write_bytes(damaged(content, edits))
    splits, _ = opened_shards(root)
    event("accepted" if splits else "refused")
    if not splits:
        return
    for part in filter(None, (splits.train, splits.val, splits.test)):
        for index in range(len(part)):
            sample, _ = result_or_line(partial(part.__getitem__, index))
            if sample is not None:
                assert sample[0].shape == (3, 2, 2)
                assert int(sample[0][0, 0, 0]) < 4
                assert 0 <= int(sample[1]) < len(splits.spec.classes)
