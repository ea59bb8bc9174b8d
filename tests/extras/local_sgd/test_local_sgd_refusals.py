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
    assert re.search(says, refused(*overrides.split())), refused(*overrides.split())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("devices=2 extras=[local_sgd] precision=16-mixed", "local_sgd.every=8 and precision=16-mixed .*bf16-mixed"),
    ],
)
def test_refused_on_gpus(monkeypatch: pytest.MonkeyPatch, overrides: str, says: str) -> None:
    monkeypatch.setattr(config, "gpu_count", lambda: 2)
    assert re.search(says, refused(*overrides.split())), refused(*overrides.split())
