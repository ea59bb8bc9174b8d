"""`strategy=pipeline`: a network over several devices takes the steps of one device, to the bit."""

from pathlib import Path

import pytest
import torch
from conftest import RANDOM, Program, summary_of
from refusals import refused_with
from small_data import small_cnn
from torch import nn
from user_runs import go_on, jobs, must_refuse, same_bits, train

from lockstep.arithmetic.exact_sum import ExactSum
from lockstep.arithmetic.layout import resolve
from lockstep.errors import UserError
from lockstep.step.network_parts import parts_of
from lockstep_extras.pipeline.strategy import balanced, stage_starts

# 69 samples to train on: in each epoch's last step, 5 for 8 pieces.
TASK = (*RANDOM, "data.samples=86", "model.dropout=0.3", "batch_size=32", "pieces=8")
ONE = ("strategy=ddp", "devices=1")
PIPELINE = ("strategy=pipeline", "devices=2")


def results_of(outputs: Path, *overrides: str) -> list[tuple[str, float, int]]:
    """Return the weights' hash and the test's metrics of each run of a sweep."""
    run = Program(outputs)(*overrides, "-m")
    summaries = [summary_of(folder) for folder in run.jobs]
    return [(s["weights_sha256"], s["metrics"]["test/loss"], s["metrics"]["test/correct"]) for s in summaries]


@pytest.mark.usefixtures("processes")
def test_the_bits_of_one_device(tmp_path: Path) -> None:
    """With exact sums, and without: backward passes come in the order of the pieces."""
    one = results_of(tmp_path / "one", *TASK, *ONE, "pieces=8,4", "exact=true,false")
    assert len(set(one)) == 4, "the control: other sums and other pieces are seen"
    cut = ("strategy=pipeline", "devices=2,3")
    assert results_of(tmp_path / "exact", *TASK, *cut, "exact=true") == [one[0]] * 2
    assert results_of(tmp_path / "plain", *TASK, *cut, "exact=false") == [one[1]] * 2


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_the_bits_of_one_device_in_other_precisions(tmp_path: Path) -> None:
    task = (*TASK, "model=small_cnn", "max_epochs=1", "exact=true", "precision=bf16-mixed,64-true")
    one = results_of(tmp_path / "one", *task, *ONE)
    split = "strategy.split=[relu1,pool]"  # of which the first changes what it is given
    assert results_of(tmp_path / "cut", *task, "strategy=pipeline", "devices=3", split) == one
    assert len(set(one)) == 2


@pytest.mark.nightly
def test_custom_modules_train_and_log_as_on_one_device(project: Path, tmp_path: Path) -> None:
    """Of two parts that drop, the second one draws on; a gradient that is not finite in one stage is skipped by all;
    each sample is counted once."""
    names, task = ("Drops", "Overflows", "Counts"), ("nonfinite=skip", "max_epochs=1")
    one = jobs(project, tmp_path / "one", ",mine.".join(names), *task)
    cut = jobs(project, tmp_path / "cut", ",mine.".join(names), *task, "strategy.split=[3]", *PIPELINE)
    for name, *pair in zip(names, one, cut, strict=True):
        assert same_bits(*pair), name
        assert pair[0].summary["metrics"] == pytest.approx(pair[1].summary["metrics"], rel=1e-12)
        skipped = ["net.1.weight" in (run.folder / "train.log").read_text() for run in pair]
        assert skipped == [name == "Overflows"] * 2


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_it_goes_on_where_another_layout_stopped(tmp_path: Path) -> None:
    shown = ("callbacks=default", "callbacks.console=null", "callbacks.dashboard=null")
    keep = (*shown, "scheduler=constant", "exact=true")
    one = Program(tmp_path / "one")(*TASK, *keep, *ONE).summary
    program = Program(tmp_path / "chain")
    run = program(*TASK, *keep, *ONE, "max_steps=2")
    for layout in (("strategy=pipeline", "devices=3", "max_steps=4"), ("strategy=ddp", "devices=2", "max_epochs=2")):
        run = program(f"resume={run.folder}", *layout)
    assert run.summary["weights_sha256"] == one["weights_sha256"]
    mean = run.summary["metrics"]["train/loss"]  # of an epoch of which the stages made the first step
    assert mean == pytest.approx(one["metrics"]["train/loss"], rel=1e-6)
    task = (f"checkpoint={run.folder}", "exact=true", "batch_size=12", "accelerator=cpu", "pieces=4")
    metrics = [
        Program(tmp_path / layout[0][9:], "src/evaluate.py")(*task, *layout).summary["metrics"]
        for layout in (ONE, PIPELINE)
    ]
    assert metrics[0] == metrics[1]
    assert metrics[0]["test/count"] == 17


