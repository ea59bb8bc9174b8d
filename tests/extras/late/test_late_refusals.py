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
        ("extras=[late] nonfinite=skip", "extras.late.steps=1 and nonfinite=skip .*other steps have built on it"),
        (
            "extras=[late] devices=2 strategy.compression=bf16",
            "extras.late.steps=1 and strategy.compression=bf16 .*sent by itself",
        ),
        ("extras=[late] extras.late.steps=0", "extras.late.steps=0: must be 1 or more"),
    ],
)
def test_refused_in_one_line(overrides: str, says: str) -> None:
    assert re.search(says, refused(*overrides.split())), refused(*overrides.split())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "extras=[late] extras.late.steps=2 precision=16-mixed",
            "late.steps=2 and precision=16-mixed .*loss scale is one for all; bf16-mixed",
        ),
    ],
)
def test_refused_on_gpus(monkeypatch: pytest.MonkeyPatch, overrides: str, says: str) -> None:
    monkeypatch.setattr(config, "gpu_count", lambda: 2)
    assert re.search(says, refused(*overrides.split())), refused(*overrides.split())
