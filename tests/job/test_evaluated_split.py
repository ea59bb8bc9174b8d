"""Which images an evaluation tests: the training's test split, and all of a folder that was not trained on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Program
from small_data import config, write_images
from store_servers import WebServer
from written_shards import flip, write_folder, write_shards

from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.job.evaluation import choose_test_images


def test_all_images_of_another_folder_are_tested(tmp_path: Path) -> None:
    """Of class folders alone, which the opener splits by itself; a folder with a test/ says what is tested."""
    here = write_images(tmp_path / "here", (".",), each=20)
    write_images(tmp_path / "others", (".",), each=10)
    write_images(tmp_path / "parts")
    shutil.copytree(here, tmp_path / "moved")
    record = {"fingerprint": open_data(config("image_folder"), str(here)).fingerprint}

    def tested(folder: str, split: Any = None, by_user: bool = True) -> tuple[int, str]:
        splits = open_data(config("image_folder"), str(tmp_path / folder))
        actual = choose_test_images(splits, split, {"data_dir": folder if by_user else None}, record)
        return len(actual.test), actual.about

    assert (
        tested("here") == tested("here", by_user=False) == tested("moved") == (4, "tested: 4 of 40 images, split=test")
    )
    assert tested("others") == (20, "tested: all 20 images")
    assert tested("others", "val") == (2, "tested: 2 of 20 images, split=val")
    # images were added to those of the training
    changed = "tested: 2 of 20 images, split=test; the data set has changed since the training"
    assert tested("others", by_user=False) == (2, changed)
    assert tested("parts")[0] == 12
    with pytest.raises(UserError, match="split=tests: must be train, val, test or all"):
        tested("here", "tests")


@pytest.mark.usefixtures("servers")
def test_replaced_images_of_a_server_are_split_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By images of the same names and sizes; those in a folder are known by names and sizes alone."""
    pytest.importorskip("aiohttp", reason="the driver of http")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "images", (("any", 20),))
    web = WebServer(write_shards(folder, tmp_path / "tar", "tar"))
    url = f"{web.url}/any-{{00000..00002}}.tar"

    def opened() -> Any:
        return open_data(config("shards", image_size=12, retry_seconds=1), url)

    def tested(by_user: bool) -> tuple[int, str]:
        actual = choose_test_images(opened(), None, {"data_dir": url if by_user else None}, record)
        return len(actual.test), actual.about

    trained = opened()
    record = {"fingerprint": trained.fingerprint, "content": trained.content}
    assert tested(True) == tested(False) == (6, "tested: 6 of 60 images, split=test")
    flip(web.folder / "any-00001.tar")
    assert opened().fingerprint == trained.fingerprint
    assert tested(True) == (6, "tested: 6 of 60 images, split=test"), "the other ones of these names were trained on"
    changed = "; the data set has changed since the training"
    assert tested(False) == (6, f"tested: 6 of 60 images, split=test{changed}")
    del record["content"]  # an older version does not know it
    assert tested(True)[0] == 6
    web.stop()


def test_an_evaluation_reports_what_it_tested(run_train: Program, tmp_path: Path) -> None:
    here, others = (write_images(tmp_path / name, (".",), each) for name, each in (("here", 6), ("others", 9)))
    options = (
        "data.image_size=12",
        "data.mean=[0.1,0.2,0.3]",
        "data.std=[0.05,0.1,0.2]",
        "batch_size=4",
        "max_steps=1",
    )
    run = run_train("data=image_folder", f"data_dir={here}", *options)

    def evaluate(name: str, *overrides: str) -> Any:
        return Program(tmp_path / name, "src/evaluate.py")(f"checkpoint={run.folder}", f"data_dir={others}", *overrides)

    tested = evaluate("tested")
    assert tested.summary["metrics"]["test/count"] == 18
    assert "tested: all 18 images" in tested.stderr
    again = evaluate("again", "+data=image_folder")
    assert again.summary["metrics"] == tested.summary["metrics"], "images are normalised as in training"
    other = evaluate("other", "+data=image_folder", "data.mean=[0.9,0.9,0.9]")
    assert other.summary["metrics"]["test/loss"] != tested.summary["metrics"]["test/loss"]
