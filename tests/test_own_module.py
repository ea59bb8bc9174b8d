"""A user's own LightningModule, written as in Lightning's tutorial, gets promises 1, 2, 3 and 5 on every layout."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, Program, Run, summary_of
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.arithmetic.layout import Refusal, resolve
from lockstep.arithmetic.order import DataOrder
from lockstep.loading import Splits
from lockstep.run import cli
from lockstep.run.config import check
from lockstep.run.instantiate import instantiate
from lockstep.run.library import compose
from lockstep.run.loggers import make_loggers
from lockstep.run.opening import open_data
from lockstep.run.resume import key

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
    on = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=24)
    order = DataOrder(len(splits.train), on, seed)
    samples = [splits.train[index] for index in range(len(splits.train))]
    images = torch.stack([image for image, _ in samples]).double()
    x = (images / 255 - splits.spec.mean[0]) / splits.spec.std[0]
    y = torch.stack([label for _, label in samples])
    for epoch in range(2):
        for index in range(order.steps_per_epoch):
            ids = torch.from_numpy(order.step(epoch, index))
            optimizer.zero_grad()
            F.cross_entropy(net(x[ids]), y[ids]).backward()
            optimizer.step()
    named = {f"net.{name}": value for name, value in net.state_dict().items()}
    return torch.cat([named[name].flatten() for name in sorted(named)])


def test_every_layout_takes_the_steps_of_a_plain_loop(project: Path, tmp_path: Path) -> None:
    train = Program(tmp_path / "outputs", str(project / "src" / "train.py"))
    run = train(*TASK, "lr=0.1", "strategy=ddp,dp", "devices=1,2,4", "-m", cwd=project)
    splits = open_data({"_target_": "project.data.synthetic", **DATA}, "data")
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


CUT = """
        if os.environ.get("CUT") and self.trainer.global_step == 6:
            self.trainer.strategy.checkpoint_io.wait()  # the checkpoint of step 5 is on the disk,
            for logger in self.trainer.loggers:
                logger.save()  # and what was logged since then
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


