"""data.window: images of shards are numbered by their place, and a run on a window is the same on every layout."""

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import written_shards
from conftest import Program, composed
from small_data import config, layout, refusal_of
from written_shards import CLASSES, write_folder, write_shards

from lockstep.checkpoint.start import check_checkpoint_fits
from lockstep.config.check import Config, check
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.report.provenance import checkpoint_record

PARTS = (("train", 14), ("val", 2), ("test", 4))
RUN = (
    *("data=shards", "data.image_size=20", "data.window=2", "scheduler=constant", "batch_size=9", "pieces=3"),
    *("exact=true", "threads=1", "accelerator=cpu", "logger=none", "max_epochs=3", "checkpoint_every=1"),
)


opened = partial(written_shards.opened, window=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"), PARTS)


def images(part: Any, ids: Any) -> list[tuple[bytes, int]]:
    return [(image.numpy().tobytes(), label) for image, label in (part[int(index)] for index in ids)]


def test_images_are_numbered_by_their_place(folder: Path, tmp_path: Path) -> None:
    root = write_shards(folder, tmp_path / "shards", "tar", count=5)
    data = opened(root)
    assert data.shard_borders.tolist() == [0, 9, 18, 26, 34, 42]
    sorted_by_class = opened(root, window=None)
    assert sorted_by_class.shard_borders is None
    assert (np.diff(sorted_by_class.train.labels) >= 0).all()
    assert sorted(images(data.train, range(42))) == sorted(images(sorted_by_class.train, range(42)))
    for shard in range(5):
        places = data.train.places[data.shard_borders[shard] : data.shard_borders[shard + 1]]
        assert set(places["file"]) == {shard}
        assert (np.diff(places["start"]) > 0).all()
    assert data.fingerprint != sorted_by_class.fingerprint
    assert data.val.shard_borders.tolist() == [0, 2, 3, 4, 5, 6]
    assert data.test.shard_borders.tolist() == [0, 3, 6, 8, 10, 12]


@pytest.mark.usefixtures("whole_run")
def test_the_form_of_the_shards_changes_no_number(folder: Path, tmp_path: Path) -> None:
    """With the same images in the same shards."""
    pytest.importorskip("pyarrow", reason="pip install -e .[huggingface] brings pyarrow, which parquet files need")
    forms = [opened(write_shards(folder, tmp_path / form, form)) for form in ("tar", "webdataset", "parquet")]
    for part in ("train", "val", "test"):
        count = len(getattr(forms[0], part))
        one, *others = (images(getattr(data, part), range(count)) for data in forms)
        # the names of classes that are numbers sort as numbers, so the labels agree, too
        assert all(each == one for each in others)
    assert len({tuple(data.shard_borders.tolist()) for data in forms}) == 1


def test_a_shard_without_an_image_has_none(folder: Path, tmp_path: Path) -> None:
    root = write_shards(folder, tmp_path / "shards", "tar", count=3)
    (root / "train-00001a.tar").write_bytes(bytes(10240))  # an archive without a member
    data = opened(root)
    assert data.shard_borders.tolist() == [0, 14, 28, 28, 42]
    steps = data.order(layout(batch_size=9, pieces=3), 1).encoded_ids(0)
    assert sorted(steps.tolist()) == list(range(42))


def test_one_part_is_read_whole_or_refused(folder: Path, tmp_path: Path) -> None:
    root = write_shards(folder, tmp_path / "shards", "tar")
    for path in [*root.glob("val-*"), *root.glob("test-*")]:
        path.unlink()
    assert refusal_of(opened, root) == (
        f"data.window=2: {root} has one part, and data.val_fraction=0.1 and data.test_fraction=0.1 would take images "
        "out of all shards: name train, val and test in the shards' paths, or use 0 for both"
    )
    data = opened(root, val_fraction=0.0, test_fraction=0.0)
    assert (len(data.train), data.val, data.test) == (42, None, None)


def test_a_window_of_a_folder_is_an_unknown_option(folder: Path) -> None:
    assert "window" in refusal_of(lambda: open_data(config("image_folder", window=2), str(folder)))


def test_known_classes_keep_the_places(folder: Path, tmp_path: Path) -> None:
    root = write_shards(folder, tmp_path / "shards", "tar")
    turned = opened(root, known_classes=[*reversed(CLASSES)])
    plain = opened(root)
    assert turned.spec.classes == (*reversed(CLASSES),)
    assert [2 - label for _, label in images(turned.train, range(42))] == plain.train.labels.tolist()
    assert np.array_equal(turned.shard_borders, plain.shard_borders)


@pytest.mark.usefixtures("processes")
def test_one_hash_on_every_layout_killed_and_resumed_on_others(folder: Path, tmp_path: Path) -> None:
    """Killed on two and three ranks and on dp, each time resumed on another. The control is another order."""
    data_dir = f"data_dir={write_shards(folder, tmp_path / 'shards', 'tar', count=7)}"
    undisturbed = Program(tmp_path / "undisturbed")(*RUN, data_dir).summary
    start = Program(tmp_path / "killed", "tests/faults.py")
    arguments: tuple[str, ...] = (*RUN, data_dir)
    for step, *on in (
        (2, "strategy=ddp", "devices=2"),
        (4, "strategy=ddp", "devices=3"),
        (7, "strategy=dp", "devices=2"),
    ):
        run = start(*arguments, *on, env={"FAULT": f"kill@saved:{step}"}, ok=False)
        assert run.returncode == -signal.SIGKILL, str(run)
        arguments = ("resume=last",)
    end = start(*arguments, "strategy=auto", "devices=1").summary
    assert end["weights_sha256"] == undisturbed["weights_sha256"]
    assert (end["steps"], end["samples_seen"]) == (undisturbed["steps"], undisturbed["samples_seen"]) == (15, 126)
    control = Program(tmp_path / "control")(*RUN, data_dir, "data.window=3").summary
    assert control["weights_sha256"] != undisturbed["weights_sha256"]


def test_a_run_goes_on_with_the_window_and_the_pieces_that_it_had(folder: Path, tmp_path: Path) -> None:
    """On any number of devices. Without a window other pieces may take over."""
    data_dir = f"data_dir={write_shards(folder, tmp_path / 'shards', 'tar')}"
    cut_again = f"data_dir={write_shards(folder, tmp_path / 'cut', 'tar', count=4)}"

    def read(*overrides: str) -> tuple[Config, Any]:
        config = check(composed(*RUN, data_dir, *overrides))
        return config, open_data(config.data, config.data_dir, config.seed)

    def refused(before: Sequence[str], now: Sequence[str]) -> str:
        state = {"layer": torch.zeros(1)}
        saved = {"lockstep": checkpoint_record(*read(*before)), "state_dict": state, "global_step": 4}
        try:
            config, splits = read(*now)
            check_checkpoint_fits("last.ckpt", saved, state, config, splits, checkpoint_record(config, splits), 15)
        except UserError as error:
            return str(error)
        return ""

    pieces = (
        "with data.window=2 each piece reads its own part of the shards, and pieces=9, but last.ckpt was saved with "
    )
    assert refused([], ["pieces=9"]).startswith(pieces + "pieces=3: give the same; ")
    assert refused([], ["data.window=3"]).startswith(
        "data.window=3, but last.ckpt was trained with 2: give data.window=2; "
    )
    assert refused(["data.window=null"], []).startswith("data.window=2, but last.ckpt was trained with null: ")
    assert refused([], ["data.window=null"]).startswith("data.window=null, but last.ckpt was trained with 2: ")
    assert not refused([], ["strategy=ddp", "devices=3"])
    assert not refused(["data.window=null"], ["data.window=null", "pieces=9"])
    assert refused([], [cut_again]).startswith(
        "with data.window=2 each piece reads its own part of the shards, and last.ckpt was trained on other data of "
        "the same size: give the same; "
    )
    assert not refused(["data.window=null"], ["data.window=null", cut_again])
