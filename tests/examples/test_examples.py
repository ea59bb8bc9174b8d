"""The examples: the same bits on several layouts, and with Lightning's own Trainer they run, too."""

import logging
import runpy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from conftest import ROOT, forked

import lockstep

EXAMPLES = ROOT / "examples"
IMPORT = "from lockstep import Trainer"
OF_LIGHTNING = sorted(path.stem for path in EXAMPLES.glob("*.py") if IMPORT in path.read_text())
QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}


def hash_of(folder: Path, *arguments: str) -> str:
    """Run one_file.py in a folder and return the SHA-256 that it prints."""
    folder.mkdir(exist_ok=True)
    run = forked("examples/one_file.py", *arguments, cwd=folder)
    assert run.returncode == 0, run
    return run.stdout.split()[-1]


@pytest.mark.usefixtures("processes")
def test_one_file_prints_one_hash_on_all_layouts(tmp_path: Path) -> None:
    assert len((EXAMPLES / "one_file.py").read_text().splitlines()) <= 60
    one = hash_of(tmp_path / "one")
    assert len(one) == 64
    assert hash_of(tmp_path / "dp", "--strategy", "dp", "--devices", "2") == one
    assert hash_of(tmp_path / "three", "--devices", "3") == one
    assert hash_of(tmp_path / "three", "--devices", "2", "--resume") == one, "of its last checkpoint"
    assert hash_of(tmp_path / "other", "--devices", "2", "--seed", "1") != one


def result(name: str, folder: Path, **options: Any) -> tuple[str, Any]:
    """Return the SHA-256 of an example's weights and its metrics."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, metrics = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](default_root_dir=folder, **QUIET, **options)
    return lockstep.weights_sha256(model.state_dict()), metrics


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", OF_LIGHTNING)
def test_an_example_of_lightning_gives_the_same_bits_on_two_layouts(name: str, tmp_path: Path) -> None:
    assert len(OF_LIGHTNING) == 3
    one = result(name, tmp_path / "one", exact=True, pieces=4)
    assert result(name, tmp_path / "dp", exact=True, pieces=4, strategy="dp", devices=2) == one
    assert lockstep.launch(lambda: result(name, tmp_path / "ddp", exact=True, pieces=4), devices=2) == one
    assert result(name, tmp_path / "other", exact=True, pieces=2)[0] != one[0]


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("name", OF_LIGHTNING)
def test_nothing_but_the_import_differs_from_lightning(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count("lockstep") == text.count(IMPORT) == 1
    file = tmp_path / f"{name}.py"
    file.write_text(text.replace(IMPORT, "from lightning.pytorch import Trainer"))
    model, metrics = runpy.run_path(str(file))["main"](default_root_dir=tmp_path, **QUIET)
    assert type(model.trainer) is pl.Trainer
    ours, our_metrics = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](default_root_dir=tmp_path, **QUIET)
    assert type(ours.trainer) is lockstep.Trainer
    assert metrics.keys() == our_metrics.keys()
