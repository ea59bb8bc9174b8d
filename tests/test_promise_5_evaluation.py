"""Promise 5: every sample counts once in evaluation; metrics don't depend on who evaluated what, in which order."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import STRATEGIES, TRAINER_BY_DAY, Program, summary_of
from event_files import Board
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from user_runs import DDP, jobs, train

from lockstep import Count, ExactMean


def evaluated(chunks: list[Tensor]) -> tuple[ExactMean, Count]:
    mean, total = ExactMean(), Count()
    for chunk in chunks:
        mean.update(chunk)
        total.update(chunk > 1)
    return mean, total


@given(seed=st.integers(0, 10**6), n=st.integers(1, 60), scale=st.floats(-8, 8))
def test_any_order_any_chunks_any_devices_same_numbers(seed: int, n: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.exponential(10.0**scale, n))
    mean, total = (metric.compute() for metric in evaluated([values]))

    order = torch.from_numpy(rng.permutation(n))
    cuts = sorted(rng.integers(0, n + 1, 5).tolist())
    chunks = [values[order[a:b]] for a, b in zip([0, *cuts], [*cuts, n], strict=True) if a < b]
    for whole, other in zip(evaluated(chunks[:2]), evaluated(chunks[2:]), strict=True):
        merged = copy.deepcopy(whole)
        merged.merge_state(other)  # what torchmetrics makes of several devices
        assert merged.compute() == (mean if isinstance(whole, ExactMean) else total)

    assert float(mean) == pytest.approx(math.fsum(values.tolist()) / n, abs=2.0**-33, rel=1e-15)
    assert int(total) == sum(value > 1 for value in values.tolist())


def test_the_sum_forgets_no_small_one() -> None:
    """Added up in floats, in either precision, the small ones would be lost beside the large one."""
    mean = ExactMean()
    mean.update(torch.tensor([2.0**36] + [2.0**-20] * 64, dtype=torch.float64))
    assert float(mean.compute()) == (2**36 * 2**20 + 64) / (65 * 2**20)


@pytest.mark.filterwarnings("ignore:.*compute.*before.*update:UserWarning")
def test_broken_values_and_none_are_no_number() -> None:
    for bad in (math.nan, math.inf, -math.inf, 1e30):
        assert evaluated([torch.tensor([0.5, bad])])[0].compute().isnan()
    mean, total = evaluated([])
    assert mean.compute().isnan()
    assert total.compute() == 0


def test_evaluation_is_the_same_on_any_layout(run_train: Program, tmp_path: Path) -> None:
    """Also where the test set (3 images of the 7 x 1 training images) is smaller than the devices are many. The worst
    mistakes are the same images in the same order."""
    tiny = ("data=synthetic", "data.image_size=12", "data.num_classes=3", "batch_size=32", "threads=1", "logger=none")
    trained = run_train(*tiny, "data.samples=205", "max_epochs=2")
    evaluate = Program(tmp_path / "evaluated", "src/evaluate.py")
    shown = ("pieces=6", "logger=tensorboard")
    run = evaluate(f"checkpoint={trained.folder}", "devices=1,5", "++data.samples=205,7", "batch_size=30", *shown, "-m")
    drawn = []
    for first, count in ((0, 41), (1, 3)):
        actual = [summary_of(job) for job in run.jobs[first::2]]
        assert [summary["layout"]["devices"] for summary in actual] == [1, 5]
        assert {summary["status"] for summary in actual} == {"completed"}
        assert {summary["metrics"]["test/count"] for summary in actual} == {count}
        assert len({summary["metrics"]["test/correct"] for summary in actual}) == 1
        losses = [summary["metrics"]["test/loss"] for summary in actual]
        assert losses == pytest.approx([losses[0]] * 2, rel=1e-6)
        boards = [Board(next((job / "tensorboard").iterdir())) for job in run.jobs[first::2]]
        one, several = ({tag: board.image(tag).tobytes() for tag in board.tags["images"]} for board in boards)
        assert one == several
        drawn.append(one["wrong/test_mistakes"])
    assert drawn[0] != drawn[1], "the control"
    tested = trained.summary["tested_step"]
    assert {summary_of(job)["tested_step"] for job in run.jobs} == {tested}
    assert f"test (best.ckpt by val/acc, step {tested})" in trained.stderr
    assert f"test (best.ckpt, step {tested})" in run.stderr
    metrics, expected = summary_of(run.jobs[0])["metrics"], trained.summary["metrics"]
    assert metrics["test/correct"] == expected["test/correct"]
    assert metrics["test/loss"] == pytest.approx(expected["test/loss"], rel=1e-6)


@pytest.mark.nightly
def test_what_a_module_logs_by_itself_counts_every_sample_once(either: Path, tmp_path: Path) -> None:
    """Also of ranks with unequal parts, or with none; what no reduction makes right is named on the console, once."""
    best = ("callbacks.checkpoint.monitor=val/plain", "callbacks.checkpoint.mode=max")
    few = ("data.val_fraction=0.03", "hang_timeout=60", *best)  # three samples
    template = (either / "conf").exists()
    strategies = STRATEGIES if template else "ddp,dp,fsdp"  # the pipeline is of a config
    runs = jobs(either, tmp_path / "several", "Logs", *few, f"strategy={strategies}", "devices=2")
    swept = train(either, tmp_path / "ranks", "Logs", *few, "devices=1,3,4", "-m")
    one, *others = [summary_of(job)["metrics"] for job in swept.jobs]
    others += [run.summary["metrics"] for run in runs]
    varied = {"test/own_mean", "train_loss"}  # the latter is the last piece's of rank zero
    assert {"val/worst", "test/synced_epoch"} <= one.keys()
    assert not template or {"val/rare", "test/synced"} <= one.keys()  # its batches are smaller
    for metrics in others:
        assert metrics.keys() == one.keys()
        for name in one.keys() - varied:
            assert metrics[name] == pytest.approx(one[name], rel=1e-9), name
    for stage, count in (("val", 3), ("test", 18)):
        assert one[f"{stage}/plain"] == one[f"{stage}/synced_epoch"] == pytest.approx(one[f"{stage}/acc"], rel=1e-6)
        assert one[f"{stage}/right"] == pytest.approx(count * one[f"{stage}/plain"], rel=1e-6)
        assert one[f"{stage}/best"] < one[f"{stage}/loss"] == one[f"{stage}/sized"] < one[f"{stage}/worst"]
    assert (one["test/constant"], one["test/samples"]) == (3.0, 18.0)
    output = "test/own_mean, logged in on_test_epoch_end, differs between ranks"
    assert [line for line in swept.stderr.splitlines() if "differs between ranks" in line and output not in line] == []
    # The template's four ranks have 6 and 3 samples. In the other program, a batch of the loader has all.
    assert swept.stderr.count(output) == template


@TRAINER_BY_DAY
def test_random_numbers_in_an_evaluation_are_the_same_on_any_layout(either: Path, tmp_path: Path) -> None:
    task = ("data.val_fraction=0.3", "pieces=6", "exact=true", "max_steps=2", "seed=7")
    alone, several = (train(either, tmp_path / str(len(on)), "NoisyScore", *task, *on) for on in ((), DDP))
    names = ("val/acc", "val/noise")
    one, other = ([run.summary["metrics"][name] for name in names] for run in (alone, several))
    assert one == pytest.approx(other, rel=1e-6)
    control = train(either, tmp_path / "control", "NoisyScore", *task, "seed=8").summary["metrics"]
    assert control["val/noise"] != pytest.approx(one[1], rel=1e-3)
