"""A step that runs out of memory is repeated with more pieces, all or nothing, or refused with the number that fits."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from conftest import ROOT, Program, Run
from test_loop import Net, weights
from torch.distributed._tools.mem_tracker import MemTracker
from torchmetrics.classification import MulticlassAccuracy

from lockstep.arithmetic.layout import Refusal, resolve
from lockstep.loading import ArrayDataset, DataModule, Spec, Splits
from lockstep.loading.augment import Augment
from lockstep.run.config import check
from lockstep.step import memory
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import ExactGradientSum, GradientSum
from lockstep.step.loop import StepLoop
from lockstep.step.memory import LiveTensors, Memory
from lockstep.step.strategies import make_strategy

# --- steps of one process ---


class Growing(Net):
    """From step 3 on pieces of more than 2 samples do not fit; seen late, when all has changed that a piece changes."""

    def __init__(self, fits: bool) -> None:
        super().__init__(norm=True, dropout=0.5)
        self.fits, self.calls = fits, 0
        self.accuracy = MulticlassAccuracy(3)
        self.seen = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accuracy(self(batch[0]), batch[1])
        self.seen += len(batch[1])
        self.calls += 1
        self.log(f"train/step{self.trainer.global_step}", loss, on_step=False, on_epoch=True)
        if not self.fits and self.trainer.global_step >= 2 and len(batch[1]) > 2 and self.calls % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss


class Recut(pl.Callback):
    """The control: takes four pieces from step 2 on, as one who knows that two won't do."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            data.layout = next(data.layout.finer())


def images() -> Splits:
    random = np.random.default_rng(1)
    data = ArrayDataset(random.integers(0, 256, (24, 1, 4, 4), dtype=np.uint8), random.integers(0, 3, 24))
    return Splits(data, data, data, Spec(1, 4, ("a", "b", "c"), (0.5,), (0.25,)), "none", Augment())


def fit(
    folder: Path, module: pl.LightningModule, repeats: bool = True, exact: bool = False, budget: float | None = None,
    pieces: int = 2, callbacks: Any = (), steps: int = 5,
) -> Any:  # fmt: skip
    layout = resolve(
        strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=8, pieces=pieces, exact=exact
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=make_strategy(layout, {}),
        devices=1,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        default_root_dir=folder,
        max_steps=steps,
    )
    gradients = (ExactGradientSum if exact else GradientSum)(trainer.strategy, 1)
    loop = StepLoop(trainer, gradients, FiniteGradientCheck("stop", 1), 3, Memory(1, budget, repeats))
    trainer.fit_loop.epoch_loop = loop
    trainer.fit(module, datamodule=DataModule(images(), layout, seed=3, num_workers=0))
    return trainer


