"""A checkpoint has what every hook of its step has done, whoever asks for it: resumed from it, a run has the same bits.

Every hook of a module and of a callback changes state here, at each call in another way. A run writes checkpoints, and
a new one continues from each of them. By night the hooks save in each of its steps.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from trainer.small import BATCH, Killed, Net, fit, loader, samples, saved_steps, trainer

import lockstep

HOOKS_OF_STEPS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
)
HOOKS_OF_MODULES = (
    *HOOKS_OF_STEPS,
    *("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_model_train"),
    *("optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping"),
)
NIGHTLY = pytest.mark.nightly
# Inside an epoch, a validation after steps 2, 4, 8, 10; steps 6 and 12 end epochs.
OPTIONS: dict[str, Any] = {"exact": True, "pieces": 2, "val_check_interval": 2, "gradient_clip_val": 10.0}


def save(trainer: Any, whose: Any, hook: str) -> None:
    """Save a checkpoint in the first call of a hook from its step in `saves` on."""
    if trainer.global_step >= whose.saves.get(hook, sys.maxsize):
        trainer.save_checkpoint(Path(trainer.default_root_dir, "all", f"{type(whose).__name__}.{hook}"))
        del whose.saves[hook]


class Marks(Net):
    """A module each of whose hooks changes a buffer, and a weight that training does not change."""

    saves: dict[str, int] = {}

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        for name in HOOKS_OF_MODULES:
            self.register_buffer(f"n_{name}", torch.zeros(1, dtype=torch.float64))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if not self.trainer.sanity_checking:
            save(self.trainer, self, "validation_step")

    def mark(self, hook: str) -> None:
        """Change state in a way that depends on how often this was called, and when."""
        if not self.trainer.sanity_checking:
            with torch.no_grad():
                count = self.get_buffer(f"n_{hook}")
                count.mul_(0.5).add_(1 + self.trainer.global_step)
                self.teacher.mul_(0.75).add_(count.float() + HOOKS_OF_MODULES.index(hook))
            save(self.trainer, self, hook)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def _marking(hook: str) -> Any:
    lightnings = getattr(pl.LightningModule, hook)

    def method(self: Marks, *args: Any, **kwargs: Any) -> Any:
        self.mark(hook)
        return lightnings(self, *args, **kwargs)

    return method


for _hook in HOOKS_OF_MODULES:
    setattr(Marks, _hook, _marking(_hook))


class Counts(pl.Callback):
    """A callback whose hooks change its state and the module's."""

    def __init__(self, saves: dict[str, int] | None = None) -> None:
        self.counts = dict.fromkeys(HOOKS_OF_STEPS, 0.0)
        self.saves = saves or {}

    def mark(self, hook: str, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.counts[hook] = self.counts[hook] / 2 + 1 + trainer.global_step
            with torch.no_grad():
                module.teacher.add_(self.counts[hook])
            save(trainer, self, hook)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict)


def _counting(hook: str) -> Any:
    return lambda self, trainer, module, *args: self.mark(hook, trainer, module)


for _hook in HOOKS_OF_STEPS:
    setattr(Counts, _hook, _counting(_hook))


class Last(pl.callbacks.Checkpoint, Counts):
    """One that Lightning calls after all others."""


