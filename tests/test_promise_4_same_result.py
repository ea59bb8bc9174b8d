"""Promise 4, in whole runs: layouts with the same batch_size and pieces end with the same weights and buffers, to the
noise of summation order, and with exact=true to the bit.

Each table is one sweep in one process, since a process costs seconds of imports and a further job one.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NORMS, RANDOM, STRATEGIES, TRAINER_BY_DAY, Program, Run, checkpoint_of, summary_of
from user_runs import train

DROPOUT = "model.dropout=0.3"
TASK = (*RANDOM, "data.samples=100", DROPOUT, "batch_size=36", "pieces=4")  # with a short tail
# The same for a module of user_modules.py, which draws the numbers itself.
SAME_TASK = ("data.samples=100", "precision=32-true", "gradient_clip_val=0.5", "batch_size=36", "pieces=4")
# Adam divides by a gradient's own size, noise included.
PLAIN = ("optimizer=sgd", "lr=0.05", "precision=64-true", "callbacks=default", "callbacks.console=null")


def shas(run: Run) -> list[str]:
    return [summary_of(folder)["weights_sha256"] for folder in run.jobs]


def states(run: Run) -> list[dict[str, torch.Tensor]]:
    return [checkpoint_of(job)["state_dict"] for job in run.jobs]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far the weight or buffer that differs most is away, as a part of its size."""
    assert list(one) == list(other)
    pairs = [(one[name].double(), other[name].double()) for name in one]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-300)) for a, b in pairs)


# --- to the bit -------------------------------------------------------------------------------------------------------


def swept(home: Path, outputs: Path, *overrides: str) -> Run:
    """Return a sweep of the template with its own model, or of a program with `lockstep.Trainer`."""
    if (home / "conf").exists():
        return Program(outputs)(*TASK, "exact=true", *overrides, "-m")
    return train(home, outputs, "Random", *SAME_TASK, "exact=true", *overrides, "-m")