def state(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """What steps leave behind: weights, statistics, optimizer, metrics, sums, what was logged, what was counted."""
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict()
    counted = [value for part in progress["optimizer"].values() for both in part.values() for value in both.values()]
    optimizer = trainer.optimizers[0].state.values()
    return {
        "weights": weights(module),
        "optimizer": torch.cat([state["momentum_buffer"].flatten() for state in optimizer]),
        "metric": torch.stack([module.accuracy.tp.sum(), module.accuracy.fn.sum()]),
        "seen": module.seen,
        "calls": torch.tensor(module.accuracy.update_count),
        "counted": torch.tensor(counted),
        "logged": torch.stack([v for k, v in sorted(trainer.callback_metrics.items())]),
        "random": torch.random.get_rng_state(),
    }


def test_a_step_without_memory_is_repeated_exactly_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, known = Growing(fits=False), Growing(fits=True)
    found = state(fit(tmp_path, module), module)
    expected = state(fit(tmp_path, known, callbacks=[Recut()]), known)
    assert {name: bool(torch.equal(value, found[name])) for name, value in expected.items()} == dict.fromkeys(
        found, True
    )
    monkeypatch.setattr(memory.Undo, "__call__", lambda self: self.module.zero_grad())
    control = Growing(fits=False)
    broken = state(fit(tmp_path, control), control)
    differ = {name for name, value in expected.items() if not torch.equal(value, broken[name])}
    assert differ == {"weights", "metric", "seen", "calls", "logged"}


@pytest.mark.parametrize("exact", [False, True])
def test_fixed_pieces_are_refused_with_the_number_that_fits(tmp_path: Path, exact: bool) -> None:
    why = "exact=true keeps their number" if exact else "accumulate_grad_batches=auto finds that"
    fits = r"step 3: out of memory: .* 8 samples in 2 pieces; pieces=4 \(accumulate_grad_batches=4\) would fit, "
    with pytest.raises(Refusal, match=fits + why):
        fit(tmp_path, Growing(fits=False), repeats=False, exact=exact)


@pytest.mark.parametrize("repeats", [False, True])
def test_what_never_fits_is_refused(tmp_path: Path, repeats: bool) -> None:
    with pytest.raises(Refusal, match=r"step 1: out of memory: memory_budget=0.0009.* in pieces of one sample"):
        fit(tmp_path, Net(), repeats=repeats, budget=1000)


def test_another_error_is_no_lack_of_memory(tmp_path: Path) -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        fit(tmp_path, Wrong())


# --- the budget of a CPU ---


def test_live_tensors_are_counted_to_the_byte() -> None:
    held = torch.zeros(1000)
    with LiveTensors(limit=20_000) as live:
        live.hold([held, held[:10]])
        assert live.used == 4000
        two = torch.ones(2000)
        assert live.used == 12_000
        view = two[5:].view(5, -1)
        assert live.used == 12_000
        del two
        assert live.used == 12_000  # the view keeps it
        del view
        assert (live.used, live.peak) == (4000, 12_000)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(5000)
    assert live.used == 4000


def test_the_peak_of_a_step_is_that_of_torchs_own_tracker() -> None:
    def step(net: torch.nn.Module) -> None:
        x = torch.randn(16, 3, 24, 24)
        net(x).sum().backward()

    def net() -> torch.nn.Module:
        conv = torch.nn.Conv2d
        return torch.nn.Sequential(conv(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), conv(8, 8, 3))

    ours, theirs, tracker = net(), net(), MemTracker()
    live = LiveTensors(float("inf"))
    live.hold([*ours.parameters(), *ours.buffers()])
    with live:
        step(ours)
    tracker.track_external(theirs)
    with tracker:
        step(theirs)
    snapshot = tracker.get_tracker_snapshot("peak")
    total = snapshot[torch.device("cpu")]["Total"]
    assert live.peak == pytest.approx(total, rel=0.02)


# --- whole runs ---

TASK = (
    "data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "batch_size=32", "max_epochs=1",
    "accelerator=cpu", "precision=64-true", "logger=none", "threads=1", "strategy=ddp", "devices=2",
)  # fmt: skip
AUTO = "accumulate_grad_batches=auto"


def last(run: Run, folder: Path | None = None) -> torch.Tensor:
    saved = torch.load((folder or run.folder) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return torch.cat([saved[name].flatten() for name in sorted(saved)])


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing limits."""
    return Program(tmp_path_factory.mktemp("free"))(*TASK)


def test_a_budget_finds_a_divisor_and_the_weights_stay(free: Run, tmp_path: Path) -> None:
    train = Program(tmp_path)
    run = train(*TASK, AUTO, "memory_budget=0.5")
    layout = run.summary["layout"]
    assert layout["accumulate_grad_batches"] > 1
    assert layout["batch_size"] == 32
    assert 32 % layout["pieces"] == 0
    assert re.search(
        rf"{layout['accumulate_grad_batches']} fits in 0 MiB of each device, memory_budget=0.5", run.stderr
    )
    assert f"accumulate_grad_batches={layout['accumulate_grad_batches']} is the least that fits" in run.stderr
    assert free.summary["layout"]["pieces"] == 2
    assert distance(last(run), last(free)) < 1e-10
    # it goes on with the number that it has found, whatever fits now
    resumed = train(f"resume={run.folder}", "max_epochs=2", "memory_budget=null")
    assert resumed.summary["layout"]["pieces"] == layout["pieces"]
    assert distance(last(resumed), last(free)) > 1e-3  # the control: weights that differ do


MODULE = """
import torch
from project.models import MnistCNN


class Late(MnistCNN):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3 and self.global_rank == 1:
            held = torch.zeros(len(batch[1]), 1 << 16)  # half a MiB a sample
        return super().training_step(batch, batch_idx)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for part in ("src", "conf"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (folder / "src" / "late.py").write_text(MODULE)
    (folder / "conf" / "model" / "late.yaml").write_text("name: late\n_target_: late.Late\n")
    return folder


def test_one_rank_without_memory_and_all_repeat_the_step(free: Run, project: Path, tmp_path: Path) -> None:
    train = Program(tmp_path, str(project / "src" / "train.py"))
    run = train(*TASK, "model=late", AUTO, "memory_budget=5", cwd=project)
    assert "accumulate_grad_batches=1 is the least that fits" in run.stderr
    assert "step 4: out of memory; repeated, and on from here, in 4 pieces" in run.stderr
    assert run.summary["layout"]["pieces"] == 4
    assert distance(last(run), last(free)) < 1e-10
    refused = train(*TASK, "model=late", "memory_budget=5", cwd=project, ok=False)
    assert refused.returncode == 2
    assert re.search(r"^error: step 4: out of memory: .* in 2 pieces; give more, or accumul", refused.stderr, re.M)
    kept = train(*TASK, "model=late", "memory_budget=5", "exact=true", cwd=project, ok=False)
    assert re.search(r"^error: step 4: .* pieces=4 \(accumulate_grad_batches=2\) would fit, exact", kept.stderr, re.M)


def test_a_backward_pass_without_memory_is_refused_in_words_under_ddp(tmp_path: Path) -> None:
    task = ("data=synthetic", "data.samples=712", "batch_size=64", "logger=none", "threads=1", "max_epochs=1")
    run = Program(tmp_path)(*task, "accelerator=cpu", "strategy=ddp", "devices=2", "memory_budget=5", ok=False)
    assert run.returncode == 2, str(run)
    assert re.search(r"^error: step 1: out of memory: memory_budget=5 MiB .* in 2 pieces; give more", run.stderr, re.M)


# --- the key ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pieces": 4}, "pieces=4 fixes what accumulate_grad_batches=auto looks for"),
        ({"strategy": {"name": "ddp", "compression": "bf16"}, "devices": 2}, "compression=bf16: not with accumulate"),
        ({"memory_budget": 0}, "memory_budget=0: must be a number greater than 0"),
    ],
)
def test_what_auto_does_not_go_with(changes: dict[str, Any], message: str) -> None:
    raw = {
        "name": "x", "outputs": "o", "data": {}, "data_dir": "d", "num_workers": None, "strategy": {"name": "auto"},
        "accelerator": "cpu", "devices": 1, "num_nodes": 1, "rdzv_endpoint": None, "batch_size": 8, "exact": False,
        "precision": "32-true", "threads": None, "memory_format": "auto", "accumulate_grad_batches": "auto",
    }  # fmt: skip
    with pytest.raises(Refusal, match=re.escape(message)):
        check({**raw, **changes})


def test_finer_cuts_divide_the_batch() -> None:
    layout = resolve(strategy="ddp", accelerator="cpu", devices=2, num_nodes=1, batch_size=60)
    assert [finer.pieces for finer in layout.finer()] == [4, 6, 10, 12, 20, 30, 60]
    uneven = resolve(strategy="ddp", accelerator="cpu", devices=3, num_nodes=1, batch_size=64, pieces=4)
    assert [finer.pieces for finer in uneven.finer()] == [8, 16, 32, 64]
