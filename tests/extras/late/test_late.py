"""Which gradient meets which weights follows from the step alone.

A user's own LightningModule is compared with loops in plain torch, and layouts with each other, to the bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, checkpoint_of, summary_of
from plain import QUIET
from refusals import refused_with
from step.test_loop import BATCH, Net, splits
from user_runs import DATA, DDP, DP, Replica, batches, go_on, same_as, same_bits, train

from lockstep.arithmetic.layout import resolve
from lockstep.data import StepData
from lockstep.errors import NonFinite
from lockstep.lightning.trainer import StepTrainer
from lockstep.report.summary import weights_sha256
from lockstep.step import gradients
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import ExactGradientSum, GradientSum
from lockstep.step.strategy import proxy
from lockstep.strategies import Strategy
from lockstep_extras.late.sum import ApplyRemaining, LatePasses, late_sum


def late_by(steps: int) -> tuple[str, str]:
    return "extras=[late]", f"extras.late.steps={steps}"


# --- late -------------------------------------------------------------------------------------------------------------


def by_hand(late: int, left_out: int = 0, steps: int = 8) -> torch.nn.Module:
    """Return the loop that a run with late gradients must be; with the last `left_out` not applied."""
    replica, line = Replica(), []
    for x, y in batches(int(DATA["samples"]))[:steps]:
        line.append(replica.gradient(x, y))
        if len(line) > late:
            replica.apply(line.pop(0))
    for gradient in line[: len(line) - left_out]:
        replica.apply(gradient)
    return replica.net


@pytest.mark.parametrize("late", [1, 3])
def test_a_plain_loop(project: Path, tmp_path: Path, late: int) -> None:
    run = train(project, tmp_path, "LitDigits", "lr=0.1", *late_by(late), *DDP)
    assert same_as(run.folder, by_hand(late))
    assert run.summary["steps"] == 8
    controls = [by_hand(other) for other in (0, 1, 3) if other != late] + [by_hand(late, left_out=1)]
    assert not any(same_as(run.folder, control) for control in controls)


def test_the_last_ones_are_applied_when_somebody_stops_a_run_early(project: Path, tmp_path: Path) -> None:
    """After the first epoch; the best checkpoint keeps the weights that were validated."""
    stop = (
        "_target_=lightning.pytorch.callbacks.EarlyStopping",
        "monitor=val/acc",
        "mode=max",
        "stopping_threshold=-1.0",
    )
    options = [f"+callbacks.stop.{option}" for option in stop]
    run = train(project, tmp_path, "LitDigits", "lr=0.1", *late_by(2), *options)
    assert run.summary["steps"] == 4
    assert "ended early, after step 4 of 8: Stopping threshold reached" in run.stderr
    assert same_as(run.folder, by_hand(2, steps=4))
    assert same_as(run.folder, by_hand(2, left_out=2, steps=4), "best")
    assert not same_as(run.folder, by_hand(2, left_out=1, steps=4))
    state = checkpoint_of(run.folder)["state_dict"]
    assert run.summary["weights_sha256"] == weights_sha256(state)


@pytest.mark.parametrize("exact", ["true", pytest.param("false", marks=pytest.mark.nightly)])
def test_killed_it_goes_on_with_the_gradients_under_way(project: Path, tmp_path: Path, exact: str) -> None:
    task = ("checkpoint_every=5", *late_by(2), f"exact={exact}")
    undisturbed = train(project, tmp_path / "undisturbed", "Cut", *task, *DDP)
    cut = train(project, tmp_path / "cut", "Cut", *task, *DDP, cut="SIGKILL", ok=False)
    (last,) = (tmp_path / "cut").rglob("last.ckpt")
    loops = torch.load(last, weights_only=True)["loops"]["fit_loop"]["epoch_loop.state_dict"]
    assert [taken["step"] for taken in loops["gradients"]["waiting"]] == [3, 4]
    if exact == "true":
        refused = go_on(project, cut, "extras.late.steps=1", ok=False)
        assert refused.returncode == 2
        assert "extras.late.steps=1: " in refused.stderr
        assert "holds 2 late gradients: use extras.late.steps=2 or more" in refused.stderr
    resumed = go_on(project, cut, *(DP if exact == "true" else DDP))
    assert same_bits(resumed, undisturbed)


# --- the order of things, without processes ---------------------------------------------------------------------------


class Work:
    def __init__(self, events: list[str], number: int) -> None:
        self.events, self.number = events, number

    def wait(self) -> None:
        self.events.append(f"waited for {self.number}")


class Reports(Net):
    """Record when the passes of a step begin; in one step, by its number, the loss is not finite."""

    def __init__(self, events: list[str], broken: int = -1) -> None:
        super().__init__()
        self.events, self.broken = events, broken

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.events.append(f"passes {self.trainer.global_step}")
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.global_step == self.broken else loss


def fit(tmp_path: Path, module: Net, kind: type[GradientSum], late: int, world_size: int = 1, **options: Any) -> Any:
    """Take four steps as rank zero of so many: each exchange of sums returns its own."""
    on: dict[str, Any] = {"strategy": "single", "accelerator": "cpu", "devices": 1, "num_nodes": 1}
    layout = resolve(**on, batch_size=BATCH, pieces=2, exact=kind is ExactGradientSum)
    strategy = Strategy().build(layout).strategy
    options = QUIET | {"max_steps": 4, "limit_val_batches": 0, "default_root_dir": tmp_path, **options}
    gradients: GradientSum = kind(strategy, world_size)
    if late:
        gradients = late_sum(gradients, late)
        options["callbacks"] = [ApplyRemaining()]
    trainer = StepTrainer(gradients, [FiniteGradientCheck("stop")], 3, **options)
    if late:
        loop: Any = trainer.fit_loop.epoch_loop
        loop.passes = proxy(loop.passes, LatePasses)
    trainer.fit(module, datamodule=StepData(splits(), layout, seed=3, num_workers=0))
    return trainer


@pytest.mark.parametrize("kind", [GradientSum, ExactGradientSum])
def test_a_sum_is_waited_for_after_the_next_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[GradientSum]
) -> None:
    events: list[str] = []

    def all_reduce(tensor: torch.Tensor, op: Any = None, async_op: bool = False) -> Any:
        if not async_op:  # of an exact sum's first grids
            return None
        sent = sum(event.startswith("sent") for event in events)
        events.append(f"sent {sent}")
        return Work(events, sent)

    def happened(late: int) -> list[str]:
        events.clear()
        fit(tmp_path, Reports(events), kind, late, world_size=2)
        return [event for event, before in zip(events, ["", *events], strict=False) if event != before]  # two pieces

    monkeypatch.setattr(gradients.dist, "all_reduce", all_reduce)
    assert happened(late=0) == [f"passes {step}" for step in range(4)], "the control: no sum runs on"
    first = ["passes 0", "sent 0", "waited for 0", "passes 1"]  # exact: the next sums need its grid
    if kind is GradientSum:
        first = ["passes 0", "sent 0", "passes 1", "waited for 0"]
    middle = ["sent 1", "passes 2", "waited for 1", "sent 2", "passes 3", "waited for 2", "sent 3"]
    assert happened(late=1) == [*first, *middle, "waited for 3"]


def test_a_late_gradient_that_is_not_finite_has_its_step_and_no_checkpoint(tmp_path: Path) -> None:
    events: list[str] = []
    output = r"step 2: the gradient is not finite.*, nor is the loss of the step's samples"
    with pytest.raises(NonFinite, match=output):
        fit(tmp_path, Reports(events, broken=1), GradientSum, late=2)
    assert events[-1] == "passes 3"

    class Saves(Reports):
        def on_train_batch_end(self, *args: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / f"{self.trainer.global_step}.ckpt")

    with pytest.raises(NonFinite, match=output):
        fit(tmp_path, Saves(events, broken=1), GradientSum, late=2)
    assert events[-1] == "passes 1"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["1.ckpt"]


def test_what_waits_is_applied_and_saved_where_nothing_is_left_to_train(project: Path, tmp_path: Path) -> None:
    """And a run goes on without the extra, although options of it were given before."""
    options = ("checkpoint_every=1", "checkpoint_keep=-1", *late_by(2), "callbacks=[default,ema]")
    run = train(project, tmp_path / "whole", "LitDigits", "lr=0.1", *options, "max_steps=5")
    last = run.folder / "checkpoints" / "step_3.ckpt"
    back = Program(run.folder.parent, home=project)(f"resume={last}", "max_steps=3")
    state = checkpoint_of(run.folder)
    assert not state["loops"]["fit_loop"]["epoch_loop.state_dict"]["gradients"]["waiting"]
    plain = {name: state["current_model_state"][name] for name in state["current_model_state"]}
    assert any(not torch.equal(value, state["state_dict"][name]) for name, value in plain.items()), "not the average"
    assert summary_of(run.folder)["steps"] == 3, str(back)
    without = go_on(project, run, "extras=none", "max_steps=4")
    assert without.summary["steps"] == 4


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_cores_no_gpu")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("extras=[late] nonfinite=skip", "extras.late.steps=1 and nonfinite=skip .*later steps depend on"),
        (
            "extras=[late] devices=2 strategy.compression=bf16",
            "extras.late.steps=1 and strategy.compression=bf16 .*it does not send late gradients",
        ),
        ("extras=[late] strategy=fsdp devices=2", "late.* and strategy=fsdp .*no whole gradient.*strategy=ddp"),
        ("extras=[late] exact=true devices=2 survive=true", r"survive=true and extras=\[late\] .*no checkpoint has"),
        ("extras=[late] extras.late.steps=0", "extras.late.steps=0: must be 1 or more"),
    ],
)
def test_refused_in_one_line(overrides: str, message: str) -> None:
    refused_with(overrides, message)


@pytest.mark.usefixtures("two_gpus")
def test_a_loss_scale_is_refused() -> None:
    message = "late.steps=2 and precision=16-mixed .*all steps share its loss scale; bf16-mixed"
    refused_with("extras=[late] extras.late.steps=2 precision=16-mixed", message)
