"""What can't be combined is refused in one line."""

import pytest
from refusals import refused_with

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("extras=[late] nonfinite=skip", "extras.late.steps=1 and nonfinite=skip .*later steps depend on"),
        (
            "extras=[late] devices=2 strategy.compression=bf16",
            "extras.late.steps=1 and strategy.compression=bf16 .*it does not send late gradients",
        ),
        ("extras=[late] extras.late.steps=0", "extras.late.steps=0: must be 1 or more"),
    ],
)
def test_refused_in_one_line(overrides: str, says: str) -> None:
    refused_with(overrides, says)


@pytest.mark.usefixtures("two_gpus")
def test_a_loss_scale_is_refused() -> None:
    says = "late.steps=2 and precision=16-mixed .*all steps share its loss scale; bf16-mixed"
    refused_with("extras=[late] extras.late.steps=2 precision=16-mixed", says)
