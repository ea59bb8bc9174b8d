"""Promise 3: the gradient of a step is that of the mean loss over its samples, whoever computes which piece of it.

A user's own LightningModule, written as in Lightning's tutorial, is compared with a loop in plain torch.
"""

from pathlib import Path

import pytest
import torch
from conftest import TRAINER_BY_DAY, Program, apart, checkpoint_of, summary_of
from user_runs import BOTH, DATA, DP, Replica, batches, jobs, same_as, same_bits, train

TINY = ("data=synthetic", "data.image_size=12", "data.num_classes=3", "data.val_fraction=0", "logger=none", "threads=1")


@TRAINER_BY_DAY
def test_every_layout_takes_the_steps_of_a_plain_loop(either: Path, tmp_path: Path) -> None:
    run = train(either, tmp_path, "LitDigits", "lr=0.1", "strategy=ddp,dp", "devices=1,4", "-m")
    replica = Replica()
    for x, y in batches(int(DATA["samples"])):
        replica.apply(replica.gradient(x, y))
    assert [same_as(folder, replica.net) for folder in run.jobs] == [True] * 4
    replica.apply(replica.gradient(x, y))
    assert not same_as(run.jobs[0], replica.net), "the control: a step more"
    metrics = [summary_of(folder)["metrics"] for folder in run.jobs]
    assert len({each["test/acc"] for each in metrics}) == 1
    losses = [each["test/loss"] for each in metrics]
    assert max(losses) - min(losses) < 1e-10 * losses[0]


@pytest.mark.nightly
def test_what_is_unfrozen_in_mid_run_is_trained_the_same(either: Path, tmp_path: Path) -> None:
    plain = train(either, tmp_path / "plain", "Unfrozen", "pieces=1")
    frozen = train(either, tmp_path / "frozen", "Unfrozen", "pieces=1", "max_epochs=1")
    cut = jobs(either, tmp_path / "cut", "Unfrozen", "exact=false,true", *BOTH)
    assert all(apart(run, plain) < 1e-10 for run in cut)
    assert same_bits(*cut[2:])
    assert apart(frozen, plain) > 1e-3


@TRAINER_BY_DAY
def test_a_parameter_that_a_step_leaves_out_is_not_decayed(either: Path, tmp_path: Path) -> None:
    """Its gradient is None there, not zeros. The step is the epoch's last, of one sample: a rank has none."""
    task = ("batch_size=20", "pieces=2")  # 81 samples: 4 x 20 + 1
    plain = train(either, tmp_path / "plain", "Rarely", *task, "pieces=1")
    for run in jobs(either, tmp_path / "cut", "Rarely", *task, "exact=false,true", *BOTH):
        assert apart(run, plain) < 1e-10, run.summary["layout"]


@pytest.mark.nightly
def test_what_a_module_does_to_batches_is_the_same(either: Path, tmp_path: Path) -> None:
    task = ("exact=true", "max_epochs=1")
    mixed = jobs(either, tmp_path / "mixed", "Mixes", *task, *BOTH)
    plain, blind = jobs(either, tmp_path / "alone", "LitDigits,mine.Blinds", *task)
    assert same_bits(*mixed)
    assert not same_bits(plain, mixed[0])
    assert same_bits(plain, blind)
    assert plain.summary["metrics"]["test/loss"] != blind.summary["metrics"]["test/loss"]


@pytest.mark.nightly
def test_a_loss_that_goes_past_forward_is_trained_on(either: Path, tmp_path: Path) -> None:
    """Also one that calls `forward` more than once, or never: dp runs the whole `training_step` on each device."""
    kinds = "Penalty,mine.LitDigits,mine.Past,mine.Views"
    task = ("max_epochs=1", "exact=true")
    penalty, without, *others = jobs(either, tmp_path / "dp", kinds, *task, *DP)
    one, _, *ones = jobs(either, tmp_path / "one", kinds, *task)
    assert same_bits(penalty, one)
    assert all(map(same_bits, others, ones))
    assert apart(without, one) > 1e-3


# --- tails ------------------------------------------------------------------------------------------------------------


@TRAINER_BY_DAY
def test_pieces_that_devices_do_not_divide_and_a_tail_of_one_sample(either: Path, tmp_path: Path) -> None:
    """8 pieces on 3 devices are 3, 3 and 2; the tail leaves pieces and whole processes without a sample. It is the
    second step: DDP talks to all ranks once, in the forward pass after its first synchronised step."""
    data = ("data.samples=49", "data.val_fraction=0", "max_epochs=3", "batch_size=48", "pieces=8")
    run = train(either, tmp_path, "NoTest", *data, "exact=false,true", "strategy=ddp,dp", "devices=1,3", "-m")
    summaries = [summary_of(job) for job in run.jobs]
    states = [checkpoint_of(job)["state_dict"] for job in run.jobs]
    assert {summary["steps"] for summary in summaries} == {6}
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(value, states[0][name], rtol=1e-9, atol=1e-12)
    assert len({summary["weights_sha256"] for summary in summaries[4:]}) == 1


@pytest.mark.nightly
def test_powersgd_sends_a_network_of_several_buckets_and_reports_what_no_checkpoint_holds(run_train: Program) -> None:
    """Its hook sends more of a bucket later on: several met in another order on each rank, and gloo aborted."""
    task = ("model=resnet18", "data=synthetic", "data.samples=64", "data.image_size=16", "batch_size=4", "threads=1")
    on = ("strategy=ddp", "devices=2", "strategy.compression=powersgd", "scheduler=constant", "logger=none")
    run = run_train(*task, *on, "max_steps=14")
    assert run.summary["steps"] == 14
    resumed = run_train(f"resume={run.folder}", "max_steps=15")
    assert [finished.stderr.count("strategy.compression=powersgd starts again") for finished in (run, resumed)] == [
        0,
        1,
    ]
