"""What can't be combined is refused in one line."""

import pytest
from refusals import refused_with

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")


@pytest.mark.parametrize(
    ("overrides", "says"),
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
        ("strategy=pipeline devices=2 strategy.split=3", "strategy.split=3: must be"),
    ],
)
def test_refused_in_one_line(overrides: str, says: str) -> None:
    refused_with(overrides, says)


@pytest.mark.usefixtures("two_gpus")
def test_a_loss_scale_is_refused() -> None:
    refused_with("strategy=pipeline devices=2 precision=16-mixed", "strategy=pipeline and precision=16-mixed")
