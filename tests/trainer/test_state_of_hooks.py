"""What hooks draw is seeded; what they keep in Python attributes is named when a run continues without it."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from trainer.small import Net, loader, saved_steps, trainer

import lockstep

LOST = "the run continues without the values that"


HOOKS = (
    *("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"),
    *("on_validation_epoch_end", "on_train_epoch_end"),
)


class Noise(Net):
    """Draws from each global generator in a hook, and changes weights by it."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self.change)

    def change(self, *args: Any) -> None:
        with torch.no_grad():
            drawn = random.random() + float(np.random.rand())  # noqa: NPY002  as users do
            bias: Any = self.net[0].bias
            bias.add_(torch.randn(16) * 0.1 + drawn * 0.1)


def run(folder: Path, module: pl.LightningModule, ckpt: Path | None = None, **options: Any) -> str:
    callbacks = [saved_steps(folder / "all"), *options.pop("callbacks", [])]
    made = trainer(folder, **{"exact": True, "pieces": 2, "callbacks": callbacks, **options})
    made.fit(module, loader(), loader(), ckpt_path=ckpt)
    return lockstep.weights_sha256(dict(module.named_parameters()))


def noisy(folder: str, hook: str, ckpt: str | None = None, **options: Any) -> str:
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    return run(Path(folder), Noise(hook), None if ckpt is None else Path(ckpt), **options)


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("hook", HOOKS)
def test_what_hooks_draw_is_the_same_when_a_run_continues(tmp_path: Path, hook: str) -> None:
    whole = noisy(str(tmp_path), hook)
    assert whole != noisy(str(tmp_path / "control"), "none")
    for step in (3, 8):
        ckpt = str(tmp_path / "all" / f"step={step}.ckpt")
        assert noisy(str(tmp_path / f"from {step}"), hook, ckpt, strategy="dp", devices=2) == whole, step


@pytest.mark.usefixtures("processes")
def test_what_hooks_draw_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    for hook in ("on_train_epoch_start", "on_train_batch_end"):
        whole = noisy(str(tmp_path / hook / "one"), hook)
        assert lockstep.launch(noisy, str(tmp_path / hook / "two"), hook, devices=2) == whole, hook


class Keeps(Net):
    """Keeps what its loss needs in Python attributes: a number of the class, a tensor, a teacher in a list."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.teacher, self.temperature, self.seconds = torch.zeros(3), [nn.Linear(8, 3)], 1.0, 0.0
        self.random = np.random.default_rng(0)

    def on_train_epoch_start(self) -> None:
        self.temperature = 1.0 + self.current_epoch

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1
        self.centre = self.centre + 1.0
        self.random.normal()
        with torch.no_grad():
            self.teacher[0].weight.add_(1.0)


class Counts(pl.Callback):
    """Counts steps; with `saves` its state_dict has their number."""

    def __init__(self, saves: bool) -> None:
        self.steps, self._saves = 0, saves

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps} if self._saves else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict.get("steps", 0)


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("step", [3, 6, 8])
def test_python_attributes_that_a_run_continues_without_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    run(tmp_path, Keeps(), callbacks=[Counts(True)])
    assert LOST not in caplog.text
    run(tmp_path / "on", Keeps(), tmp_path / "all" / f"step={step}.ckpt", callbacks=[Counts(True)])
    line = next(each for each in caplog.messages if LOST in each)
    assert all(name in line for name in ("Keeps.centre", "Keeps.count", "Keeps.random")), line
    assert "1 more" in line, line  # the teacher
    assert "temperature" not in line


@pytest.mark.usefixtures("whole_run")
def test_a_callback_that_saves_its_state_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, Net(), callbacks=[Counts(True)])
    run(tmp_path / "on", Net(), tmp_path / "all" / "step=3.ckpt", callbacks=[Counts(True)])
    assert LOST not in caplog.text
    run(tmp_path / "other", Net(), callbacks=[Counts(False)])
    run(tmp_path / "again", Net(), tmp_path / "other" / "all" / "step=3.ckpt", callbacks=[Counts(False)])
    assert f"{LOST} Counts.steps had" in caplog.text


class Bank:
    """Keeps the means of the last steps."""

    def __init__(self) -> None:
        self.means = [torch.zeros(8)]


SEEN: list[float] = []
STILL = [1.0]


def note(value: float) -> None:
    SEEN.append(value * STILL[0])


def keeps_elsewhere() -> Net:
    """Return a module that keeps things in an object of an own class, in a global and in a closure."""
    steps = 0

    class Elsewhere(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bank, self.unchanged = Bank(), Bank()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            nonlocal steps
            steps += 1
            note(1.0)
            self.bank.means.append(batch[0].mean(0))

    return Elsewhere()


@pytest.mark.usefixtures("whole_run")
def test_what_a_module_keeps_in_objects_globals_and_closures_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SEEN.clear()
    run(tmp_path, keeps_elsewhere())
    SEEN.clear()  # as a new process begins
    run(tmp_path / "on", keeps_elsewhere(), tmp_path / "all" / "step=3.ckpt")
    line = next(each for each in caplog.messages if LOST in each)
    assert all(name in line for name in ("Elsewhere.bank", f"{__name__}.SEEN", f"{__name__}.steps")), line
    assert not any(name in line for name in ("STILL", "unchanged", "more")), line


class LogsOnRankZero(Net):
    """Says that only rank zero logs, though each rank does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, rank_zero_only=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean_x", batch[0].mean(), rank_zero_only=True)


def logged(folder: str, **options: Any) -> dict[str, float]:
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    made = trainer(Path(folder), exact=True, pieces=2, **options)
    made.fit(LogsOnRankZero(), loader(), loader())
    return {name: float(value) for name, value in made.callback_metrics.items()}


@pytest.mark.usefixtures("processes")
def test_a_value_of_a_step_is_that_of_all_ranks_with_rank_zero_only(tmp_path: Path) -> None:
    one = logged(str(tmp_path / "one"))
    assert {"loss_step", "loss_epoch", "mean_x"} <= one.keys()
    assert lockstep.launch(logged, str(tmp_path / "two"), devices=2) == one
