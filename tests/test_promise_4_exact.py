"""Promise 4, in whole runs: with exact=true, layouts with the same batch_size and pieces end with the same bits."""

from __future__ import annotations

import pytest
from conftest import Program, Run, apart, summary_of

# Everything that is random or keeps a state: augmentation, dropout, AdamW, clipping; two epochs with a short tail.
DROPOUT = "model.dropout=0.3"
TASK = (
    "data=synthetic",
    "data.samples=100",
    "data.image_size=14",
    "data.num_classes=3",
    "data.augment={crop:2,flip:true,fill:zero}",
    DROPOUT,
    "optimizer=adamw",
    "lr=0.003",
    "gradient_clip_val=0.5",
    "accelerator=cpu",
    "batch_size=32",
    "pieces=8",
    "max_epochs=2",
    "callbacks=none",
    "logger=none",
)


def shas(run: Run) -> list[str]:
    return [summary_of(folder)["weights_sha256"] for folder in run.jobs]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Run:
    program = Program(tmp_path_factory.mktemp("layouts") / "outputs")
    return program(*TASK, "exact=true", "strategy=ddp,dp", "devices=1,3,8", "-m")


def test_one_sha256_over_all_layouts(layouts: Run) -> None:
    found = [summary_of(folder) for folder in layouts.jobs]
    assert len({(s["layout"]["strategy"], s["layout"]["devices"]) for s in found}) == 6
    assert {s["layout"]["accumulate_grad_batches"] for s in found} == {8, 3, 1}
    assert len(set(shas(layouts))) == 1, shas(layouts)
    # and so the same numbers: of the validation too, and of 20 test samples on 8 devices
    assert len({(s["metrics"]["test/correct"], s["metrics"]["test/count"]) for s in found}) == 1
    for name in ("val/loss", "test/loss"):
        assert len({s["metrics"][name] for s in found}) == 1, name


def test_one_sha256_in_other_precisions(layouts: Run, run_train: Program) -> None:
    run = run_train(*TASK, "exact=true", "precision=bf16-mixed,64-true", "strategy=ddp,dp", "devices=3", "-m")
    bf16, also_bf16, double, also_double = shas(run)
    assert bf16 == also_bf16
    assert double == also_double
    assert len({bf16, double, shas(layouts)[0]}) == 3  # the control


def test_one_sha256_with_uneven_shares(layouts: Run, run_train: Program) -> None:
    found = shas(run_train(*TASK, "exact=true", "strategy=ddp,dp", "devices=2", "strategy.shares=[0.8,0.2]", "-m"))
    assert len(found) == 2
    assert {*found} == {*shas(layouts)}


@pytest.mark.slow
def test_one_sha256_with_batchnorm(run_train: Program) -> None:
    changes = ("model=resnet18", "data.samples=20", "batch_size=16", "max_epochs=1", "pieces=4")
    task = [key for key in TASK if key != DROPOUT]
    run = run_train(*task, *changes, "exact=true", "strategy=ddp,dp", "devices=3", "-m")
    assert len(shas(run)) == 2
    assert len(set(shas(run))) == 1


def test_without_exact_the_bits_differ_and_the_weights_agree_to_rounding(run_train: Program) -> None:
    """The control of the tests above: they compare what does differ, where nothing is done about it."""
    keep = ("callbacks=default", "callbacks.console=null", "callbacks.dashboard=null")
    plain = ("optimizer=sgd", "lr=0.05")  # Adam divides by a gradient's own size, noise included
    run = run_train(*TASK, *keep, *plain, "strategy=ddp", "devices=1,3", "-m")
    assert len(set(shas(run))) > 1
    first, *others = (Run(0, "", "", folder) for folder in run.jobs)
    assert all(apart(other, first) < 1e-5 for other in others)
