"""docs/own.md, followed literally: its files are written, its commands are run."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Program, checkpoint_of, summary_of, template
from sklearn.metrics import f1_score
from torch.nn.functional import cross_entropy

from lockstep.data.build import open_data
from project.models import MnistCNN

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"`((?:src|conf)/[\w/.]+)`[^`]*:\n\n```\w+\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^    (python .*)$", re.MULTILINE)
# Where the length proves nothing.
SHORTER = {
    "model=shuffle": "data.samples=320",
    "model=focal": "max_epochs=4",
    "model=mine_f1": "max_epochs=3",
    "accumulate_grad_batches=2": "max_epochs=8",
    "optimizer=rmsprop": "max_epochs=1",
    "logger=table": "max_epochs=1",
}
ALL = ("threads=1",)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The run folders of the page's commands, in its order, in a fresh copy of the template."""
    page = (ROOT / "docs" / "own.md").read_text()
    project = template(tmp_path_factory.mktemp("project"))
    blocks = BLOCK.findall(page)
    assert len(blocks) == page.count("```") // 2 == 13  # none is left out
    for name, text in blocks:
        with (project / name).open("a") as file:
            file.write(text + "\n\n")
    for command in COMMAND.findall(page):
        _, script, *overrides = shlex.split(command)
        shorter = [more for chosen, more in SHORTER.items() if chosen in overrides]
        Program(project / "outputs", str(project / script))(*overrides, *shorter, *ALL, cwd=project)
    return sorted((project / "outputs").glob("*/*"), key=lambda folder: folder.name)


def test_the_model_trains_on_two_devices(followed: list[Path]) -> None:
    summary = summary_of(followed[0])
    assert summary["model"] == "mine"
    assert (summary["layout"]["strategy"], summary["layout"]["pieces"]) == ("ddp", 4)
    assert summary["metrics"]["test/acc"] > 0.8


def test_an_installed_network_learns_its_classes_from_the_data(followed: list[Path]) -> None:
    assert summary_of(followed[1])["model"] == "shuffle"
    state = checkpoint_of(followed[1])["state_dict"]
    assert "net.conv5.0.weight" in state
    assert len(state["net.fc.weight"]) == 10


def test_an_own_loss_is_used(followed: list[Path]) -> None:
    metrics = summary_of(followed[2])["metrics"]
    assert metrics["test/acc"] > 0.8
    checkpoint = checkpoint_of(followed[2], "best")
    net = MnistCNN(channels=1, image_size=28, num_classes=10).eval()
    net.load_state_dict(checkpoint["state_dict"])
    splits = open_data({"_target_": "project.data.digits", "val_fraction": 0.1}, "data")
    images, labels = splits.test.__getitems__(range(len(splits.test)))
    with torch.no_grad():
        losses = cross_entropy(net((images / 255 - splits.spec.mean[0]) / splits.spec.std[0]), labels, reduction="none")
    assert metrics["test/loss"] == pytest.approx(float(((1 - losses.neg().exp()) * losses).mean()), rel=1e-4)
    assert metrics["test/loss"] != pytest.approx(float(losses.mean()), rel=1e-2)  # the control


def test_an_optimizer_and_a_schedule_come_by_yaml_alone(followed: list[Path]) -> None:
    checkpoint = checkpoint_of(followed[3])
    (optimizer,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.0001, 0.0]
    assert [group["initial_lr"] for group in optimizer["param_groups"]] == [0.001, 0.001]
    assert "square_avg" in optimizer["state"][0]  # RMSprop's
    assert schedule["T_max"] == schedule["last_epoch"] == summary_of(followed[3])["steps"]


def test_the_data_is_learnt(followed: list[Path]) -> None:
    summary = summary_of(followed[4])
    assert (summary["data"], summary["metrics"]["test/acc"]) == ("stripes", 1.0)


def test_the_metric_counts_every_sample_once(followed: list[Path]) -> None:
    """It is that of the validation set as a whole, though two processes had half of it each."""
    folder = followed[5]
    state = checkpoint_of(folder)["state_dict"]
    splits = open_data({"_target_": "project.data.digits", "val_fraction": 0.1}, "data")
    images, labels = splits.val.__getitems__(range(len(splits.val)))
    x = (images.flatten(1) / 255 - splits.spec.mean[0]) / splits.spec.std[0]
    found = (x @ state["net.1.weight"].T + state["net.1.bias"]).argmax(1)
    logged = summary_of(folder)["metrics"]
    assert logged["val/f1"] == pytest.approx(f1_score(labels, found, average="macro"), abs=1e-6)
    halves = [f1_score(labels[part], found[part], average="macro") for part in (slice(90), slice(90, None))]
    assert abs(logged["val/f1"] - sum(halves) / 2) > 1e-4  # the control: the mean of two halves is another number
    assert (folder / "checkpoints" / "best.ckpt").exists()


def test_a_callback_ends_the_run(followed: list[Path]) -> None:
    summary = summary_of(followed[6])
    assert (summary["status"], summary["epochs"] < 20) == ("completed", True)
    best = checkpoint_of(followed[6], "best")
    assert 0 <= summary["epochs"] - (best["epoch"] + 1) <= 2  # its patience; of equals the later one is the best
    assert summary["metrics"]["test/acc"] > 0.8


def test_a_logger_gets_what_is_measured(followed: list[Path]) -> None:
    with (followed[7] / "table" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"train/loss", "val/acc", "workers/samples_per_second", "train/lr"} <= set(rows[0])
    assert (followed[7] / "tensorboard").exists()
