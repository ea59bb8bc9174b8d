"""What an evaluation takes from a checkpoint and from its own command line, and what it refuses."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import composed
from refusals import checked

from lockstep.commands.cli import BAD_INPUT, error_line
from lockstep.data import Spec
from lockstep.errors import UserError
from lockstep.job.evaluation import check_same_images, config_of

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")


def test_an_evaluation_finds_the_data_where_the_training_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = {"config": checked("data=mnist", "data_dir=images").record}
    monkeypatch.chdir("/")
    raw = composed("checkpoint=best.ckpt", page="evaluate")
    assert config_of(Path("best.ckpt"), record, raw).data_dir == str(tmp_path / "images")
    assert config_of(Path("best.ckpt"), record, raw | {"data_dir": "/moved"}).data_dir == "/moved"


@pytest.mark.usefixtures("whole_run")
def test_an_evaluation_takes_over_options_of_the_same_data_set_only(tmp_path: Path) -> None:
    record = {"config": composed("data=synthetic", "data.num_classes=3")}

    def data_of(*overrides: str) -> dict[str, Any]:
        raw = composed("checkpoint=best.ckpt", *overrides, page="evaluate")
        return config_of(tmp_path / "best.ckpt", record, raw).data

    of_training = {"mix", "mix_alpha", "sampling"}
    expected_data = {name: value for name, value in record["config"]["data"].items() if name not in of_training}
    assert data_of("++data.samples=7") == {**expected_data, "samples": 7}
    digits = data_of("+data=digits")
    assert (digits["_target_"], "samples" in digits) == ("project.data.digits", False)
    with pytest.raises(BAD_INPUT) as caught:
        data_of("data=digits")
    assert error_line(caught.value) == "data: there is no such key; +data=<name> adds it"


@pytest.mark.parametrize("key", ["model.pretrained", "seed", "optimizer.name", "lr"])
def test_an_evaluation_refuses_what_the_checkpoint_decides(key: str) -> None:
    evaluation = composed("checkpoint=best.ckpt", f"+{key}=0", page="evaluate")
    with pytest.raises(UserError, match=f"^{key.partition('.')[0]} comes from the checkpoint.*leave it out"):
        config_of(Path("best.ckpt"), {"config": composed()}, evaluation)


def test_an_evaluation_refuses_images_unlike_those_of_the_training() -> None:
    path, spec = Path("best.ckpt"), Spec(1, 12, ("cat", "dog"))
    record = {"spec": asdict(spec)}
    check_same_images(path, record, replace(spec, mean=(0.5,)))
    many = tuple(f"c{number}" for number in range(7))
    for changes, message in (
        ({"channels": 3}, "data: images have channels=3, but best.ckpt was trained on 1"),
        ({"classes": ("Dog", "cat")}, "only the data set has Dog, only best.ckpt has dog"),
        ({"classes": ("cat", "cow", "dog")}, "data: other classes than in training: only the data set has cow"),
        ({"classes": many}, "only the data set has c0, c1, c2, c3, c4 and 2 more, only best.ckpt has cat, dog"),
        ({"classes": ("dog", "cat")}, "data: other classes than in training: their order differs"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            check_same_images(path, record, replace(spec, **changes))