HEAD = """import collections
import os
import time
from torchvision.ops import FrozenBatchNorm2d
from lockstep.arithmetic.layout import Refusal
from project.models import ImageClassifier, MnistCNN
ERRORS = {"ValueError": ValueError, "Refusal": Refusal}
"""
VARIANTS = (
    f"""


class Cut(LitDigits):
    def training_step(self, batch, batch_idx):{CUT}
        return super().training_step(batch, batch_idx)


"""
    + """

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


class Sometimes(LitDigits):
    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__(hidden, lr)
        self.head = nn.Linear(3, 3)
        self.micro_batches = 0

    def forward(self, x):
        self.micro_batches += self.training
        return self.head(self.net(x)) if self.micro_batches % 2 else self.net(x)


class Rarely(LitDigits):
    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__(hidden, lr)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.net(x)) if len(x) > 1 else self.net(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, weight_decay=0.5)


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


class StepPlateau(Cut):
    def __init__(self, monitor, every, lr: float = 0.1):
        super().__init__(lr=lr)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.999)
        follows = {"monitor": self.hparams.monitor, "interval": "step", "frequency": self.hparams.every}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **follows}}


class Untrained(LitDigits):
    def configure_optimizers(self):
        return None


class Twice(LitDigits):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=lr) for lr in (0.1, 0.2)]


class Gathers(LitDigits):
    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.all_gather(logits.detach())
        return F.cross_entropy(logits, y)


class Buffers(LitDigits):
    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__(hidden, lr)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sizes", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("constant", torch.ones(()))
        self.norm = nn.BatchNorm1d(3, momentum=None)

    def forward(self, x):
        if self.training:
            self.seen += len(x)
            self.sizes = torch.cat([self.sizes, torch.tensor([len(x)])])
        return self.norm(self.net(x)) * self.constant


class Sleeps(LitDigits):
    def training_step(self, batch, batch_idx):
        time.sleep(60 * (batch_idx > 0))
        return super().training_step(batch, batch_idx)


class Curriculum(Cut):
    def on_train_epoch_start(self):
        self.scale = 1 + self.current_epoch

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale


class Planned(Cut):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Freezes(Cut):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[1].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Plateau(Cut):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", threshold=10.0, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/acc"}}


class NoTest(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12 * 12, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AfterBackward(LitDigits):
    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class FrozenNorm(LitDigits):
    def __init__(self):
        super().__init__()
        self.norm = FrozenBatchNorm2d(1)

    def forward(self, x):
        return self.net(self.norm(x))


Output = collections.namedtuple("Output", "logits more")


class Named(LitDigits):
    def forward(self, x):
        return Output(self.net(x), x.mean(dim=(1, 2, 3)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]).logits, batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", (self(batch[0]).logits.argmax(1) == batch[1]).double().mean())

    test_step = validation_step


class WholeLoss(LitDigits):
    def forward(self, x):
        return self.net(x).square().mean()

    def training_step(self, batch, batch_idx):
        return self(batch[0])


class MixedClassifier(MnistCNN):
    def losses(self, logits, y):
        return F.cross_entropy(logits, y, weight=torch.ones(3), reduction="none")

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.trainer.training:
            return batch
        x, y = batch
        return x, F.one_hot(y, 3).to(x.dtype)


class OwnOptimizer(MnistCNN):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Helped(OwnOptimizer):
    def configure_optimizers(self):
        return self.made()

    def made(self):
        return self.optimizer(params=self.parameters())


class Keeps(ImageClassifier):
    def __init__(self, net=None, **options):
        net = net or nn.Flatten()
        super().__init__(net, **options)
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])


class OneFails(LitDigits):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.trainer.global_step == 5:
            raise ERRORS[os.environ["ERROR"]]("the file that is broken")
        return super().training_step(batch, batch_idx)


class Penalty(LitDigits):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.01 * sum(p.square().sum() for p in self.parameters())


class Mixes(LitDigits):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.trainer.training:
            return batch
        x, y = batch
        weight, y = torch.rand(()), F.one_hot(y, 3).to(x.dtype)
        order = torch.randperm(len(x))
        return x.lerp(x[order], weight.to(x.dtype)), y.lerp(y[order], weight.to(x.dtype))


class Blinds(LitDigits):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x if self.trainer.training else torch.zeros_like(x)), y


class Moves(LitDigits):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


class Groups(LitDigits):
    def __init__(self, hidden: int = 16, lr: float = 0.1, whole: bool = False):
        super().__init__(hidden, lr)

    def configure_optimizers(self):
        parts = [[*self.net[1].parameters()], [*self.net[3].parameters()]]
        if self.hparams.whole:
            parts = [[*self.parameters()]]
        return torch.optim.SGD([{"params": part} for part in parts], lr=self.hparams.lr)


class Views(LitDigits):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y) + F.cross_entropy(self(x + 0.1), y)


class Lazy(LitDigits):
    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__(hidden, lr)
        del self.net

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(12 * 12, self.hparams.hidden), nn.ReLU(), nn.Linear(16, 3))


class OwnData(LitDigits):
    def train_dataloader(self):
        return []


class OwnSwa(LitDigits):
    def configure_callbacks(self):
        return Swa()


class Head(LitDigits):
    def configure_optimizers(self):
        return torch.optim.SGD(self.net[3].parameters(), lr=self.hparams.lr)


class Stopping(pl.callbacks.EarlyStopping):
    def __init__(self):
        super().__init__("train_loss", min_delta=10.0, patience=1)


class Swa(pl.callbacks.StochasticWeightAveraging):
    def __init__(self):
        super().__init__(swa_lrs=0.05)


class SlowTest(LitDigits):
    def test_step(self, batch, batch_idx):
        time.sleep(float(os.environ.get("SLOW", 0)))
        super().test_step(batch, batch_idx)
"""
)


@pytest.fixture(scope="module")
def variants(project: Path) -> Path:
    """The project with more modules of the user's own; `model=variant model._target_=variants.<one of them>`."""
    (project / "src" / "variants.py").write_text(HEAD + MODULE + VARIANTS)
    (project / "conf" / "model" / "variant.yaml").write_text("name: variant\n_target_: variants.LitDigits\n")
    return project


