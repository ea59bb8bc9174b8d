"""The pages on what is yours, followed literally: their files are written, their commands are run."""

import csv
from pathlib import Path

import pytest
import site_pages
import torch
from conftest import Program, checkpoint_of, summary_of, template
from torch.nn.functional import cross_entropy

from lockstep.data.build import open_data
from lockstep.vision.models import SmallCNN

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.nightly]


PAGES = ("own-model", "own-data", "metrics-callbacks-loggers")
# Where the length proves nothing.
SHORTER = {
    "model=shuffle": "data.samples=320",
    "model=focal": "max_epochs=4",
    "model=mine_f1": "max_epochs=3",
    "accumulate_grad_batches=2": "max_epochs=8",
    "optimizer=nadam": "max_epochs=1",
    "optimizer=muon": "max_epochs=1",
    "logger=table": "max_epochs=1",
    "optimizer._target_=torch.optim.RMSprop": "max_epochs=1",
}
ALL = ("threads=1",)


@pytest.fixture(scope="module")
def followed(processes: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the run folders of the pages' commands, by command, in a fresh copy of the template."""
    project = template(tmp_path_factory.mktemp("project"))
    pages = [site_pages.read(f"use/{name}.md") for name in PAGES]
    written = [path for page in pages for path in page.files]
    assert len(written) == 13  # none is left out
    for page in pages:
        for path, text in page.files.items():
            (project / path).parent.mkdir(parents=True, exist_ok=True)
            with (project / path).open("a") as file:
                file.write(text)
    folders = {}
    for number, command in enumerate(command for page in pages for command in page.commands):
        _, script, *overrides = command.words
        shorter = [more for chosen, more in SHORTER.items() if chosen in overrides]
        run = Program(project / f"outputs{number}", script, project)(*overrides, *shorter, *ALL)
        folders[" ".join(overrides)] = run.folder
    return folders


def one(followed: dict[str, Path], part: str) -> Path:
    """Return the folder of the only command that has this part."""
    (folder,) = [folder for command, folder in followed.items() if part in command]
    return folder


def test_the_model_trains_on_two_devices(followed: dict[str, Path]) -> None:
    summary = summary_of(one(followed, "accumulate_grad_batches=2"))
    assert summary["model"] == "mine"
    assert (summary["layout"]["strategy"], summary["layout"]["pieces"]) == ("ddp", 4)
    assert summary["metrics"]["test/acc"] > 0.8


def test_an_installed_network_learns_its_classes_from_the_data(followed: dict[str, Path]) -> None:
    assert summary_of(one(followed, "model=shuffle"))["model"] == "shuffle"
    state = checkpoint_of(one(followed, "model=shuffle"))["state_dict"]
    assert "net.conv5.0.weight" in state
    assert len(state["net.fc.weight"]) == 10


def test_a_custom_loss_is_used(followed: dict[str, Path]) -> None:
    metrics = summary_of(one(followed, "model=focal"))["metrics"]
    assert metrics["test/acc"] > 0.8
    checkpoint = checkpoint_of(one(followed, "model=focal"), "best")
    net = SmallCNN(channels=1, image_size=28, num_classes=10).eval()
    net.load_state_dict(checkpoint["state_dict"])
    splits = open_data({"_target_": "project.data.digits", "val_fraction": 0.1}, "data")
    images, labels = splits.test.__getitems__(range(len(splits.test)))
    with torch.no_grad():
        losses = cross_entropy(net((images / 255 - splits.spec.mean[0]) / splits.spec.std[0]), labels, reduction="none")
    assert metrics["test/loss"] == pytest.approx(float(((1 - losses.neg().exp()) * losses).mean()), rel=1e-4)
    assert metrics["test/loss"] != pytest.approx(float(losses.mean()), rel=1e-2)  # the control


def test_an_optimizer_and_a_schedule_come_by_yaml_alone(followed: dict[str, Path]) -> None:
    checkpoint = checkpoint_of(one(followed, "optimizer=nadam"))
    (optimizer,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.0001, 0.0]
    assert [group["initial_lr"] for group in optimizer["param_groups"]] == [0.001, 0.001]
    assert "mu_product" in optimizer["state"][0]  # NAdam's
    assert schedule["T_max"] == schedule["last_epoch"] == summary_of(one(followed, "optimizer=nadam"))["steps"]


def test_the_data_is_learnt(followed: dict[str, Path]) -> None:
    summary = summary_of(one(followed, "data=stripes"))
    assert (summary["data"], summary["metrics"]["test/acc"]) == ("stripes", 1.0)


def test_the_metric_counts_every_sample_once(followed: dict[str, Path]) -> None:
    """It is that of the validation set as a whole, though two processes had half of it each."""
    from sklearn.metrics import f1_score

    folder = one(followed, "model=mine_f1")
    state = checkpoint_of(folder)["state_dict"]
    splits = open_data({"_target_": "project.data.digits", "val_fraction": 0.1}, "data")
    images, labels = splits.val.__getitems__(range(len(splits.val)))
    x = (images.flatten(1) / 255 - splits.spec.mean[0]) / splits.spec.std[0]
    actual = (x @ state["net.1.weight"].T + state["net.1.bias"]).argmax(1)
    logged = summary_of(folder)["metrics"]
    assert logged["val/f1"] == pytest.approx(f1_score(labels, actual, average="macro"), abs=1e-6)
    halves = [f1_score(labels[part], actual[part], average="macro") for part in (slice(90), slice(90, None))]
    assert abs(logged["val/f1"] - sum(halves) / 2) > 1e-4  # the control: the mean of two halves is another number
    assert (folder / "checkpoints" / "best.ckpt").exists()


def test_a_callback_ends_the_run(followed: dict[str, Path]) -> None:
    summary = summary_of(one(followed, "callbacks=stopping"))
    assert (summary["status"], summary["epochs"] < 20) == ("completed", True)
    best = checkpoint_of(one(followed, "callbacks=stopping"), "best")
    assert 0 <= summary["epochs"] - (best["epoch"] + 1) <= 2  # its patience; of equals the later one is the best
    assert summary["metrics"]["test/acc"] > 0.8


def test_a_logger_gets_what_is_measured(followed: dict[str, Path]) -> None:
    with (one(followed, "logger=[tensorboard,table]") / "table" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"train/loss", "val/acc", "workers/samples_per_second", "train/lr"} <= set(rows[0])
    assert (one(followed, "logger=[tensorboard,table]") / "tensorboard").exists()
