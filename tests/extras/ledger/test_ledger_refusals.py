"""What can't be combined is refused in one line."""

import re

import pytest
from conftest import composed
from refusals import refused

from lockstep.config import check as config
from lockstep.extras.ledger.lines import deciding


@pytest.fixture(autouse=True)
def _two_cores_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused must not depend on the machine that tests."""
    monkeypatch.setattr(config, "gpu_count", lambda: 0)
    monkeypatch.setattr(config, "cpu_cap", lambda: 8)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("extras=[ledger] callbacks=none", "ledger.* and no callbacks.checkpoint don't go together"),
    ],
)
def test_refused_in_one_line(overrides: str, says: str) -> None:
    assert re.search(says, refused(*overrides.split())), refused(*overrides.split())


def test_a_callback_counts_unless_its_class_changes_no_weights() -> None:
    """Whatever package it comes from."""

    def callbacks(*overrides: str) -> set[str]:
        return set(deciding(config.check(composed("extras=[ledger]", *overrides)))["callbacks"])

    assert callbacks() == set()
    assert callbacks("callbacks=early_stopping", "~callbacks.pictures") == {"early_stopping"}
