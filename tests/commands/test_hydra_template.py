"""A module and a data module of lightning-hydra-template's shape, as they are, on every layout."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import user_modules as mine
from conftest import ROOT, Program, checkpoint_of, summary_of
from docs.hydra_template.src.models.components.simple_dense_net import SimpleDenseNet
from PIL import Image
from user_runs import go_on, same_bits

from lockstep.data.build import open_data
from lockstep.data.datasets import fetch
from lockstep.errors import UserError

MODEL = """
name: templated
_target_: models.mnist_module.MNISTLitModule
net:
  _target_: models.components.simple_dense_net.SimpleDenseNet
  input_size: 144
  output_size: 3
optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.002, weight_decay: 0.0}
scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, factor: 0.5, patience: 10}
compile: false
"""
DATA = """
name: templated
_target_: mine.TemplatedData
splits: [90, 9, 18]
batch_size: 128
"""
TASK = (
    *("model=templated", "data=templated", "accelerator=cpu", "precision=64-true", "threads=2", "max_epochs=2"),
    *("batch_size=24", "pieces=6", "logger=none", "hang_timeout=60"),
)


@pytest.fixture
def templated(project: Path) -> Path:
    """Return the project with the module of tests/docs/hydra_template and a data module of user_modules.py."""
    shutil.copytree(ROOT / "tests" / "docs" / "hydra_template" / "src", project / "src", dirs_exist_ok=True)
    (project / "conf" / "model" / "templated.yaml").write_text(MODEL)
    (project / "conf" / "data" / "templated.yaml").write_text(DATA)
    return project


def test_both_train_and_are_used_as_they_are(templated: Path, tmp_path: Path) -> None:
    whole = Program(tmp_path / "whole", home=templated)(*TASK)
    cut = Program(tmp_path / "cut", home=templated)(*TASK, "max_steps=3")
    assert same_bits(go_on(templated, cut, "max_steps=null"), whole)
    run = Program(tmp_path / "outputs", home=templated)(*TASK, "strategy=ddp,dp", "devices=2", "-m")
    one = whole.summary
    for other in map(summary_of, run.jobs):
        for name in ("val/acc", "val/acc_best", "test/acc"):
            assert other["metrics"][name] == one["metrics"][name]
    assert run.stderr.count("hyperparameters net, optimizer, scheduler: they are no plain data") == 2
    checkpoint = checkpoint_of(run.jobs[0])
    assert checkpoint["hyper_parameters"] == {"compile": False}
    assert checkpoint["lockstep"]["spec"]["mean"] == (0.3,)
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == 0.002, "its own, not the front page's"

    images = tmp_path / "images"
    images.mkdir()
    pixels = mine.Drawn(9, lambda x: x).pixels[:, :, :, 0]
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(images / f"{number}.png")
    common = (f"checkpoint={run.jobs[0]}", "accelerator=cpu")
    evaluate = Program(tmp_path / "evaluated", "src/evaluate.py", templated)
    metrics = evaluate(*common, "logger=none").summary["metrics"]
    assert metrics["test/acc"] == pytest.approx(one["metrics"]["test/acc"])
    predicted = Program(tmp_path / "predicted", "src/predict.py", templated)(*common, f"images={images}")
    rows = (predicted.folder / "predictions.csv").read_text().splitlines()[1:]
    net = SimpleDenseNet(input_size=144, output_size=3).double()
    state = checkpoint_of(run.jobs[0], "best")["state_dict"]
    net.load_state_dict({name.removeprefix("net."): state[f"net.{name}"] for name in net.state_dict()})
    x = (torch.from_numpy(pixels).double() / 255 - 0.3) / 0.4
    expected = net.eval()(x).tolist()
    assert [[float(cell) for cell in row.split(",")[1:]] for row in rows] == [
        pytest.approx(e, abs=1e-4) for e in expected
    ]


def test_what_its_optimizer_would_not_follow_is_refused(templated: Path, tmp_path: Path) -> None:
    run = Program(tmp_path / "outputs", home=templated)(*TASK, "lr=0.1", ok=False)
    assert "lr has no effect, since the model has its own optimizer: use model.optimizer" in run.stderr


def opened(name: str, **options: Any) -> Any:
    return open_data({"_target_": f"user_modules.{name}", **options}, "data")


def test_the_data_sets_of_a_data_module(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = opened("TemplatedData")
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [90, 9, 18]
    assert (splits.spec.channels, splits.spec.image_size, splits.spec.classes) == (1, 12, ("0", "1", "2"))
    assert (splits.spec.mean, splits.spec.std) == ((0.3,), (0.4,))
    again, other = opened("TemplatedData"), opened("TemplatedData", split_seed=1)
    assert splits.train.indices == again.train.indices != other.train.indices
    batch = fetch(opened("DictData").train, np.arange(4))
    assert batch["x"].shape == (4, 1, 12, 12)
    monkeypatch.setattr(mine.TemplatedData, "num_classes", None)
    assert opened("TemplatedData").spec.classes == ("0", "1", "2")  # by its labels


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("StreamData", "the train_dataloader of StreamData has an IterableDataset"),
        ("WeightedData", "has a WeightedRandomSampler: leave it out"),
        ("BatchedData", "has a batch_sampler or no batch_size"),
        ("MovedData", "the on_after_batch_transfer of MovedData would not be called"),
    ],
)
def test_what_a_data_module_may_not_do_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(name)
