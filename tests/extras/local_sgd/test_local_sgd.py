"""Weights that are averaged every few steps, compared with a loop in plain torch."""

from pathlib import Path

import pytest
import torch
from conftest import RANDOM, Program
from refusals import refused_with
from user_runs import DDP, Replica, batches, same_as, train

# A tail of one sample, so that ranks have none.
TASK = (*RANDOM, "model=fast_cnn", "data.samples=55", "data.image_size=19", "batch_size=24", "pieces=6")


SAMPLES = 107  # 96 are trained on: no tail, else ranks would differ in samples


def local_sgd(every: int) -> torch.nn.Module:
    """Train two replicas, each on its half of every step; averaged every so many steps, and before an epoch's
    validation."""
    replicas = [Replica(), Replica()]
    steps = batches(SAMPLES)
    for number, (x, y) in enumerate(steps, 1):
        for replica, half in zip(replicas, (slice(0, 12), slice(12, 24)), strict=True):
            replica.apply(replica.gradient(x[half], y[half]))
        if number % every == 0 or number % (len(steps) // 2) == 0:
            with torch.no_grad():
                for one, other in zip(*(replica.net.parameters() for replica in replicas), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    return replicas[0].net


def test_weights_are_averaged_as_a_plain_loop_does(project: Path, tmp_path: Path) -> None:
    task = (f"data.samples={SAMPLES}", "lr=0.1", *DDP)
    run = train(project, tmp_path / "2", "LitDigits", *task, "extras=[local_sgd]", "extras.local_sgd.every=2")
    assert same_as(run.folder, local_sgd(2))
    assert not same_as(run.folder, local_sgd(1))
    summed = train(project, tmp_path / "summed", "LitDigits", *task)
    assert same_as(summed.folder, local_sgd(1)), "at every step, it is the mean of the gradients"
    assert (
        "weights are averaged every 2 steps, so the result depends on the number of devices" in run.stderr + run.stdout
    )


def test_averages_of_three_of_which_one_has_no_sample(run_train: Program) -> None:
    """A checkpoint compares the weights of all ranks, and fails where they differ."""
    task = [key for key in TASK if key not in ("exact=true", "callbacks=none")]
    changes = (
        "checkpoint_every=2",
        "strategy=ddp",
        "devices=3",
        "extras=[local_sgd]",
        "extras.local_sgd.every=5",
        "callbacks.console=null",
    )
    assert run_train(*task, *changes).summary["status"] == "completed"


def test_an_average_of_each_process_is_refused(run_train: Program) -> None:
    run = run_train(*TASK, "strategy=ddp", "devices=2", "extras=[local_sgd]", "callbacks=[default,ema]", ok=False)
    assert run.returncode == 2
    assert "EMA: with extras.local_sgd.every=8 each device" in run.stderr


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_cores_no_gpu")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("extras=[local_sgd] extras.local_sgd.every=2", "extras.local_sgd.every=2 and strategy=single .*strategy=ddp"),
        ("extras=[local_sgd] devices=2 exact=true", "local_sgd.every=8 and exact=true .*depends on the number of dev"),
        (
            "extras=[local_sgd] devices=2 strategy.compression=bf16",
            "local_sgd.every=8 and .*=bf16 .*no gradient is sent",
        ),
        ("extras=[local_sgd] devices=2 nonfinite=skip", "local_sgd.every=8 and nonfinite=skip don't go together"),
        ("extras=[local_sgd] extras.local_sgd.every=0", "extras.local_sgd.every=0: must be 1 or more"),
    ],
)
def test_refused_in_one_line(overrides: str, message: str) -> None:
    refused_with(overrides, message)


@pytest.mark.usefixtures("two_gpus")
def test_a_loss_scale_is_refused() -> None:
    message = "local_sgd.every=8 and precision=16-mixed .*bf16-mixed"
    refused_with("devices=2 extras=[local_sgd] precision=16-mixed", message)