def variant(project: Path, outputs: Path, name: str, *overrides: str, ok: bool = True) -> Run:
    train = Program(outputs, str(project / "src" / "train.py"))
    task = (*TASK, "model=variant", f"model._target_=variants.{name}", *overrides)
    return train(*task, cwd=project, ok=ok)


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


def test_a_parameter_that_a_step_leaves_out_is_not_decayed_on_any_layout(variants: Path, tmp_path: Path) -> None:
    """Its gradient is None there, not zeros. The step is the epoch's last, of one sample: a rank has none."""
    task = ("batch_size=20", "threads=1")  # 81 samples: 4 x 20 + 1
    ddp = ("strategy=ddp", "devices=2")
    layouts = {"ddp": ddp, "dp": ("strategy=dp", ddp[1])}
    exact = {"one": (), **layouts}
    expected = weights(variant(variants, tmp_path / "plain", "Rarely", *task, "pieces=1").folder)
    runs = [
        variant(variants, tmp_path / also / name, "Rarely", *task, "pieces=2", *on, f"exact={also}")
        for also, tried in (("false", layouts), ("true", exact))
        for name, on in tried.items()
    ]
    for run in runs:
        assert float((weights(run.folder) - expected).norm() / expected.norm()) < 1e-10, run.folder
    assert len({run.summary["weights_sha256"] for run in runs[len(layouts) :]}) == 1


def test_one_that_it_reaches_in_earlier_turns_only_is_named_too(variants: Path, tmp_path: Path) -> None:
    task = ("pieces=4", "max_steps=3", "strategy=ddp", "devices=2")
    run = variant(variants, tmp_path / "some", "Sometimes", *task, ok=False)
    assert run.returncode == 2, str(run)
    assert "no gradient has reached head.weight, head.bias in a step's last piece" in run.stderr
    variant(variants, tmp_path / "exact", "Sometimes", *task, "exact=true")  # where nobody waits
    variant(variants, tmp_path / "always", "LitDigits", *task)


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


@pytest.mark.parametrize(("monitor", "every"), [("train_loss", 1), ("val/acc", 2)])
def test_a_schedule_that_follows_a_metric_at_each_step_does_too(
    variants: Path, tmp_path: Path, monitor: str, every: int
) -> None:
    val_every = "null" if every == 1 else every
    task: tuple[str, ...] = (
        f"+model.monitor={monitor}",
        f"val_every={val_every}",
        "checkpoint_every=4",
        "data.samples=300",
        "pieces=1",
    )
    task += ("callbacks.checkpoint.monitor=null", "max_epochs=1")
    through = variant(variants, tmp_path / "through", "StepPlateau", *task, f"+model.every={every}")
    fixed = variant(variants, tmp_path / "fixed", "StepPlateau", *task, "+model.every=1000")
    train = Program(tmp_path / "cut", str(variants / "src" / "train.py"))
    named = ("model=variant", "model._target_=variants.StepPlateau")
    killed = {"CUT": str(int(signal.SIGKILL))}
    cut = train(*TASK, *named, *task, f"+model.every={every}", cwd=variants, env=killed, ok=False)
    assert cut.returncode == 1, str(cut)
    run = train(f"resume={cut.folder}", cwd=variants)
    assert "resumes after step 4" in run.stderr
    assert run.summary["weights_sha256"] == through.summary["weights_sha256"] != fixed.summary["weights_sha256"]


@pytest.mark.parametrize(("name", "has"), [("Untrained", "no optimizer"), ("Twice", "several optimizers")])
def test_a_step_has_one_optimizer(variants: Path, tmp_path: Path, name: str, has: str) -> None:
    run = variant(variants, tmp_path, name, ok=False)
    assert run.returncode == 2, str(run)
    assert f"configure_optimizers returned {has}: a step has one" in run.stderr
    assert run.folders == []


