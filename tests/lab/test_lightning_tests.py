"""The kinds by which Lightning's own tests are counted."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from exchanged_trainer import is_expected, refusal_in
from lightning_tests import BAD_INPUT, BUG, HERE, MEANT, PASSED, REFUSED, SKIPPED, TOO, UNKNOWN, kind_of

from lockstep.errors import UserError

REASONS = yaml.safe_load((HERE / "lightning_tests.yaml").read_text())


@pytest.mark.parametrize(
    ("row", "too", "kind"),
    [
        ({"outcome": "passed"}, False, PASSED),
        ({"outcome": "skipped"}, False, SKIPPED),
        ({"refusal": "accelerator=gpu: this machine has no GPU that torch can use"}, False, SKIPPED),
        ({"refusal": "Net: manual optimization can't cut a step into pieces"}, False, REFUSED),
        ({"refusal": "Trainer(devices=0): must be a whole number above 0", "expected": True}, False, BAD_INPUT),
        ({"refusal": "Trainer(devices=0): must be a whole number above 0"}, False, BUG),
        ({"refusal": "Trainer(piece=...): there is no such option: use pieces"}, False, UNKNOWN),
        ({"test": "trainer/test_trainer.py::test_log_every_n_steps[3-10-5]"}, False, MEANT),
        ({}, False, BUG),
        ({}, True, TOO),
    ],
)
def test_kinds(row: dict[str, Any], too: bool, kind: str) -> None:
    failed = {"outcome": "failed", "test": "trainer/test_trainer.py::test_x", "refusal": None, "expected": False}
    assert kind_of(failed | row, too, REASONS)[0] == kind


def test_all_patterns_are_regular_expressions() -> None:
    assert all(re.compile(each) for group in REASONS.values() for reason in group for each in reason["of"])


def test_what_a_plug_in_writes_down(tmp_path: Path) -> None:
    error = AssertionError("no match")
    assert refusal_in(error) is None
    error.__context__ = UserError("refused")
    assert refusal_in(error) == "refused"
    file = tmp_path / "test_a.py"
    file.write_text("with pytest.raises(ValueError):\n    fit()\nfit()\n")
    assert (is_expected(file, 2), is_expected(file, 3)) == (True, False)
