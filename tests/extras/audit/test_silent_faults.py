"""Bits that flip in silence, by scripts/lab/silent_faults.py."""

import pytest
from conftest import ROOT, forked

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.nightly]

SILENT = ROOT / "scripts" / "lab" / "silent_faults.py"


def test_bits_that_flip_in_silence_are_seen() -> None:
    """A device that computes or sends wrong from some step on, by the audit and by sums; a checkpoint, by `verify`."""
    done = forked(SILENT, "--faults=3", "--seed=16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 faults" in done.stdout
    assert "computed a wrong gradient" in done.stdout
    assert "sends or gets is damaged again" in done.stdout
    assert "differs from its ledger" in done.stdout


def test_bits_that_flip_and_are_not_seen_are_distinguished() -> None:
    """The control: a wrong gradient without an audit, in a run that nobody verifies."""
    done = forked(SILENT, "--faults=1", "--control", "--seed=13", "extras.audit.share=1e-9")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROBLEM" in done.stdout
    assert "not detected" in done.stdout