def test_the_rank_that_failed_is_named_where_others_lose_it(variants: Path, tmp_path: Path) -> None:
    task = (*TASK, "model=variant", "model._target_=variants.OneFails", "strategy=ddp", "devices=2")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1")
    script = str(variants / "src" / "train.py")
    for launcher, error in ((torchrun, "ValueError"), ((), "Refusal")):
        program = Program(tmp_path / error, script, launcher)
        run = program(*task, cwd=variants, env={"ERROR": error}, ok=False)
        assert run.returncode == (1 if launcher else 2), str(run)
        assert run.summary["status"] == "failed"
        assert run.summary["error"].endswith("the file that is broken"), run.summary["error"]


def test_gathering_inside_a_step_is_refused(variants: Path, tmp_path: Path) -> None:
    """One rank has two turns, the other one: they would wait for each other."""
    run = variant(variants, tmp_path, "Gathers", "strategy=ddp", "devices=2", "pieces=3", "hang_timeout=20", ok=False)
    assert run.returncode == 2, str(run)
    assert "training_step can't gather from other ranks" in run.stderr
    assert variant(variants, tmp_path / "one", "Gathers", "pieces=3", "max_steps=1").returncode == 0


def test_buffers_survive_a_step_on_scattered_devices(variants: Path, tmp_path: Path) -> None:
    """As on one device: whether they are changed in place or replaced."""
    task = ("max_epochs=1", "pieces=4")
    states = []
    for strategy, devices in (("auto", 1), ("dp", 2)):
        run = variant(variants, tmp_path / strategy, "Buffers", f"strategy={strategy}", f"devices={devices}", *task)
        states.append(torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    one, dp = states
    assert one["seen"] == dp["seen"] == 81
    assert sorted(one["sizes"].tolist()) == sorted(dp["sizes"].tolist())
    assert one["norm.num_batches_tracked"] == dp["norm.num_batches_tracked"] == 4  # steps
    assert one["norm.running_mean"].abs().max() > 1e-3
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(dp[name], one[name], rtol=1e-10, atol=0)


def test_the_cursor_is_back_after_a_second_ctrl_c(variants: Path, tmp_path: Path) -> None:
    terminal, inside = os.openpty()
    task = [override for override in TASK if not override.startswith("callbacks.console")]
    command = [sys.executable, "src/train.py", *task, "model=variant", "model._target_=variants.Sleeps"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen([*command, f"outputs={tmp_path}"], cwd=variants, stderr=inside, env=environment)
    os.close(inside)
    shown = b""
    pressed = 0
    with suppress(OSError):  # how Linux says that the other end is closed
        while block := os.read(terminal, 65536):
            shown += block
            if (b"\x1b[?25l", b"saving and ending", b"never")[pressed] in shown:
                pressed += 1
                process.send_signal(signal.SIGINT)
    os.close(terminal)
    assert process.wait(timeout=60) == 130, shown.decode()
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


def test_a_loss_that_goes_past_forward_is_trained_on_or_refused(variants: Path, tmp_path: Path) -> None:
    """Under dp and exact it would be without its gradient."""
    on = ("strategy=dp", "devices=2")
    runs = [variant(variants, tmp_path / name, name, *on, "max_epochs=1") for name in ("Penalty", "LitDigits")]
    alone = variant(variants, tmp_path / "alone", "Penalty", "max_epochs=1")
    assert float((weights(runs[0].folder) - weights(alone.folder)).norm()) < 1e-10
    assert float((weights(runs[1].folder) - weights(alone.folder)).norm()) > 1e-3
    refused = variant(variants, tmp_path / "exact", "Penalty", *on, "exact=true", ok=False)
    assert refused.returncode == 2, str(refused)
    assert "training_step uses net.1.weight, net.1.bias, net.3.weight, ... outside of forward()" in refused.stderr


def test_what_a_module_does_to_batches_is_the_same_on_every_layout(variants: Path, tmp_path: Path) -> None:
    layouts = {"one": ("devices=1",), "ddp": ("strategy=ddp", "devices=3"), "dp": ("strategy=dp", "devices=2")}
    task = ("exact=true", "max_epochs=1")
    runs = [variant(variants, tmp_path / name, "Mixes", *task, *on) for name, on in layouts.items()]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1
    plain = variant(variants, tmp_path / "plain", "LitDigits", *task)
    assert plain.summary["weights_sha256"] != runs[0].summary["weights_sha256"]
    assert plain.summary["metrics"]["test/loss"] != runs[0].summary["metrics"]["test/loss"]
    blind = variant(variants, tmp_path / "blind", "Blinds", *task)
    assert plain.summary["weights_sha256"] == blind.summary["weights_sha256"]
    assert plain.summary["metrics"]["test/loss"] != blind.summary["metrics"]["test/loss"]
    refused = variant(variants, tmp_path / "moves", "Moves", ok=False)
    assert refused.returncode == 2, str(refused)
    assert "its transfer_batch_to_device would see a whole step instead of a batch" in refused.stderr


def test_a_callback_that_would_accumulate_by_itself_is_refused(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path, "LitDigits", "+callbacks.swa._target_=variants.Swa", ok=False)
    assert run.returncode == 2
    assert "callbacks.swa: Swa changes how many batches make a step" in run.stderr


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("OwnSwa", (), "variants.OwnSwa: Swa changes how many batches make a step"),
        ("OwnData", (), "variants.OwnData: its train_dataloader would not be asked"),
        ("Views", ("strategy=dp", "devices=2"), "training_step calls forward() more than once"),
        ("AfterBackward", (), "its on_after_backward would see the gradient of a piece"),
        ("WholeLoss", ("strategy=dp", "devices=2"), "forward() returned one number for a whole piece"),
    ],
)
def test_what_would_be_ignored_or_wrong_is_refused(
    variants: Path, tmp_path: Path, name: str, options: tuple[str, ...], says: str
) -> None:
    run = variant(variants, tmp_path, name, *options, ok=False)
    assert run.returncode == 2, str(run)
    assert says in run.stderr