class Signals(pl.Callback):
    """Sends this process signals."""

    def __init__(self, **steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        for name, step in self.steps.items():
            if trainer.global_step == step:
                os.kill(os.getpid(), getattr(signal, name))


def run(folder: Path, *callbacks: pl.Callback, ckpt: Path | None = None, saves: Any = None, **options: Any) -> Any:
    """Return what a run ends with: the module's hash and the counts of its callbacks."""
    pl.seed_everything(0, verbose=False)
    module, counts = Marks(), [each for each in callbacks if isinstance(each, Counts)] or [Counts()]
    module.saves = saves or {}
    everything = [*counts, *(each for each in callbacks if each not in counts), Last()]
    made = trainer(folder, callbacks=everything, **OPTIONS, **options)
    made.fit(module, lockstep.DataModule(train=samples(), val=samples()), ckpt_path=ckpt)
    return lockstep.weights_sha256(module.state_dict()), counts[0].counts


@cache
def undisturbed(folder: str) -> Any:
    return run(Path(folder) / "whole", batch_size=BATCH)


def check(folder: Path, least: int, *callbacks: pl.Callback, files: str = "*", **options: Any) -> None:
    """Check that runs which continue from the checkpoints of a run end as a run that nobody has disturbed."""
    whole = undisturbed(str(folder.parent))
    with suppress(lockstep.Interrupted):
        assert run(folder, *callbacks, batch_size=BATCH, **options) == whole, "saving changes nothing"
    saved = [*(folder / "all").glob(files), *(folder / "checkpoints").glob("*.ckpt")]
    assert len(saved) >= least
    for number, file in enumerate(saved):
        layout: dict[str, Any] = {"strategy": "dp", "devices": 1 + number % 2}
        assert run(folder / "other", ckpt=file, batch_size=BATCH, **layout) == whole, file.name


class Stops(pl.Callback):
    """Ends a run inside an epoch, as a kill does."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise lockstep.Interrupted(signal.SIGTERM)


@pytest.mark.parametrize("every", [1, 2])
def test_of_last_ckpt(tmp_path: Path, every: int) -> None:
    check(tmp_path, 1, Stops(), checkpoint_every=every)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("SIGTERM", 6), ("SIGUSR1", 3)),
        *(
            pytest.param(*each, marks=NIGHTLY)
            for each in [("SIGTERM", 2), ("SIGTERM", 3), ("SIGUSR1", 2), ("SIGUSR1", 6)]
        ),
    ],
)
def test_of_signals(tmp_path: Path, name: str, step: int) -> None:
    check(tmp_path, 1, Signals(**{"SIGTERM": step + 1, name: step}))


@pytest.mark.parametrize("files", ["*=[46].ckpt", pytest.param("*", marks=NIGHTLY)])
def test_of_lightnings_callback(tmp_path: Path, files: str) -> None:
    """One run has all of them."""
    cases: dict[str, dict[str, Any]] = {
        "steps": {"every_n_train_steps": 1},
        "time": {"train_time_interval": timedelta(microseconds=1)},
        "validation": {"monitor": "val_loss"},
        "end of epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        "last validation": {"mode": "max", "save_on_train_epoch_end": False},
    }
    saves = [
        ModelCheckpoint(tmp_path / "all", f"{name} {{step}}", save_top_k=-1, **options)
        for name, options in cases.items()
    ]
    check(tmp_path, 8, *saves, files=files)


@pytest.mark.parametrize("first", [0, *(pytest.param(step, marks=NIGHTLY) for step in range(1, 7))])
def test_of_hooks(tmp_path: Path, first: int) -> None:
    """Each of a module and of a callback saves in another step."""
    hooks = HOOKS_OF_STEPS, (*HOOKS_OF_MODULES, "validation_step")
    of_callback, of_module = ({hook: (first + 5 * n) % 7 for n, hook in enumerate(each)} for each in hooks)
    check(tmp_path, len(of_callback) + len(of_module), Counts(of_callback), saves=of_module)


class Freezes(Net):
    """A module whose hooks freeze, unfreeze, and change modes of layers, each in another epoch."""

    freezes_in = "on_fit_start"

    def setup(self, stage: str) -> None:
        if self.freezes_in == "setup":
            self.net[0].requires_grad_(False)

    def on_fit_start(self) -> None:
        if self.freezes_in == "on_fit_start":
            self.net[0].requires_grad_(False)

    def on_train_start(self) -> None:
        if self.freezes_in == "on_train_start":
            self.net[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.requires_grad_(True)


class Evaluates(pl.Callback):
    """Lets a layer evaluate from the second epoch on."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net[1].eval()
            pl_module.net[4].bias.requires_grad_(False)


class OneLayer(Net):
    """A module whose optimizer has one layer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.2, momentum=0.9)


class Adds(pl.Callback):
    """Adds to the optimizer in the second epoch: a group of its own, and a weight to the first one."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            (optimizer,) = trainer.optimizers
            optimizer.add_param_group({"params": list(pl_module.net[4].parameters()), "lr": 0.1})
            optimizer.param_groups[0]["params"].append(pl_module.net[1].weight)


class WithBackbone(Net):
    """A module for Lightning's BackboneFinetuning."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("steps", [(8, 12), pytest.param((6, 15), marks=NIGHTLY)])
@pytest.mark.parametrize(
    "case", ["setup", "on_fit_start", "on_train_start", "mode", "groups", "backbone", "backbone without BN"]
)
def test_what_is_trained_stays_so(tmp_path: Path, case: str, steps: tuple[int, ...]) -> None:
    def run(folder: Path, ckpt: Path | None = None) -> str:
        pl.seed_everything(0, verbose=False)
        kinds: dict[str, Any] = {"backbone": WithBackbone, "groups": OneLayer}
        module = kinds.get(case.split()[0], Freezes)()
        module.freezes_in = case
        callbacks: list[Any] = [saved_steps(folder / "all")]
        if case == "mode":
            callbacks.append(Evaluates())
        elif case == "groups":
            callbacks.append(Adds())
        elif case.startswith("backbone"):
            callbacks.append(BackboneFinetuning(1, train_bn=case == "backbone"))
        made = trainer(folder, exact=True, pieces=2, max_epochs=3, callbacks=callbacks)
        made.fit(module, loader(), loader(shuffle=False), ckpt_path=ckpt)
        return lockstep.weights_sha256(module.state_dict())

    whole = run(tmp_path / "whole")
    for step in steps:
        first = tmp_path / f"from {step}"
        assert run(first, tmp_path / "whole" / "all" / f"step={step}.ckpt") == whole
        assert run(tmp_path / "again", first / "all" / "step=16.ckpt") == whole, "continued twice"


class Fails(Net):
    """Fails in a hook of its tenth step."""

    def __init__(self, hook: str = "") -> None:
        super().__init__()
        if hook:
            self.original = getattr(self, hook)
            self.fails_at = 9 if hook in ("on_train_batch_start", "training_step") else 10
            setattr(self, hook, self.fail)

    def fail(self, *args: Any) -> Any:
        if self.trainer.global_step == self.fails_at:
            raise KeyError("a fault of the user's")
        return self.original(*args)


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("hook", ["on_train_batch_start", "training_step", "on_train_batch_end", "on_validation_end"])
def test_what_an_error_saves_inside_a_step_is_no_state_to_continue_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    def run(folder: Path, ckpt: Path | None = None, fails_in: str = "", exact: bool = True) -> str:
        options: dict[str, Any] = {"exact": exact, "pieces": 2, "val_check_interval": 2}
        options["callbacks"] = OnExceptionCheckpoint(tmp_path)
        data = loader(), loader(shuffle=False)
        return fit(folder, *data, kind=partial(Fails, fails_in), ckpt_path=ckpt, **options)

    with pytest.raises(KeyError):
        run(tmp_path / "first", fails_in=hook)
    file = tmp_path / "on_exception.ckpt"
    if hook == "on_train_batch_start":
        assert run(tmp_path / "other", file) == run(tmp_path / "whole")
        return
    with pytest.raises(lockstep.UserError, match=r"^exact=True: the checkpoint was saved after an error inside a step"):
        run(tmp_path / "other", file)
    shutil.copy(file, file := tmp_path / "copy.ckpt")  # Lightning's callback removes it when a run has ended
    run(tmp_path / "plain", file, exact=False)
    assert "lacks a part of this step" in caplog.text


class RemovesLast(pl.Callback):
    """Removes a file in the last hook of a fit, as Lightning's OnExceptionCheckpoint does, behind a slow write."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        trainer.strategy.checkpoint_io.then(time.sleep, 0.3)  # type: ignore[attr-defined]
        trainer.strategy.remove_checkpoint(self.file)


def test_a_fit_returns_when_the_files_of_its_last_hooks_are_as_they_stay(tmp_path: Path) -> None:
    (file := tmp_path / "old.ckpt").touch()
    trainer(tmp_path / "run", callbacks=RemovesLast(file), max_steps=1).fit(Net(), loader())
    assert not file.exists()


class Teacher(Net):
    """A module with an average of its weights, as docs/use/module-rules.md asks for it, that saves by a callback."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.teacher = torch.nn.Linear(8, 16).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.2)

    def on_train_batch_end(self, *args: Any) -> None:
        for mean, value in zip(self.teacher.parameters(), self.net[0].parameters(), strict=True):
            mean.data.lerp_(value.data, 0.2)

    def configure_callbacks(self) -> Any:
        return [saved_steps(self.folder)]


def teach(folder: Path, ckpt: Path | None = None, killed: bool = False, **options: Any) -> str:
    options |= {"exact": True, "pieces": 4, "callbacks": [Killed()] if killed else []}
    return fit(folder, kind=partial(Teacher, folder / "all"), ckpt_path=ckpt, **options)


@pytest.mark.usefixtures("processes")
def test_a_teacher_survives_a_kill_on_ddp(tmp_path: Path) -> None:
    whole = teach(tmp_path / "whole")
    options: dict[str, Any] = {"devices": 2, "accelerator": "cpu", "hang_timeout": 120}
    with pytest.raises(lockstep.WorkerFailed):
        lockstep.launch(partial(teach, checkpoint_every=4), tmp_path, None, True, **options)
    files = [tmp_path / "checkpoints" / "last.ckpt", tmp_path / "all" / "step=7.ckpt", tmp_path / "all" / "step=9.ckpt"]
    for file in files:
        assert lockstep.launch(teach, tmp_path / "other", file, **options) == whole, file.name
        assert teach(tmp_path / "one", file) == whole


class Uploads(CSVLogger):
    """A logger that takes the files, as WandbLogger(log_model="all") does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.steps: list[int] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = Path(checkpoint_callback.last_model_path or checkpoint_callback.best_model_path)
        if path.exists():
            self.steps.append(torch.load(path, weights_only=True)["global_step"])


@pytest.mark.parametrize("users", [False, True], ids=["last.ckpt", "ModelCheckpoint"])
def test_loggers_get_the_files_when_they_are_complete(tmp_path: Path, users: bool) -> None:
    logger = Uploads(tmp_path)
    callbacks = [ModelCheckpoint(tmp_path / "all", save_last=True)] if users else []
    made = trainer(tmp_path, pieces=2, max_epochs=3, logger=logger, callbacks=callbacks)
    made.fit(Net(), loader())
    assert sorted(set(logger.steps)) == [6, 12, 18]


def test_a_signal_is_the_programs_own_if_nothing_is_saved(tmp_path: Path) -> None:
    """Where checkpoints are saved, the program's handler does not get it, and the run ends."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        made = trainer(tmp_path, max_epochs=1, callbacks=[Signals(SIGTERM=2)], enable_checkpointing=False)
        made.fit(Net(), loader())
        assert (received, made.global_step, [*tmp_path.iterdir()]) == ([signal.SIGTERM], 6, [])
        saving = trainer(tmp_path, max_epochs=1, callbacks=[Signals(SIGTERM=2)])
        with pytest.raises(lockstep.Interrupted):
            saving.fit(Net(), loader())
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
