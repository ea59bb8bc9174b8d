"""Which images an evaluation tests: the training's test split, and all of a folder that was not trained on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Program
from small_data import config, write_images

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
    assert tested("others", by_user=False)[0] == 2  # images were added to those of the training
    assert tested("parts")[0] == 12
    with pytest.raises(UserError, match="split=tests: must be train, val, test or all"):
        tested("here", "tests")


def test_an_evaluation_reports_what_it_tested(run_train: Program, tmp_path: Path) -> None:
    here, others = (write_images(tmp_path / name, (".",), each) for name, each in (("here", 6), ("others", 9)))
    run = run_train("data=image_folder", f"data_dir={here}", "data.image_size=12", "batch_size=4", "max_steps=1")
    run = Program(tmp_path / "evaluated", "src/evaluate.py")(f"checkpoint={run.folder}", f"data_dir={others}")
    assert run.summary["metrics"]["test/count"] == 18
    assert "tested: all 18 images" in run.stderr