@pytest.mark.parametrize("name", ["Curriculum", "Planned", "Freezes", "Plateau"])
def test_what_an_epoch_began_with_is_there_when_it_goes_on(variants: Path, tmp_path: Path, name: str) -> None:
    task = ("max_epochs=3", "pieces=1", "num_workers=1", "checkpoint_every=5")  # killed in step 7, of four an epoch
    whole = variant(variants, tmp_path / "whole", name, *task).summary
    train = Program(tmp_path / "cut", str(variants / "src" / "train.py"))
    target = f"model._target_=variants.{name}"
    cut = train(*TASK, "model=variant", target, *task, env={"CUT": "9"}, cwd=variants, ok=False)
    assert cut.returncode == 1, str(cut)
    assert go_on(variants, cut.folder)["weights_sha256"] == whole["weights_sha256"]


def test_a_module_without_a_test(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path, "NoTest", "max_epochs=1", "callbacks.checkpoint.monitor=null")
    assert (run.summary["status"], run.summary["metrics"]) == ("completed", {})


def test_layers_and_outputs_of_torchvision(variants: Path, tmp_path: Path) -> None:
    """FrozenBatchNorm2d; a named tuple, as of Inception, on scattered devices."""
    variant(variants, tmp_path / "frozen", "FrozenNorm", "max_epochs=1")
    dp = variant(variants, tmp_path / "dp", "Named", "max_epochs=1", "strategy=dp", "devices=2")
    one = variant(variants, tmp_path / "one", "Named", "max_epochs=1")
    assert float((weights(dp.folder) - weights(one.folder)).norm()) < 1e-10


def test_mixed_labels_and_weighted_classes_of_a_classifier(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path / "own", "MixedClassifier", "precision=32-true", "lr=0.05")
    plain = variant(variants, tmp_path / "plain", "MnistCNN", "precision=32-true", "lr=0.05")
    assert run.summary["metrics"]["test/acc"] == plain.summary["metrics"]["test/acc"]


def test_ddp_on_one_device_waits_for_no_parameter(variants: Path, tmp_path: Path) -> None:
    variant(variants, tmp_path, "Spare", "strategy=ddp", "devices=1", "max_epochs=1")


