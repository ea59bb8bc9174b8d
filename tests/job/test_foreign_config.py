"""What an evaluation takes of the config and of the images that a stranger's checkpoint describes."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import composed

from lockstep.checkpoint.io import CheckpointError
from lockstep.config import instantiate as making
from lockstep.errors import UserError
from lockstep.job.evaluation import config_of, spec_of

NAMES = (
    *("os.system", "builtins.exec", "subprocess.Popen", "pickle.loads", "shutil.rmtree", "torch.hub.load"),
    *("torch.load", "torch.nn.Linear", "lockstep.files.link_file", "lockstep.config.instantiate.instantiate"),
)


def put(config: dict[str, Any], keys: str, value: Any) -> dict[str, Any]:
    """Return a copy of a config with another value at a dotted key."""
    changed = copy.deepcopy(config)
    *groups, last = keys.split(".")
    inside = changed
    for group in groups:
        inside = inside.setdefault(group, {})
    inside[last] = value
    return changed


@pytest.mark.usefixtures("whole_run")
def test_nothing_that_a_checkpoint_names_is_imported_or_called(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, raw = composed(), composed("checkpoint=evil.ckpt", page="evaluate")

    def reached(*args: Any) -> None:
        pytest.fail(f"reached {args}")

    monkeypatch.setattr("importlib.import_module", reached)
    monkeypatch.setattr(making, "instantiate", reached)
    for name in NAMES:
        object_of = {"_target_": name}
        for place, value in {
            "model._target_": name,
            "data._target_": name,
            "model.dropout": object_of,
            "data.augment": {"deep": [1, {"deeper": object_of}]},
            "optimizer.betas": (object_of,),
            "scheduler": object_of,
        }.items():
            group = place.partition(".")[0]
            with pytest.raises(
                UserError, match=rf"^evil.ckpt: its {group}\..* is {re.escape(name)}, which no file of conf"
            ):
                config_of(Path("evil.ckpt"), {"config": put(trained, place, value)}, raw)


def test_what_the_local_config_names_is_taken() -> None:
    """The control. A kind is a group: a data set is no model."""
    raw = composed("checkpoint=last.ckpt", page="evaluate")
    trained = composed("model=resnet18", "data=synthetic")
    assert config_of(Path("last.ckpt"), {"config": trained}, raw).model == trained["model"]
    other = put(trained, "model._target_", "lockstep.vision.data.synthetic")
    with pytest.raises(
        UserError, match=r"its model._target_ is lockstep.vision.data.synthetic, which no file of conf/model names"
    ):
        config_of(Path("last.ckpt"), {"config": other}, raw)
    trained_by_user = put(trained, "model._target_", "torch.nn.Linear")
    raw_of_user = raw | {"model": {"_target_": "torch.nn.Linear"}}
    assert config_of(Path("last.ckpt"), {"config": trained_by_user}, raw_of_user).model == trained_by_user["model"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "lacks data, data_dir, model"),
        (["model"], "lacks data, data_dir, model"),
        ({"model": {}}, "lacks data, data_dir, optimizer"),
        (composed() | {"model": 3}, "model=3: must be a valid dictionary"),
        (composed() | {"optimizer": [1]}, "optimizer=.*: must be a valid dictionary"),
    ],
    ids=["none", "a list", "a part", "a number", "another list"],
)
def test_a_config_inside_a_checkpoint_that_is_none_is_refused(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(Path("evil.ckpt"), {"config": config}, composed("checkpoint=evil.ckpt", page="evaluate"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("image_size", 8.5, "spec.image_size=8.5: must be"),
        ("channels", 0, "spec.channels=0: must be"),
        ("classes", "no list", "spec.classes=no list: must be"),
        ("mean", ["bright"], "spec.mean"),
        ("more", 1, "spec.more: there is no such key"),
        ("std", None, "spec.std=null: must be"),
        ("task", "x", "task=x: must be one of classification"),
    ],
)
def test_images_that_no_model_is_made_for(key: str, value: Any, message: str) -> None:
    good = {"channels": 1, "image_size": 8, "classes": ("a", "b"), "mean": (0.0,), "std": (1.0,)}
    good["task"] = "classification"
    assert spec_of(Path("some.ckpt"), {"spec": good}).num_classes == 2
    with pytest.raises(CheckpointError, match=re.escape(f"some.ckpt: {message}")):
        spec_of(Path("some.ckpt"), {"spec": {**good, key: value}})
