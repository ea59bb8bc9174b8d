"""Promise 9: what a checkpoint carries can name nothing that the local conf/ does not; the user's own config may name
whatever is installed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, composed, summary_of


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
        "lockstep": {"format": 4, "config": config, "spec": {}},
    }
    torch.save(content, tmp_path / "evil.ckpt")
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
_target_: lockstep.vision.models.ImageClassifier
net:
  _target_: torchvision.models.shufflenet_v2_x0_5
  num_classes: 10
"""


@pytest.mark.usefixtures("processes")
def test_the_users_config_names_what_is_installed(tmp_path: Path) -> None:
    """More of it: docs/test_user_code_page.py."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "bought.yaml").write_text(BOUGHT)
    config_dir = "--config-dir", str(tmp_path / "conf")
    task = "data=synthetic", "data.samples=128", "data.channels=3", "data.image_size=32", "threads=1", "max_epochs=1"
    train = Program(tmp_path / "outputs")
    trained = train(*task, "model=bought", *config_dir).summary
    refused = train("resume=last", "optimizer=adamw", "max_epochs=4", ok=False)
    assert "optimizer._target_=torch.optim.AdamW, but " in refused.stderr
    assert "holds the state of torch.optim.SGD" in refused.stderr

    evaluate = Program(tmp_path / "outputs", "src/evaluate.py")
    tested = evaluate("checkpoint=last", "threads=1", *config_dir)
    (folder,) = (tmp_path / "outputs" / "evaluate").iterdir()
    assert summary_of(folder)["metrics"]["test/correct"] == trained["metrics"]["test/correct"], str(tested)
    without = evaluate("checkpoint=last", ok=False)
    assert without.returncode == 2, str(without)
    assert "its model._target_ is lockstep.vision.models.ImageClassifier, which no file of conf/model" in without.stderr
