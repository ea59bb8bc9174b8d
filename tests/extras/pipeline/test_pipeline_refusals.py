"""What can't be combined is refused in one line."""

import re

import pytest
from refusals import refused

from lockstep.config import check as config


@pytest.fixture(autouse=True)
def _two_cores_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused must not depend on the machine that tests."""
    monkeypatch.setattr(config, "gpu_count", lambda: 0)
    monkeypatch.setattr(config, "cpu_cap", lambda: 8)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("strategy=pipeline", "strategy=pipeline and devices=1 don't go together: a stage needs a device.*devices=2"),
        ("strategy=pipeline devices=3 pieces=2", "pieces=2 is fewer than 3 devices: give pieces=3"),
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
    assert re.search(says, refused(*overrides.split())), refused(*overrides.split())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("strategy=pipeline devices=2 precision=16-mixed", "strategy=pipeline and precision=16-mixed"),
    ],
)
def test_refused_on_gpus(monkeypatch: pytest.MonkeyPatch, overrides: str, says: str) -> None:
    monkeypatch.setattr(config, "gpu_count", lambda: 2)
    assert re.search(says, refused(*overrides.split())), refused(*overrides.split())
