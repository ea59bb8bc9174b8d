"""One class trains: a config makes a `lockstep.Trainer`, which has the rules and the parts that a program can use."""

from pathlib import Path
from typing import Any

import pytest
from conftest import composed
from small_data import refusal_of
from trainer.small import SAMPLES, Net, loader, trainer

import lockstep
from lockstep.arithmetic.layout import resolve
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.config.check import check
from lockstep.config.rules import check_sizes
from lockstep.errors import UserError
from lockstep.job.build import make_trainer
from lockstep.step.gradients import GradientSum
from lockstep.step.hook import StepHook
from lockstep.strategies import DDP
from lockstep.trainer.program import ProgramRun
from lockstep.trainer.run import Run


def refusal(function: Any, *args: Any, **options: Any) -> str:
    line = refusal_of(function, *args, **options)
    return line.replace("True", "true").replace("None", "null").replace("debug.trainer.", "")


def test_a_config_makes_the_trainer_of_programs(tmp_path: Path) -> None:
    assert type(make_trainer(check(composed("logger=none")), tmp_path, [])) is lockstep.Trainer


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (("precision=16-mixed",), {"precision": "16-mixed"}),
        (("precision=bf16-true", "exact=true"), {"precision": "bf16-true", "exact": True}),
        (("precision=bf16-mixed", "exact=portable"), {"precision": "bf16-mixed", "exact": "portable"}),
        (("gradient_clip_algorithm=value",), {"gradient_clip_algorithm": "value"}),
        (("+debug.trainer.benchmark=true", "exact=true"), {"benchmark": True, "exact": True}),
    ],
)
def test_a_config_and_a_trainer_refuse_in_the_same_words(
    tmp_path: Path, overrides: tuple[str, ...], options: dict[str, Any]
) -> None:
    of_config = refusal(lambda: check(composed("accelerator=cpu", *overrides)))
    assert of_config == refusal(trainer, tmp_path, **options)


def test_a_batch_larger_than_the_data_is_refused_in_the_same_words(tmp_path: Path) -> None:
    config = check(composed("batch_size=200", "accelerator=cpu"))
    of_config = refusal(check_sizes, config.strategy, config.layout, SAMPLES)
    assert of_config == refusal(trainer(tmp_path).fit, Net(), loader(batch_size=200))


def test_a_piece_of_one_sample_is_refused_with_the_sizes_that_fit(tmp_path: Path) -> None:
    line = refusal(trainer(tmp_path).fit, Net(), loader(batch_size=131))
    assert "an epoch's last step has 1 of 132 samples" in line
    assert "use batch_size=130 or batch_size=132" in line


class Counted(StepHook):
    """Counts the steps."""

    steps = 0

    def before_step(self, step: Any) -> None:
        self.steps += 1


class Halved(GradientSum):
    """Takes half of the gradient of each piece."""

    def weight(self, *args: Any) -> Any:
        return super().weight(*args) / 2


class Note:
    """Adds a note to each checkpoint."""

    def before_write(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = 7

    def after_write(self) -> None:
        pass


def test_hooks_sums_and_observers_are_arguments(tmp_path: Path) -> None:
    layout = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=24)
    hook = Counted()
    plain, other = Net(), Net()
    other.load_state_dict(plain.state_dict())
    trainer(tmp_path / "plain").fit(plain, loader())
    sums = Halved(DDP().build(layout).strategy, 1)
    parts: dict[str, Any] = {"hooks": [hook], "gradients": sums, "checkpoint_io": AtomicCheckpointIO([Note()])}
    trainer(tmp_path / "parts", **parts).fit(other, loader())
    assert hook.steps == 12
    saved, control = (next((tmp_path / name).rglob("last.ckpt")) for name in ("parts", "plain"))
    assert checkpoint_io.load(saved)["note"] == 7
    assert "note" not in checkpoint_io.load(control)
    assert not plain.net[0].weight.equal(other.net[0].weight)  # type: ignore[operator,arg-type]


def test_a_layout_decides_the_sizes(tmp_path: Path) -> None:
    layout = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=24)
    parts: dict[str, Any] = {"layout": layout, "strategy": DDP(), "seed": 0, "checkpoint_io": AtomicCheckpointIO()}
    with pytest.raises(UserError, match="the config of the layout decides it: leave pieces=2 out"):
        lockstep.Trainer(**parts, pieces=2, default_root_dir=tmp_path)
    with pytest.raises(UserError, match="lacks what a config gives beside it"):
        lockstep.Trainer(layout=layout, default_root_dir=tmp_path)
    assert type(lockstep.Trainer(**parts, default_root_dir=tmp_path).run) is Run
    assert type(trainer(tmp_path).run) is ProgramRun