@pytest.mark.usefixtures("processes")
def test_a_network_that_gives_nan_is_cut_too(tmp_path: Path) -> None:
    """Before a run it is asked whether its parts give what it does: both give nan."""
    lost = Program(tmp_path / "lost")(*TASK, "callbacks=default", "lr=1e30", "nonfinite=skip", "max_steps=6")
    assert lost.summary["metrics"]["test/loss"] is None
    test = Program(tmp_path / "tested", "src/evaluate.py")
    evaluated = test(f"checkpoint={lost.folder}", "strategy=auto,pipeline", "devices=2", "pieces=8", "-m").jobs
    counts = [summary_of(folder)["metrics"]["test/correct"] for folder in evaluated]
    assert counts == [lost.summary["metrics"]["test/correct"]] * 2


@pytest.mark.nightly
def test_requested_to_end_it_saves_and_goes_on(project: Path, tmp_path: Path) -> None:
    task = ("checkpoint_every=5", "max_epochs=12")
    whole = train(project, tmp_path / "whole", "Cut", *task)
    cut = train(project, tmp_path / "cut", "Cut", *task, *PIPELINE, cut="SIGTERM", ok=False)
    assert cut.returncode == 143, str(cut)
    assert 7 <= cut.summary["steps"] < 48
    assert same_bits(go_on(project, cut), whole)


def test_a_device_holds_its_stage_alone(project: Path, tmp_path: Path) -> None:
    holds = ("+callbacks.holds._target_=mine.Holds", "max_steps=2")
    one, cut = (
        train(project, tmp_path / n, "LitDigits", *holds, *layout) for n, layout in (("1", ()), ("2", PIPELINE))
    )
    (whole,) = (int(path.read_text()) for path in one.folder.glob("held_*"))
    parts = [int((cut.folder / f"held_{rank}").read_text()) for rank in (0, 1)]
    assert whole == 2 * 8 * (12 * 12 * 16 + 16 + 16 * 3 + 3)  # weights and momentum, float64
    assert sum(parts) == whole + 4 * 8  # each parameter is one element where it is not held
    assert min(parts) > 2 * 8 * 16 * 3


# --- the cut ----------------------------------------------------------------------------------------------------------


def test_the_slowest_stage_takes_the_least_time() -> None:
    assert balanced([1, 1, 1, 1, 4], 2) == [4]
    assert balanced([3, 1, 1, 1, 3], 3) == [1, 4]
    assert balanced([5, 0, 0], 3) == [1, 2]


def test_the_user_defines_where_stages_begin() -> None:
    module = small_cnn()
    parts = parts_of(module)
    assert stage_starts(module, parts, (2, "pool"), 3) == [2, 4]
    for split, wrong in (
        (("pol",), "there is no part pol; known: 0 to 9, or conv1, relu1, "),
        ((0,), "must name the first part of each later stage, 1 in all"),
        ((2, 4), "must name the first part of each later stage, 1 in all"),
    ):
        with pytest.raises(UserError, match=wrong):
            stage_starts(module, parts, split, 2)


