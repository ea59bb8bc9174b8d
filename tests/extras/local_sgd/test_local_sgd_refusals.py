"""What can't be combined is refused in one line."""

import pytest
from refusals import refused_with

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")


@pytest.mark.parametrize(
    ("overrides", "says"),
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
def test_refused_in_one_line(overrides: str, says: str) -> None:
    refused_with(overrides, says)


@pytest.mark.usefixtures("two_gpus")
def test_a_loss_scale_is_refused() -> None:
    says = "local_sgd.every=8 and precision=16-mixed .*bf16-mixed"
    refused_with("devices=2 extras=[local_sgd] precision=16-mixed", says)
