"""Labels: one rule for folders, lists, shards and the hub. What looks alike is never two classes."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small_data import config, open_list, refusal_of, write_images, write_list
from written_shards import picture, write_tar

from lockstep import Source, Spec
from lockstep.data.build import open_data, refuse_untrained_classes
from lockstep.data.datasets import ArrayDataset
from lockstep.data.splits import same_classes
from lockstep.vision.data import image_folder
from lockstep.vision.data.classes import class_names, clean, ordered

PARQUET = "pip install -e .[huggingface] brings datasets"


SAME_LOOKS = [
    ("a", "a "),
    ("a", "\xa0a"),
    ("a", "a\u200b"),
    ("a", "a\0"),
    ("caf\u00e9", "cafe\u0301"),
    ("1", "1.0"),
    ("1", "01"),
    ("1", "1."),
    ("-1", "-1.00"),
    ("10", "\uff11\uff10"),
    ("dog", "Dog"),
    ("big dog", "big  dog"),
    ("big dog", "big\xa0dog"),
    ("\ufb01sh", "fish"),
    ("a\u200bb", "ab"),
    ("a\u034fb", "ab"),
    ("a", "a\u3164"),
    ("a b", "a\u2800b"),
    ("\u845b", "\u845b\U000e0100"),
    ("1" * 40, "01" + "1" * 39),
]


@pytest.mark.parametrize(("one", "other"), SAME_LOOKS)
def test_labels_that_look_the_same_are_refused(tmp_path: Path, one: str, other: str) -> None:
    rows = [f"images/{number}.png,{[one, other, 'z'][number % 3]}" for number in range(12)]
    line = refusal_of(open_list, write_list(tmp_path, "path,label", rows))
    shown = (
        "list.csv: labels that look alike: {!r} (4, row 2, 5, 8 and 1 more), {!r} (4, row 3, 6, 9 and 1 more): write"
    )
    assert shown.format(one, other) in line or shown.format(one, other.lstrip()) in line, line
    members = {f"{number}.cls": [one, other, "z"][number % 3].encode() for number in range(12)}
    names = sorted([*members, *(f"{number}.png" for number in range(12))])
    write_tar(tmp_path / "shards" / "a.tar", {name: members.get(name, picture()) for name in names})
    if clean(one) != clean(other) or "\0" in other or "e" in one:  # scan_tar strips blanks
        assert "labels that look alike: " in refusal_of(open_data, config("shards"), str(tmp_path / "shards"))
    if "\0" not in other:
        for name in (one, other):
            (tmp_path / "folders" / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "folders" / name / "0.png")
        assert "labels that look alike: " in refusal_of(image_folder, str(tmp_path / "folders"))


@pytest.mark.usefixtures("whole_run")
def test_labels_of_the_hub_that_look_the_same_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason=PARQUET)
    rows = {"image": [{"bytes": picture(), "path": None}] * 4, "label": ["a", "b", "a ", "b"]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "d"))
    line = refusal_of(open_data, config("huggingface", path=str(tmp_path / "d")), "nowhere")
    assert "labels that look alike: 'a' (1), 'a ' (1): write them in one way" in line


@pytest.mark.parametrize("labels", [("a", "b"), ("A", "a"), ("1", "10"), ("1", "-1"), ("a.1", "a1"), ("e", "\u00e9")])
def test_labels_that_differ_visibly_are_classes(labels: tuple[str, str]) -> None:
    assert class_names(dict.fromkeys(labels, 1), "here")[1] == ordered(labels)


def test_a_label_is_written_without_what_cannot_be_seen(tmp_path: Path) -> None:
    labels = ("a ", "cafe\u0301\u200b")
    rows = [f"images/{number}.png,{labels[number % 2]}" for number in range(12)]
    assert open_list(write_list(tmp_path, "path,label", rows)).spec.classes == ("a", "caf\u00e9")
    assert clean("\ufeff\0 a b\t") == "a b"


@pytest.mark.parametrize("label", ["nan", "NaN", "None", "NULL", "null", "<NA>", "NaT", "N/A", "NA"])
def test_missing_values_are_refused_as_labels(tmp_path: Path, label: str) -> None:
    rows = [f"images/{number}.png,{['a', 'b', label][number % 3]}" for number in range(12)]
    line = refusal_of(open_list, write_list(tmp_path, "path,label", rows))
    assert f"row 4, 7, 10 and 1 more: the label {label!r} is how programs write a missing value" in line
    assert class_names({"none": 1, "a": 2}, "here")[1] == ["a", "none"]  # a class of many data sets
    assert class_names({"None": 1, "a": 2}, "here", order=["None", "a"])[1] == ["None", "a"]  # listed on purpose


@pytest.mark.parametrize(
    ("head", "row", "message"),
    [
        ("path,label", "images/2.png, \u00a0", "row 4 has no label"),
        (
            "path,label",
            "images/2.png,a\x07b",
            "row 4: the label 'a\\x07b' has the character '\\x07', which can't be shown",
        ),
        ("path,label,label", "images/2.png,a,b", "it has 2 columns label: rename or remove all but one"),
        ("path,label,label ", "images/2.png,a,b", "it has 2 columns label"),
    ],
)
def test_odd_labels_are_refused(tmp_path: Path, head: str, row: str, message: str) -> None:
    end = ",b" * head.count("label,label")
    line = refusal_of(open_list, write_list(tmp_path, head, [f"images/0.png,a{end}", f"images/1.png,b{end}", row]))
    assert message in line, line


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1,5", "1_5", "1e99", "0x10", "True", "None"])
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, value: str) -> None:
    rows = [f"images/{number}.png,{number}" for number in range(11)] + [f'images/11.png,"{value}"']
    file = write_list(tmp_path, "path,age", rows)
    assert f"row 13: age is {value}: must be a number" in refusal_of(open_list, file, values=["age"])
    file.write_text(file.read_text().replace(value, "5"))
    assert open_list(file, values=["age"]).spec.classes == ("age",)


def test_one_name_in_two_forms_of_unicode_is_one_class(tmp_path: Path) -> None:
    for part, name in (("train", "caf\u00e9"), ("val", "cafe\u0301")):
        write_images(tmp_path, (part,))
        (tmp_path / part / "cat").rename(tmp_path / part / name)
    source = image_folder(str(tmp_path))
    assert source.spec.classes == ("caf\u00e9", "dog")
    assert source.val.labels.tolist() == [0] * 6 + [1] * 6
    assert source.val.decoded(0, 8)[1] == 0
    assert same_classes(["cafe\u0301", "a"], ["caf\u00e9", "a"])
    assert not same_classes(["a", "b"], ["b", "a"])


def write_numbers(root: Path) -> None:
    for name in ("1", "2", "10", "11"):
        (root / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8)).save(root / name / f"{number}.png")


def test_numbers_are_sorted_as_numbers_everywhere(tmp_path: Path) -> None:
    write_numbers(tmp_path / "d")
    paths = sorted((tmp_path / "d").rglob("*.png"))
    listed = tmp_path / "d" / "list.csv"
    listed.write_text(
        "\n".join(["path,label", *(f"{path.parent.name}/{path.name},{path.parent.name}" for path in paths)])
    )
    members = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in paths}
    write_tar(tmp_path / "s" / "a.tar", members)
    trained = ("1", "10", "11", "2")  # as an older version sorted folders
    for name, folder, options in (
        ("image_folder", "d", {}),
        ("image_list", "d", {"csv": str(listed)}),
        ("shards", "s", {}),
    ):
        for known, expected in (((), ("1", "2", "10", "11")), (trained, trained), (("a", "b"), ("1", "2", "10", "11"))):
            splits = open_data(config(name, **options), str(tmp_path / folder), known_classes=known)
            assert splits.spec.classes == expected
            files: Any = getattr(splits.train, "dataset", splits.train)
            classes = {
                str(files.name(index)).partition("/")[0]: int(files.labels[index]) for index in range(len(files))
            }
            assert [classes[each] for each in expected] == [0, 1, 2, 3]
    assert ordered(["-1", "10", "9.5"]) == ["-1", "9.5", "10"]
    assert ordered(["10", "9", "a"]) == ["10", "9", "a"]


def images(labels: list[int]) -> ArrayDataset:
    import numpy as np

    return ArrayDataset(np.zeros((len(labels), 1, 4, 4), dtype=np.uint8), np.array(labels))


def test_a_class_without_training_images_is_refused(tmp_path: Path) -> None:
    rows = [f"images/{n}.png,{'abc'[n % 3]},{'test' if n % 3 == 2 or n > 8 else 'train'}" for n in range(12)]
    file = write_list(tmp_path, "path,label,split", rows)
    message = "data: 4 test images of classes without a training image: c: train must have some"
    assert message in refusal_of(open_list, file)
    file.write_text(file.read_text().replace("2.png,c,test", "2.png,c,train"))
    assert len(open_list(file).test) == 5
    spec = Spec(1, 4, ("a", "b", "c"))
    refuse_untrained_classes(Source(images([0, 1, 2]), images([2]), spec))
    refuse_untrained_classes(Source(images([0, 1]), images([0]), spec))
    for source in (Source(images([0, 1]), images([2]), spec), Source(images([0, 1]), None, spec, images([2, 2]))):
        assert "images of classes without" in refusal_of(refuse_untrained_classes, source).replace(
            "image of", "images of"
        )
