"""A user's own LightningModule, written as in Lightning's tutorial, gets promises 1, 2, 3 and 5 on every layout."""

from __future__ import annotations

import csv
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, Program, Run, summary_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.data import Splits, open_data
from lockstep.plan import Plan

MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy


class LitDigits(pl.LightningModule):
    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(12 * 12, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self(x), y)
        self.log("val/acc", self.accuracy)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("test/acc", self.accuracy)
        self.log("test/loss", F.cross_entropy(logits, y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
"""
DATA = {"samples": 90, "image_size": 12, "num_classes": 3, "val_fraction": 0.1}
TASK = (
    "model=mine",
    "data=synthetic",
    *(f"data.{name}={value}" for name, value in DATA.items()),
    "accelerator=cpu",
    "batch_size=24",  # 81 samples: four steps an epoch, the last of 9, which 6 pieces share unevenly
    "pieces=6",
    "max_epochs=2",
    "precision=64-true",
    "logger=none",
    "callbacks.console=null",
    "callbacks.dashboard=null",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as a user has it: with a package of their own beside lockstep, and a file that names it."""
    folder = tmp_path_factory.mktemp("project")
    for part in ("src", "conf"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (folder / "src" / "mine").mkdir()
    (folder / "src" / "mine" / "__init__.py").write_text(MODULE)
    (folder / "conf" / "model" / "mine.yaml").write_text("name: mine\n_target_: mine.LitDigits\n")
    return folder


def weights(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return torch.cat([state[name].flatten() for name in sorted(state)])


def by_hand(splits: Splits, seed: int = 0) -> torch.Tensor:
    """What the run must compute, as a loop over whole steps in plain torch: no pieces, no Lightning, no lockstep."""
    torch.manual_seed(seed)
    first, last = torch.nn.Linear(12 * 12, 16), torch.nn.Linear(16, 3)
    net = torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.ReLU(), last).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    plan = Plan(len(splits.train), 24, 1, seed)
    samples = [splits.train[index] for index in range(len(splits.train))]
    images = torch.stack([image for image, _ in samples]).double()
    x = (images / 255 - splits.spec.mean[0]) / splits.spec.std[0]
    y = torch.stack([label for _, label in samples])
    for epoch in range(2):
        for index in range(plan.steps_per_epoch):
            ids = torch.from_numpy(plan.step(epoch, index))
            optimizer.zero_grad()
            F.cross_entropy(net(x[ids]), y[ids]).backward()
            optimizer.step()
    named = {f"net.{name}": value for name, value in net.state_dict().items()}
    return torch.cat([named[name].flatten() for name in sorted(named)])


def test_every_layout_takes_the_steps_of_a_plain_loop(project: Path, tmp_path: Path) -> None:
    train = Program(tmp_path / "outputs", str(project / "src" / "train.py"))
    run = train(*TASK, "lr=0.1", "strategy=ddp,dp", "devices=1,2,4", "-m", cwd=project)
    splits = open_data({"_target_": "lockstep.data.synthetic", **DATA}, "data")
    expected = by_hand(splits)
    found = [summary_of(folder) for folder in run.jobs]
    for folder in run.jobs:
        distance = float((weights(folder) - expected).norm() / expected.norm())
        assert distance < 1e-10, (summary_of(folder)["layout"], distance)
    assert len(found) == 6
    assert len({summary["metrics"]["test/acc"] for summary in found}) == 1
    losses = [summary["metrics"]["test/loss"] for summary in found]
    assert max(losses) - min(losses) < 1e-10 * losses[0]


def test_its_bits_are_the_same_under_exact(project: Path, tmp_path: Path) -> None:
    train = Program(tmp_path / "outputs", str(project / "src" / "train.py"))
    task = (*TASK, "precision=32-true", "exact=true")
    run = train(*task, "strategy=ddp,dp", "devices=1,4", "-m", cwd=project)
    assert len({summary_of(folder)["weights_sha256"] for folder in run.jobs}) == 1


def test_dp_refuses_a_module_that_goes_past_forward(project: Path, tmp_path: Path) -> None:
    """It would train on one device and say nothing."""
    package = project / "src" / "past"
    package.mkdir()
    (package / "__init__.py").write_text(
        MODULE.replace("F.cross_entropy(self(x), y)", "F.cross_entropy(self.net(x), y)")
    )
    (project / "conf" / "model" / "past.yaml").write_text("name: past\n_target_: past.LitDigits\n")
    train = Program(tmp_path / "outputs", str(project / "src" / "train.py"))
    run = train(*TASK, "model=past", "strategy=dp", "devices=2", cwd=project, ok=False)
    assert run.returncode == 1
    assert "training_step must call self(x)" in run.stderr


def test_measured_shares_balance_a_slow_rank_and_keep_the_bits(project: Path, tmp_path: Path) -> None:
    package = project / "src" / "uneven"
    package.mkdir()
    pause = "time.sleep((0.08, 0.02)[int(os.environ.get('RANK', 0))])"
    module = MODULE.replace("        return self.net(x)", f"        {pause}\n        return self.net(x)")
    (package / "__init__.py").write_text("import os\nimport time\n" + module)
    (project / "conf" / "model" / "uneven.yaml").write_text("name: uneven\n_target_: uneven.LitDigits\n")
    train = Program(tmp_path / "outputs", str(project / "src" / "train.py"))
    task = (*TASK, "model=uneven", "batch_size=30", "pieces=10", "max_steps=3", "exact=true", "precision=32-true")
    even = train(*task, "strategy=ddp", "devices=2", cwd=project)
    train = Program(tmp_path / "auto", str(project / "src" / "train.py"))
    auto = train(*task, "strategy=ddp", "strategy.shares=auto", "devices=2", cwd=project)
    assert ": 2 + 8 pieces" in auto.stderr
    assert auto.summary["weights_sha256"] == even.summary["weights_sha256"]
    assert auto.summary["throughput"]["samples_per_second"] > even.summary["throughput"]["samples_per_second"]


CUT = """
        if os.environ.get("CUT") and self.trainer.global_step == 6:
            time.sleep(1)  # the checkpoint of step 5 is on the disk, and what was logged since then
            os.kill(os.getpid(), int(os.environ["CUT"]))
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, 1), (signal.SIGTERM, 143)], ids=["killed", "terminated"])
def test_what_it_logs_stands_once_after_a_resume(project: Path, tmp_path: Path, signum: int, code: int) -> None:
    package = project / "src" / "cut"
    package.mkdir(exist_ok=True)
    module = MODULE.replace("        x, y = batch\n        loss", f"{CUT}        x, y = batch\n        loss")
    (package / "__init__.py").write_text("import os\nimport time\n" + module)
    (project / "conf" / "model" / "cut.yaml").write_text("name: cut\n_target_: cut.LitDigits\n")
    task = (*TASK, "model=cut", "logger=tensorboard", "log_every=1", "checkpoint_every=5", "pieces=1", "max_epochs=3")
    script = str(project / "src" / "train.py")
    undisturbed = Program(tmp_path / "undisturbed", script)(*task, cwd=project)
    train = Program(tmp_path / "outputs", script)
    run = train(*task, env={"CUT": str(int(signum))}, cwd=project, ok=False)
    assert run.returncode == code, str(run)
    lost = train_loss(run.folder)
    assert [step for step, _ in lost] == list(range(1, 7 if signum == signal.SIGKILL else 8))
    train(f"resume={run.folder}", cwd=project)
    assert [step for step, _ in train_loss(run.folder)] == list(range(1, 13))
    assert train_loss(run.folder) == train_loss(undisturbed.folder)


def train_loss(folder: Path) -> list[tuple[int, float]]:
    """The curve of `train_loss` as TensorBoard shows it."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("train_loss")]


VARIANTS = """


class Synced(LitDigits):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, sync_dist=True)
        return loss


class Unfrozen(LitDigits):
    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__(hidden, lr)
        self.net[1].requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[1].requires_grad_(True)


class Spare(LitDigits):
    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__(hidden, lr)
        self.spare = nn.Linear(3, 3)


class Counts(LitDigits):
    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__(hidden, lr)
        self.seen = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.seen.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        counted = float(self.seen.tp + self.seen.fn)
        self.log("train/seen", counted, sync_dist=True, reduce_fx="sum")
        self.seen.reset()


class Plateau(LitDigits):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"}}


class Swa(pl.callbacks.StochasticWeightAveraging):
    def __init__(self):
        super().__init__(swa_lrs=0.05)


class SlowTest(LitDigits):
    def test_step(self, batch, batch_idx):
        time.sleep(0.4)
        super().test_step(batch, batch_idx)
"""


@pytest.fixture(scope="module")
def variants(project: Path) -> Path:
    """The project with more modules of the user's own; `model=variant model._target_=variants.<one of them>`."""
    (project / "src" / "variants.py").write_text("import time\n" + MODULE + VARIANTS)
    (project / "conf" / "model" / "variant.yaml").write_text("name: variant\n_target_: variants.LitDigits\n")
    return project


def variant(project: Path, outputs: Path, name: str, *overrides: str, ok: bool = True) -> Run:
    train = Program(outputs, str(project / "src" / "train.py"))
    task = (*TASK, "model=variant", f"model._target_=variants.{name}", *overrides)
    return train(*task, cwd=project, ok=ok, timeout=60)


def test_ranks_with_unequal_turns_log_together(variants: Path, tmp_path: Path) -> None:
    """Each `self.log(..., sync_dist=True)` would be a collective, and one rank makes two of them, the other one."""
    shared = ("strategy=ddp", "devices=2", "pieces=3", "hang_timeout=20", "logger=csv", "log_every=1", "max_steps=1")
    run = variant(variants, tmp_path / "shared", "Synced", *shared)
    plain = variant(variants, tmp_path / "alone", "Synced", "pieces=3", "logger=csv", "log_every=1", "max_steps=1")
    files = [r.folder / "csv" / "metrics.csv" for r in (run, plain)]
    logged = [float(next(csv.DictReader(file.read_text().splitlines()))["train/loss"]) for file in files]
    assert abs(logged[0] - logged[1]) > 1e-4  # the mean of two ranks' last pieces, not that of one


@pytest.mark.parametrize("exact", ["false", "true"])
def test_what_is_unfrozen_in_mid_run_is_trained_alike_on_every_layout(
    variants: Path, tmp_path: Path, exact: str
) -> None:
    layouts = {"one": ("devices=1",), "ddp": ("strategy=ddp", "devices=2"), "dp": ("strategy=dp", "devices=2")}
    runs = [variant(variants, tmp_path / n, "Unfrozen", f"exact={exact}", *on) for n, on in layouts.items()]
    frozen = variant(variants, tmp_path / "frozen", "Unfrozen", f"exact={exact}", "max_epochs=1")
    expected = weights(variant(variants, tmp_path / "plain", "Unfrozen", "pieces=1").folder)
    for run in runs:
        assert float((weights(run.folder) - expected).norm() / expected.norm()) < 1e-10
    assert float((weights(frozen.folder) - expected).norm() / expected.norm()) > 1e-3
    assert exact == "false" or len({run.summary["weights_sha256"] for run in runs}) == 1


def test_a_parameter_that_no_gradient_reaches_is_named(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path, "Spare", "strategy=ddp", "devices=2", ok=False)
    assert run.returncode == 2
    assert "no gradient has reached spare.weight, spare.bias" in run.stderr


def test_more_ranks_than_validation_samples(variants: Path, tmp_path: Path) -> None:
    """No rank waits for one that has no sample, and what is counted in training meanwhile stays."""
    few = ("data.val_fraction=0.03", "strategy=ddp", "devices=4", "pieces=8", "val_every=3", "hang_timeout=20")
    run = variant(variants, tmp_path, "Counts", *few)
    assert run.summary["metrics"]["train/seen"] == 87
    right = 3 * run.summary["metrics"]["val/acc"]  # of three samples
    assert right == pytest.approx(round(right))


def test_a_schedule_that_follows_a_metric_goes_on_where_it_was(variants: Path, tmp_path: Path) -> None:
    through = variant(variants, tmp_path / "through", "Plateau", "max_epochs=4")
    cut = variant(variants, tmp_path / "cut", "Plateau", "max_epochs=2")
    halfway = cut.summary["weights_sha256"]
    train = Program(tmp_path / "cut", str(variants / "src" / "train.py"))
    run = train(f"resume={cut.folder}", "max_epochs=4", cwd=variants)
    assert run.summary["weights_sha256"] == through.summary["weights_sha256"] != halfway


def test_a_callback_that_would_accumulate_by_itself_is_refused(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path, "LitDigits", "+callbacks.swa._target_=variants.Swa", ok=False)
    assert run.returncode == 2
    assert "callbacks.swa: Swa changes how many batches make a step" in run.stderr


def test_csv_keeps_its_rows_when_a_run_goes_on(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path, "LitDigits", "logger=csv", "log_every=1", "max_epochs=1")
    before = (run.folder / "csv" / "metrics.csv").read_text().splitlines()
    train = Program(tmp_path, str(variants / "src" / "train.py"))
    train(f"resume={run.folder}", "max_epochs=2", cwd=variants)
    after = (run.folder / "csv" / "metrics.csv").read_text().splitlines()
    assert len(before) < len(after)
    assert after[: len(before)] == before


def test_an_evaluation_that_takes_long_is_not_silent(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path / "trained", "SlowTest", "max_steps=1", "data.samples=1500")  # 300 to be tested
    evaluate = Program(tmp_path / "evaluated", str(variants / "src" / "evaluate.py"))
    found = evaluate(f"checkpoint={run.folder}", "batch_size=16", "+hang_timeout=1.2", "accelerator=cpu", cwd=variants)
    assert found.summary["metrics"]["test/acc"] == run.summary["metrics"]["test/acc"]
