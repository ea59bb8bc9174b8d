"""What can't be combined is refused in one line."""

import pytest
from refusals import checked, refused_with

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("devices=2 strategy=dp pieces=8", "rebalance. and strategy=dp .*strategy=ddp"),
        ("devices=2", "rebalance. and pieces=2 .*each of 2 devices has one piece, .*; pieces=16"),
        ("devices=2 pieces=8 extras.rebalance.every=0", "extras.rebalance.every=0: must be 1 or more"),
    ],
)
def test_refused_in_one_line(overrides: str, says: str) -> None:
    refused_with(f"extras=[rebalance] {overrides}", says)


@pytest.mark.usefixtures("two_gpus")
def test_batchnorm_over_ranks_is_refused() -> None:
    says = "rebalance. and strategy.sync_batchnorm=true .*equally many pieces"
    refused_with("extras=[rebalance] devices=2 pieces=8 strategy.sync_batchnorm=true", says)


def test_shares_by_hand_are_taken_and_one_device_too() -> None:
    assert checked("extras=[rebalance]", "devices=2", "pieces=8", "strategy.shares=[3,1]").layout.counts == [6, 2]
    assert checked("extras=[rebalance]").layout.num_devices == 1