def test_all_pieces_pass_all_stages() -> None:
    layout = resolve(
        strategy="pipeline",
        weights="staged",
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        batch_size=48,
        accumulate_grad_batches=2,
    )
    assert (layout.pieces, layout.world_size, layout.replicas, layout.accumulate) == (8, 4, 1, 2)
    assert layout.micro_batches(3) == [(3, piece) for piece in range(8)]
    assert layout.describe() == "step 48 samples = 8 pieces x 6 on 4 stages (27% idle) of 2 nodes"


def test_exact_sums_of_stages_are_those_of_the_whole() -> None:
    """Also where one stage's gradients outgrow their grid, and where they shrink below it."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 300), nn.Linear(300, 2))
    like, cut = [p.detach() for p in module.parameters()], [0, 0, 1, 1, 2, 2]
    torch.manual_seed(0)
    whole = ExactSum(like, segment_ids=cut)
    stages = [ExactSum(like, segment_ids=cut, summed_here=[n == stage for n in cut]) for stage in range(3)]
    for scale in (1.0, 1e6, 1e-9):
        addends = [[torch.randn_like(p) * (scale if at < 2 else 1) for at, p in enumerate(like)] for _ in range(4)]
        for number, total in enumerate((whole, *stages)):
            total.begin()
            for addend in addends:
                total.add([g if number in (0, n + 1) else None for g, n in zip(addend, cut, strict=True)])
        sums = [total.total() for total in (whole, *stages)]
        for at, n in enumerate(cut):
            assert torch.equal(sums[0][at], sums[1 + n][at])
            assert sums[1 + (n + 1) % 3][at] is like[at]
    assert [len(total.local_groups) for total in (whole, *stages)] == [3, 1, 1, 1]


@pytest.mark.nightly
def test_what_a_step_can_not_do_is_refused(project: Path, tmp_path: Path) -> None:
    message = {
        "Views": "training_step must call forward() once only",
        "Past": "training_step called no self(x): it must call self(x)",
        "Penalty": "training_step uses net.1.bias, which is on another device: ",
        "Spare": "Spare can't be cut into stages: it needs an nn.Sequential as its only",
        "Disorder": "the parts of Disorder in order don't give the result of its forward()",
    }
    must_refuse(project, tmp_path, PIPELINE, message)


def test_an_average_of_weights_needs_the_whole_network(run_train: Program) -> None:
    run = run_train(*TASK, *PIPELINE, "callbacks=[default,ema]", ok=False)
    assert run.returncode == 2
    assert "needs the whole network on each device" in run.stderr


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_cores_no_gpu")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("strategy=pipeline", "strategy=pipeline and devices=1 don't go together: a stage needs a device.*devices=2"),
        ("strategy=pipeline devices=3 pieces=2", "pieces=2 is fewer than 3 devices: use pieces=3"),
        ("strategy=pipeline devices=2 compile=true", "compile=true.*don't go together.*strategy=ddp"),
        ("strategy=pipeline devices=2 +strategy.shares=[2,1]", "strategy.shares: Pipeline takes no such option"),
        (
            "strategy=pipeline devices=2 +strategy.compression=bf16",
            "strategy.compression: Pipeline takes no such option",
        ),
        ("strategy=pipeline devices=2 elastic=true", "elastic=true and strategy=pipeline don't"),
        (
            "strategy=pipeline devices=2 exact=true survive=true",
            "survive=true and strategy=pipeline don't .*only with ddp",
        ),
        ("strategy=pipeline devices=2 strategy.split=3", "strategy.split=3: must be"),
    ],
)
def test_refused_in_one_line(overrides: str, message: str) -> None:
    refused_with(overrides, message)


@pytest.mark.usefixtures("two_gpus")
def test_a_loss_scale_is_refused() -> None:
    refused_with("strategy=pipeline devices=2 precision=16-mixed", "strategy=pipeline and precision=16-mixed")
