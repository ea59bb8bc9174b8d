"""Promise 9: what a checkpoint carries can name nothing that the local conf/ does not; the user's own config may name
whatever is installed."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, composed, summary_of

from lockstep.checkpoint import io as checkpoint_io
from lockstep.config import instantiate as making
from lockstep.errors import UserError
from lockstep.run.evaluation import config_of

NAMES = (
    *("os.system", "builtins.exec", "subprocess.Popen", "pickle.loads", "shutil.rmtree", "torch.hub.load"),
    *("torch.load", "torch.nn.Linear", "lockstep.files.link_file", "lockstep.config.instantiate.instantiate"),
)


def put(config: dict[str, Any], keys: str, value: Any) -> dict[str, Any]:
    """A copy of a config with another value at a dotted key."""
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
    other = put(trained, "model._target_", "project.data.synthetic")
    with pytest.raises(
        UserError, match=r"its model._target_ is project.data.synthetic, which no file of conf/model names"
    ):
        config_of(Path("last.ckpt"), {"config": other}, raw)
    own = put(trained, "model._target_", "torch.nn.Linear")
    given = raw | {"model": {"_target_": "torch.nn.Linear"}}
    assert config_of(Path("last.ckpt"), {"config": own}, given).model == own["model"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "lacks data, data_dir, lr, model"),
        (["model"], "lacks data, data_dir, lr, model"),
        ({"model": {}}, "lacks data, data_dir, lr, optimizer"),
        (composed() | {"model": 3}, "model=3: must be a valid dictionary"),
        (composed() | {"optimizer": [1]}, "optimizer=.*: must be a valid dictionary"),
    ],
    ids=["none", "a list", "a part", "a number", "another list"],
)
def test_a_config_inside_a_checkpoint_that_is_none_is_refused(config: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        config_of(Path("evil.ckpt"), {"config": config}, composed("checkpoint=evil.ckpt", page="evaluate"))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("group", "evil"),
    [
        ("data", {"_target_": "lockstep.files.link_file", "source": "source", "path": "sentinel"}),
        ("model", {"_target_": "project.models.MnistCNN", "dropout": {"_target_": "os.unlink", "path": "sentinel"}}),
    ],
    ids=["ours", "the system's, nested"],
)
def test_a_foreign_checkpoint_does_nothing(tmp_path: Path, group: str, evil: dict[str, Any]) -> None:
    (tmp_path / "source").write_text("evil")
    (tmp_path / "sentinel").write_text("good")
    config = composed() | {group: {"name": "evil", **evil}}
    content = {
        "state_dict": {"w": torch.zeros(1)},
        "pytorch-lightning_version": "2.6.6",
        "lockstep": {"config": config, "spec": {}},
    }
    checkpoint_io.save(content, tmp_path / "evil.ckpt")
    evaluate = Program(tmp_path / "outputs", "src/evaluate.py")
    run = evaluate("checkpoint=evil.ckpt", cwd=tmp_path, ok=False)
    assert run.returncode == 2, str(run)
    assert re.fullmatch(
        rf"error: evil.ckpt: its {group}\..*_target_ is .*, which no file of conf/{group} .*\n", run.stderr
    )
    assert (tmp_path / "sentinel").read_text() == "good"
    assert run.folders == []


BOUGHT = """
name: bought
_target_: project.models.ImageClassifier
net:
  _target_: torchvision.models.shufflenet_v2_x0_5
  num_classes: 10
"""


@pytest.mark.usefixtures("processes")
def test_the_users_config_names_what_is_installed(tmp_path: Path) -> None:
    """More of it: docs/test_own_page.py."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "bought.yaml").write_text(BOUGHT)
    own = "--config-dir", str(tmp_path / "conf")
    task = "data=synthetic", "data.samples=128", "data.channels=3", "data.image_size=32", "threads=1", "max_epochs=1"
    train = Program(tmp_path / "outputs")
    trained = train(*task, "model=bought", *own).summary
    refused = train("resume=last", "optimizer=adamw", "max_epochs=4", ok=False)
    assert "optimizer._target_=torch.optim.AdamW, but " in refused.stderr
    assert "holds the state of torch.optim.SGD" in refused.stderr

    evaluate = Program(tmp_path / "outputs", "src/evaluate.py")
    tested = evaluate("checkpoint=last", "threads=1", *own)
    (folder,) = (tmp_path / "outputs" / "evaluate").iterdir()
    assert summary_of(folder)["metrics"]["test/correct"] == trained["metrics"]["test/correct"], str(tested)
    without = evaluate("checkpoint=last", ok=False)
    assert without.returncode == 2, str(without)
    assert "its model._target_ is project.models.ImageClassifier, which no file of conf/model" in without.stderr
