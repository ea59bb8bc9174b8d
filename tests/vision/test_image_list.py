"""A CSV file of images: read, split, and refused where something is wrong with it."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import open_list, refusal_of, write_list

from lockstep.errors import UserError
from lockstep.vision.data.folders import ImageFiles


def test_a_list_is_split_by_class(tmp_path: Path) -> None:
    rows = [f"images/{number}.png,{10 if number % 2 else 9}" for number in range(12)]
    file = write_list(tmp_path, "path,label", rows, "utf-8-sig")  # as Excel writes it
    actual = open_list(file, val_fraction=0.2, test_fraction=0.3)
    assert actual.spec.classes == ("9", "10")
    counts = [np.bincount(part.labels).tolist() for part in (actual.train, actual.val, actual.test)]
    assert counts == [[3, 3], [1, 1], [2, 2]]
    file.write_text("path,label\n" + "\n".join([*rows[1:2], *rows[:1], *rows[2:]]))
    assert set(open_list(file, val_fraction=0.2, test_fraction=0.3).test.names) == set(actual.test.names)
    file.write_text("path,label\n" + "\n".join([rows[0].replace(",9", ",10"), *rows[1:]]))
    assert open_list(file).fingerprint != actual.fingerprint


def test_a_list_describes_how_it_is_split(tmp_path: Path) -> None:
    splits = ["train"] * 8 + ["val"] * 3 + ["test"]
    rows = [f"{split},images/{number}.png,{'ab'[number % 2]}" for number, split in enumerate(splits)]
    file = write_list(tmp_path, "split,path,label", rows)
    actual = open_list(file)
    assert [len(part) for part in (actual.train, actual.val, actual.test)] == [8, 3, 1]
    file.write_text("split,path,label\n" + "\n".join(rows[:8]))
    actual = open_list(file, val_fraction=0.25)
    assert (len(actual.train), len(actual.val), actual.test) == (6, 2, None)


@pytest.mark.parametrize(
    ("head", "row", "message"),
    [
        ("path,label", "images/99.png,b", "row 4: there is no file"),
        ("path,label", ",b", "row 4 has no path"),
        ("path,label", "images/2.png,", "row 4 has no label"),
        ("path,label", "images/2.png,a", "only one label, a: it must have two labels at least"),
        ("path,label", "images/2.png,b,train", "row 4 has 3 values for 2 columns: put a value with a comma"),
        ("path,label", "\nimages/2,5.png,b", "row 5 has 3 values"),  # as an editor counts lines
        ("path,label", "2.png,b", "2.png: paths must be relative to the list's folder"),
        ("images/3.png,b", "images/2.png,b", "its columns are images/3.png, b: its first row must be"),
        (
            "path,class",
            "images/2.png,b",
            "its columns are path, class: its first row must be path,label or path,label,split",
        ),
        (
            "path;label",
            "images/2.png;b",
            "its columns are path;label: its first row must be path,label or path,label,split",
        ),
        ("path,label,split", "images/2.png,b,dev", "row 2: split is empty: it must be train, val or test"),
    ],
)
def test_lists_that_are_refused(tmp_path: Path, head: str, row: str, message: str) -> None:
    file = write_list(tmp_path, head, ["images/0.png,a", "images/1.png,a", row])
    line = refusal_of(open_list, file)
    assert message in line, line
    assert str(file) in line


def test_a_quotation_mark_of_the_last_row_is_closed(tmp_path: Path) -> None:
    file = write_list(tmp_path, "path,label", ["images/0.png,1", 'images/1.png,"2'])
    assert "row 3 can't be read (unexpected end of data)" in refusal_of(open_list, file)
    file.write_text(file.read_text(), encoding="utf-16")
    assert refusal_of(open_list, file).endswith(": save it as UTF-8")


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ('"unclosed', "row 3 can't be read (unexpected end of data): close the quotation mark of a value at its end"),
        ('"closed"x', "row 3 can't be read (',' expected after '\"'): close the quotation mark"),
        ('"escaped\\"x"', "row 3 can't be read (',' expected after '\"'): close the quotation mark"),
        ('"two\nlines"', "the value 'two\\nlines' of row 3 ends in row 4"),
        ('"a\rb"', "'a\\rb'"),
    ],
)
def test_a_quotation_mark_swallows_no_row_whatever_column_it_is_in(tmp_path: Path, comment: str, message: str) -> None:
    rows = ["images/0.png,1,fine", f"images/1.png,2,{comment}", "images/2.png,3,fine"]
    file = write_list(tmp_path, "path,age,comment", rows)
    line = refusal_of(open_list, file, values=["age"])
    assert message in line, line
    assert "\n" not in line
    closed = [rows[0], 'images/1.png,2,"a ""quote"", closed"', 'images/2.png,3,6"']
    file.write_text("\n".join(["path,age,comment", *closed]))
    data = open_list(file, values=["age"], val_fraction=0, test_fraction=0)
    assert len(data.train) == 3


def test_a_list_of_files_to_predict_has_a_value_in_each_line(tmp_path: Path) -> None:
    file = write_list(tmp_path, "path,comment", ["images/0.png,fine", 'images/1.png,"unclosed', "images/2.png,fine"])
    line = refusal_of(ImageFiles, str(file), 8, 3)
    assert f"images={file}: row 3 can't be read (unexpected end of data)" in line, line
    file.write_text(file.read_text().replace('"', ""))
    assert len(ImageFiles(str(file), 8, 3)) == 3


def test_a_list_that_is_missing_is_refused(tmp_path: Path) -> None:
    for file, message in ((None, "data.csv must be given"), (tmp_path / "x.csv", "x.csv: can't be read (No such file")):
        line = refusal_of(open_list, file)
        assert message in line
    (tmp_path / "empty.csv").touch()
    with pytest.raises(UserError, match="its columns are none"):
        open_list(tmp_path / "empty.csv")


REPEATED = ("images/1.png", "./images/1.png", "images/../images/1.png", "link.png", "folder/1.png", "hard.png")


@pytest.mark.parametrize("path", REPEATED)
def test_an_image_that_is_listed_again_counts_once(tmp_path: Path, path: str) -> None:
    rows = [f"images/{number}.png,{'ab'[number % 2]}" for number in range(12)]
    file = write_list(tmp_path, "path,label", rows)
    (tmp_path / "link.png").symlink_to("images/1.png")
    (tmp_path / "folder").symlink_to("images")
    (tmp_path / "hard.png").hardlink_to(tmp_path / "images" / "1.png")
    before = open_list(file)
    file.write_text("\n".join(["path,label", *rows, f"{path},b"]))
    assert open_list(file).fingerprint == before.fingerprint
    warning = f"1 image listed again, with the same label, counted once: {file}: row 14 ({path})"
    assert warning in open_list(file).about
    file.write_text("\n".join(["path,label", *rows, f"{path},a"]))
    line = refusal_of(open_list, file)
    assert f"{file}: row 3 (images/1.png) and {file}: row 14 ({path}) are the same image, with b and with a" in line
    for part in ("val", "test"):
        file.write_text("\n".join(["path,label,split", *(f"{row},train" for row in rows), f"{path},b,{part}"]))
        line = refusal_of(open_list, file)
        assert f"row 14 ({path}) are the same image, in train and in {part}: it must be in one part" in line


def test_a_file_that_cannot_be_looked_at_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_list(tmp_path, "path,label", ["images/0.png,a", "images/1.png,b"])
    stat = os.stat

    def failing(path: Any, **options: Any) -> Any:
        if str(path).endswith("images/1.png"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", failing)
    assert "images/1.png can't be read (Permission denied)" in refusal_of(open_list, file)