@pytest.fixture(scope="module")
def layouts(either: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return swept(either, tmp_path_factory.mktemp("layouts") / "outputs", "strategy=ddp,dp", "devices=1,3,4")


def test_one_sha256_over_all_layouts(layouts: Run) -> None:
    actual = [summary_of(folder) for folder in layouts.jobs]
    used = {(s["layout"]["strategy"], s["layout"]["devices"]) for s in actual}
    assert used >= {("ddp", 3), ("ddp", 4), ("dp", 3), ("dp", 4)}
    assert {devices for _, devices in used} == {1, 3, 4}
    assert len(set(shas(layouts))) == 1, shas(layouts)
    # and so the same numbers, of validation and test
    for name in ("val/acc", "test/acc", "test/loss"):
        assert len({s["metrics"][name] for s in actual}) == 1, name


@TRAINER_BY_DAY
def test_one_sha256_in_other_precisions(either: Path, layouts: Run, tmp_path: Path) -> None:
    run = swept(either, tmp_path, "precision=bf16-mixed,64-true", "strategy=ddp,dp", "devices=3")
    bf16, also_bf16, double, also_double = shas(run)
    assert bf16 == also_bf16
    assert double == also_double
    assert len({bf16, double, shas(layouts)[0]}) == 3  # the control


@TRAINER_BY_DAY
def test_one_sha256_with_uneven_shares(either: Path, layouts: Run, tmp_path: Path) -> None:
    actual = shas(swept(either, tmp_path, "strategy=ddp,dp", "devices=2", "strategy.shares=[0.8,0.2]"))
    assert len(actual) == 2
    assert {*actual} == {*shas(layouts)}


@pytest.mark.nightly
def test_one_sha256_with_batchnorm(run_train: Program) -> None:
    changes = ("model=small_resnet18", "data.samples=20", "batch_size=16", "max_epochs=1")
    task = [key for key in TASK if key != DROPOUT]
    actual = shas(run_train(*task, *changes, "exact=true", f"strategy={STRATEGIES}", "devices=3", "-m"))
    assert (len(actual), len(set(actual))) == (len(STRATEGIES.split(",")), 1)


def test_one_sha256_with_batchnorm_and_a_last_step_of_one_sample(run_train: Program) -> None:
    """One device could leave the statistics of that step to torch, which does not round them as an exact sum does."""
    task = (*RANDOM, "model=resnet9", "data.samples=17", "data.val_fraction=0", "data.image_size=16", "batch_size=16")
    actual = shas(run_train(*task, "pieces=4", "precision=64-true", "exact=true", "devices=1,2", "-m"))
    assert (len(actual), len(set(actual))) == (2, 1)


# --- to the noise of summation order ----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_every_layout_takes_the_same_steps_and_without_dropout_pieces_are_rounding(run_train: Program) -> None:
    """The controls: the bits, which exact=true makes the same, differ; and with dropout another number of pieces."""
    run = run_train(*TASK, *PLAIN, "strategy=ddp,dp", "devices=1,3", "-m")
    one, *others = states(run)
    assert [distance(other, one) < 1e-10 for other in others] == [True] * 3
    assert len(set(shas(run))) > 1
    again = Program(run_train.outputs / "pieces")(
        *TASK, *PLAIN, "strategy=ddp", "devices=3", "pieces=4,6", "model.dropout=0.3,0", "-m"
    )
    four, six, four_without, six_without = states(again)
    assert distance(four, one) < 1e-10
    assert distance(four_without, six_without) < 1e-10
    assert distance(six, four) > 1e-4


# --- what a run can be told beside its layout -------------------------------------------------------------------------

ROWS = {
    "ema": ("callbacks=ema", "callbacks.ema.decay=0.6"),  # small enough to take effect
    "class_weights": ("model.class_weights=balanced",),
    "plateau": (  # so large a threshold that no loss counts as an improvement
        *("scheduler=plateau", "scheduler.patience=0", "+scheduler.threshold=1e9", "+scheduler.threshold_mode=abs"),
    ),
    "mixup": ("data.mix=mixup",),
    "cutmix": ("data.mix=cutmix",),
    "trivial_augment": ("data.transforms.train=[{_target_: torchvision.transforms.v2.TrivialAugmentWide}]",),
    "random_erasing": ("data.transforms.train=[{_target_: torchvision.transforms.v2.RandomErasing, p: 0.9}]",),
    "balanced_sampling": ("data.sampling=balanced",),
    "folds": ("data.folds=5", "data.fold=1"),
    "frozen": ("model.freeze=[net.conv1.*]",),
}
TOGETHER = [
    ("ema", "class_weights", "plateau", "trivial_augment"),
    ("mixup", "random_erasing", "frozen", "balanced_sampling"),
    ("cutmix", "folds"),
]
FEATURED = (*NORMS, "accelerator=cpu", "pieces=4", "checkpoint_every=3", "exact=true")


def featured(names: tuple[str, ...], without: str = "") -> list[str]:
    epochs = 4 if "plateau" in names else 2  # it is one after some of them
    rows = chain.from_iterable(ROWS[name] for name in names if name != without)
    return [*FEATURED, f"max_epochs={epochs}", *rows]


@pytest.mark.parametrize(
    "names", [*(pytest.param(names, marks=pytest.mark.nightly) for names in TOGETHER[:2]), TOGETHER[2]], ids="+".join
)
def test_one_sha256_on_all_layouts_and_after_a_kill(names: tuple[str, ...], run_train: Program, tmp_path: Path) -> None:
    run = run_train(*featured(names), "strategy=ddp,dp", "devices=1,3", "-m")  # others have none
    actual = [summary_of(folder) for folder in run.jobs]
    (sha,) = {summary["weights_sha256"] for summary in actual}
    assert len({summary["metrics"]["val/loss"] for summary in actual}) == 1
    losses = [summary["metrics"]["train/loss"] for summary in actual]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)

    program = Program(tmp_path / "struck")
    process = program.start(*featured(names), "strategy=ddp", "devices=3")
    folder = program.wait_for_checkpoint(process)  # after step 3 of 6 in an epoch
    program.kill(process)
    resumed = program(f"resume={folder}", "strategy=dp", "devices=2")
    assert "resumes after step" in resumed.stderr + resumed.stdout
    assert resumed.summary["weights_sha256"] == sha

    for name in names:  # the controls: each has a part in these bits
        without = Program(tmp_path / name)(*featured(names, name), "callbacks.console=null")
        assert without.summary["weights_sha256"] != sha, name