def go_on(variants: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """The summary of a run that goes on in its folder."""
    train = Program(folder.parent, str(variants / "src" / "train.py"))
    train(f"resume={folder}", *overrides, cwd=variants)
    return summary_of(folder)


def test_a_run_that_a_callback_ended_has_ended(variants: Path, tmp_path: Path) -> None:
    stopping = ("+callbacks.stopping._target_=variants.Stopping", "max_epochs=9")
    run = variant(variants, tmp_path, "LitDigits", *stopping)
    assert run.summary["steps"] == 8, "of two epochs, since nothing is better than the first by 10"
    again = go_on(variants, run.folder)
    assert (again["steps"], again["weights_sha256"]) == (8, run.summary["weights_sha256"])
    assert go_on(variants, run.folder, "max_epochs=10")["steps"] == 12  # asked for, until the next check


def test_what_was_unfrozen_stays_so_when_a_run_goes_on(variants: Path, tmp_path: Path) -> None:
    whole = variant(variants, tmp_path / "whole", "Unfrozen", "max_epochs=3").summary
    cut = variant(variants, tmp_path / "cut", "Unfrozen", "max_epochs=3", "max_steps=8").folder
    assert go_on(variants, cut, "max_steps=null")["weights_sha256"] == whole["weights_sha256"]


def test_a_network_made_late_goes_on_too(variants: Path, tmp_path: Path) -> None:
    whole = variant(variants, tmp_path / "whole", "Lazy").summary
    cut = variant(variants, tmp_path / "cut", "Lazy", "max_steps=3").folder
    assert go_on(variants, cut, "max_steps=null")["weights_sha256"] == whole["weights_sha256"]


def test_an_optimizer_of_a_part_of_the_network(variants: Path, tmp_path: Path) -> None:
    layouts = (), ("strategy=dp", "devices=2"), ("strategy=ddp", "devices=2")
    runs = [variant(variants, tmp_path / str(n), "Head", "exact=true", *on).summary for n, on in enumerate(layouts)]
    assert len({run["weights_sha256"] for run in runs}) == 1


def test_csv_keeps_its_rows_when_a_run_goes_on(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path, "LitDigits", "logger=csv", "log_every=1", "max_epochs=1")
    before = (run.folder / "csv" / "metrics.csv").read_text().splitlines()
    train = Program(tmp_path, str(variants / "src" / "train.py"))
    train(f"resume={run.folder}", "max_epochs=2", cwd=variants)
    after = (run.folder / "csv" / "metrics.csv").read_text().splitlines()
    assert len(before) < len(after)
    assert after[: len(before)] == before


def test_csv_keeps_its_rows_when_that_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = check(dict(compose("logger=csv")))
    (first,) = make_loggers(config, tmp_path, 0)
    for step in (1, 2, 3):
        first.log_metrics({"loss": float(step)}, step)
    first.save()

    def killed(writer: ExperimentWriter) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ExperimentWriter, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            make_loggers(config, tmp_path, 2)
    for _ in range(2):
        make_loggers(config, tmp_path, 2)
        rows = list(csv.DictReader((tmp_path / "csv" / "metrics.csv").read_text().splitlines()))
        assert [(row["step"], row["loss"]) for row in rows] == [("1", "1.0"), ("2", "2.0")]


def test_an_evaluation_that_takes_long_is_not_silent(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path / "trained", "SlowTest", "max_steps=1", "data.samples=600")  # 120 to be tested
    evaluate = Program(tmp_path / "evaluated", str(variants / "src" / "evaluate.py"))
    task = (f"checkpoint={run.folder}", "batch_size=12", "+hang_timeout=7", "accelerator=cpu")  # 10 batches of 1 s
    found = evaluate(*task, cwd=variants, env={"SLOW": "1"})
    assert found.summary["metrics"]["test/acc"] == run.summary["metrics"]["test/acc"]


@pytest.mark.parametrize(
    ("program", "target", "error", "wrong"),
    [
        ("import nowhere.at_all", "own.Net", Refusal, "own.Net: own imports nowhere, which is not installed"),
        ("import torch; torch.nowhere", "own.Net", AttributeError, "'torch' has no attribute 'nowhere'"),
        ("", "own.Net", Refusal, "own.Net: own has no Net"),
        ("", "own.nets.Net", Refusal, "own.nets.Net: there is no module own.nets"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, target: str, error: type[Exception], wrong: str
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(error, match=wrong):
        instantiate("model", {"_target_": target})


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ('{"a": 1}["label"]', r"KeyError: 'label' \(\S+own\.py:2 in stripes; HYDRA_FULL_ERROR=1 shows the traceback\)"),
        ("assert 1 > 2", r"AssertionError \(\S+own\.py:2 in stripes; .*"),
        ("if True", r"SyntaxError: expected ':' \(own\.py, line 2\) \(.*"),
    ],
)
def test_a_mistake_in_the_users_function_has_its_type_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, says: str
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own.py").write_text(f"def stripes():\n    {fails}\n")
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises((KeyError, AssertionError, SyntaxError)) as caught:
        instantiate("data", {"_target_": "own.stripes"})
    assert re.fullmatch(says, cli.line(caught.value, "train"))


@pytest.mark.parametrize("ignored", ["optimizer=adamw", "optimizer.weight_decay=0.3", "scheduler=cosine"])
def test_what_a_module_does_not_take_is_not_ignored(variants: Path, tmp_path: Path, ignored: str) -> None:
    run = variant(variants, tmp_path, "LitDigits", ignored, ok=False)
    assert run.returncode == 2, str(run)
    key = ignored.partition("=")[0]
    assert f"{key}: variants.LitDigits takes no {key.partition('.')[0]}, so this would change nothing" in run.stderr
    assert run.folders == []


@pytest.mark.parametrize(
    ("name", "given", "refused"),
    [
        ("OwnOptimizer", "optimizer.weight_decay=0.3", True),
        ("OwnOptimizer", "scheduler=cosine", True),
        ("Helped", "optimizer.weight_decay=0.3", False),
        ("Helped", "scheduler=cosine", True),
    ],
)
def test_what_a_classifiers_own_optimizer_does_not_take_is_not_ignored(
    variants: Path, tmp_path: Path, name: str, given: str, refused: bool
) -> None:
    run = variant(variants, tmp_path, name, "precision=32-true", "max_steps=1", given, ok=not refused)
    if refused:
        assert run.returncode == 2, str(run)
        group = key(given).partition(".")[0]
        says = f"{key(given)}: the configure_optimizers of variants.{name} does not use self.{group}, so this would"
        assert says in run.stderr


def test_a_network_among_the_hyperparameters_is_refused_before_the_work(variants: Path, tmp_path: Path) -> None:
    run = variant(variants, tmp_path, "Keeps", "precision=32-true", ok=False)
    assert run.returncode == 2, str(run)
    assert "variants.Keeps: its hyperparameters hold net (Flatten), and a checkpoint holds plain data" in run.stderr
    assert 'save_hyperparameters(ignore=["net"])' in run.stderr


def test_a_learning_rate_that_is_given_anew_wins(variants: Path, tmp_path: Path) -> None:
    cut = variant(variants, tmp_path, "LitDigits", "max_epochs=1", "lr=0.1")
    train = Program(tmp_path, str(variants / "src" / "train.py"))
    train(f"resume={cut.folder}", "max_epochs=2", "lr=0.2", cwd=variants)
    state = torch.load(cut.folder / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]
    assert (state["param_groups"][0]["lr"], state["param_groups"][0]["momentum"]) == (0.2, 0.9)


def test_a_resume_that_fails_before_its_first_step_leaves_the_run_as_it_was(variants: Path, tmp_path: Path) -> None:
    folder = variant(variants, tmp_path, "Groups", "max_epochs=1").folder
    kept = [folder / "summary.json", folder / ".hydra" / "overrides.yaml", folder / ".hydra" / "config.yaml"]
    before = [path.read_bytes() for path in kept]
    for wrong, says in (
        ("model._target_=mine.LitDigits", "was made by"),
        ("+model.whole=true", "can't go on from it: ValueError: loaded state dict"),
    ):
        train = Program(tmp_path, str(variants / "src" / "train.py"))
        run = train(f"resume={folder}", wrong, "max_epochs=2", cwd=variants, ok=False)
        assert run.returncode == 2, str(run)
        assert says in run.stderr, str(run)
        assert [path.read_bytes() for path in kept] == before
