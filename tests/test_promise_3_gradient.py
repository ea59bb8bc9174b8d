"""Promise 3: the gradient of a step is that of the mean loss over its samples, whoever computes which piece of it.

A user's own LightningModule, written as in Lightning's tutorial, is compared with a loop in plain torch.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from conftest import Program, Run, apart, summary_of
from own_runs import DATA, DDP, DP, LAYOUTS, same_bits, train

from lockstep.arithmetic.layout import resolve
from lockstep.arithmetic.order import DataOrder
from lockstep.loading import Splits
from lockstep.run.opening import open_data

TINY = ("data=synthetic", "data.image_size=12", "data.num_classes=3", "data.val_fraction=0", "logger=none", "threads=1")


def by_hand(splits: Splits, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the run must compute, as a loop over whole steps in plain torch: no pieces, no Lightning, no lockstep."""
    torch.manual_seed(seed)
    first, last = torch.nn.Linear(12 * 12, 16), torch.nn.Linear(16, 3)
    net = torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.ReLU(), last).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    on = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=24)
    order = DataOrder(len(splits.train), on, seed)
    samples = [splits.train[index] for index in range(len(splits.train))]
    images = torch.stack([image for image, _ in samples]).double()
    x = (images / 255 - splits.spec.mean[0]) / splits.spec.std[0]
    y = torch.stack([label for _, label in samples])
    for epoch in range(2):
        for index in range(order.steps_per_epoch):
            ids = torch.from_numpy(order.step(epoch, index))
            optimizer.zero_grad()
            F.cross_entropy(net(x[ids]), y[ids]).backward()
            optimizer.step()
    return {f"net.{name}": value for name, value in net.state_dict().items()}


def test_every_layout_takes_the_steps_of_a_plain_loop(project: Path, tmp_path: Path) -> None:
    run = train(project, tmp_path, "LitDigits", "lr=0.1", "strategy=ddp,dp", "devices=1,4", "-m")
    expected = by_hand(open_data({"_target_": "project.data.synthetic", **DATA}, "data"))
    for folder in run.jobs:
        found = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{folder}: {name}")
    metrics = [summary_of(folder)["metrics"] for folder in run.jobs]
    assert len(metrics) == 4
    assert len({each["test/acc"] for each in metrics}) == 1
    losses = [each["test/loss"] for each in metrics]
    assert max(losses) - min(losses) < 1e-10 * losses[0]


def test_what_is_unfrozen_in_mid_run_is_trained_alike(project: Path, tmp_path: Path) -> None:
    plain = train(project, tmp_path / "plain", "Unfrozen", "pieces=1")
    ddp = train(project, tmp_path / "ddp", "Unfrozen", *DDP)
    exact = [
        train(project, tmp_path / "exact" / n, "Unfrozen", "exact=true", *on) for n, on in (("ddp", DDP), ("dp", DP))
    ]
    frozen = train(project, tmp_path / "frozen", "Unfrozen", "pieces=1", "max_epochs=1")
    assert all(apart(run, plain) < 1e-10 for run in (ddp, *exact))
    assert same_bits(*exact)
    assert apart(frozen, plain) > 1e-3


def test_a_parameter_that_a_step_leaves_out_is_not_decayed(project: Path, tmp_path: Path) -> None:
    """Its gradient is None there, not zeros. The step is the epoch's last, of one sample: a rank has none."""
    task = ("batch_size=20", "pieces=2", "threads=1")  # 81 samples: 4 x 20 + 1
    plain = train(project, tmp_path / "plain", "Rarely", *task, "pieces=1")
    for number, layout in enumerate((DDP, DP, (*DDP, "exact=true"))):
        assert apart(train(project, tmp_path / str(number), "Rarely", *task, *layout), plain) < 1e-10, layout


def test_what_a_module_does_to_batches_is_the_same(project: Path, tmp_path: Path) -> None:
    def run(name: str, on: str) -> Run:
        return train(project, tmp_path / name / on, name, "exact=true", "max_epochs=1", *LAYOUTS[on])

    mixed = [run("Mixes", on) for on in ("ddp", "dp")]
    plain, blind = run("LitDigits", "one"), run("Blinds", "one")
    assert same_bits(*mixed)
    assert not same_bits(plain, mixed[0])
    assert same_bits(plain, blind)
    assert plain.summary["metrics"]["test/loss"] != blind.summary["metrics"]["test/loss"]


def test_a_loss_that_goes_past_forward_is_trained_on_or_refused(project: Path, tmp_path: Path) -> None:
    """Under dp and exact it would be without its gradient."""
    task = ("max_epochs=1", "threads=1")
    dp, without = (train(project, tmp_path / name, name, *task, *DP) for name in ("Penalty", "LitDigits"))
    alone = train(project, tmp_path / "alone", "Penalty", *task)
    assert apart(dp, alone) < 1e-10
    assert apart(without, alone) > 1e-3
    refused = train(project, tmp_path / "exact", "Penalty", *DP, "exact=true", ok=False)
    assert refused.returncode == 2, str(refused)
    assert "training_step uses net.1.weight, net.1.bias, net.3.weight, ... outside of forward()" in refused.stderr


# --- tails ------------------------------------------------------------------------------------------------------------


def test_pieces_that_devices_do_not_divide_and_a_tail_of_one_sample(run_train: Program) -> None:
    """8 pieces on 3 devices are 3, 3 and 2; the tail leaves pieces and whole processes without a sample."""
    run = run_train(
        *TINY, "data.samples=97", "max_epochs=2", "batch_size=48", "pieces=8",
        "precision=64-true", "strategy=ddp,dp", "devices=1,3", "-m",
    )  # fmt: skip
    states = [torch.load(job / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for job in run.jobs]
    assert [summary_of(job)["layout"]["accumulate_grad_batches"] for job in run.jobs] == [8, 3, 8, 3]
    for job, state in zip(run.jobs, states, strict=True):
        assert summary_of(job)["steps"] == 6
        assert summary_of(job)["samples_seen"] == 2 * 97
        for name, value in state.items():
            torch.testing.assert_close(value, states[0][name], rtol=1e-9, atol=1e-12)


def test_a_process_without_a_sample_in_the_second_step(run_train: Program) -> None:
    """DDP talks to all ranks once, in the forward pass after its first synchronised step; one of them has none here."""
    run = run_train(
        *(*TINY, "data.samples=10", "batch_size=8", "pieces=4", "max_epochs=2"),
        *("strategy=ddp", "devices=1,3", "exact=true", "callbacks.checkpoint.monitor=null", "-m"),
    )
    first, second = (summary_of(job) for job in run.jobs)
    assert first["steps"] == second["steps"] == 4
    assert first["weights_sha256"] == second["weights_sha256"]


def test_powersgd_sends_a_network_of_several_buckets(run_train: Program) -> None:
    """Its hook sends more of a bucket later on: several met in another order on each rank, and gloo aborted."""
    task = ("model=resnet18", "data=synthetic", "data.samples=64", "data.image_size=16", "batch_size=4", "threads=1")
    run = run_train(*task, "max_steps=14", "strategy=ddp", "devices=2", "strategy.compression=powersgd", "logger=none")
    assert run.summary["steps"] == 14
