"""The page that `make nightly` writes."""

from pathlib import Path

import nightly
import pytest

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_right"/>
<testcase classname="tests.test_a" name="test_wrong[1]"><failure message="no">text</failure></testcase>
<testcase classname="tests.test_a" name="test_torn"/>
<testcase classname="tests.test_a" name="test_torn"><error message="at teardown">text</error></testcase>
<testcase classname="tests.test_b" name="test_elsewhere"><skipped message="no qemu">text</skipped></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    (tmp_path / "report.xml").write_text(REPORT)
    return tmp_path / "report.xml"


def test_each_test_has_one_outcome_and_the_worst_counts(report: Path) -> None:
    assert nightly.outcomes(report) == {
        "passed": ["tests/test_a.py: test_right"],
        "failed": ["tests/test_a.py: test_torn", "tests/test_a.py: test_wrong[1]"],
        "skipped": ["tests/test_b.py: test_elsewhere"],
    }


def test_the_page_has_the_figures_of_the_run(report: Path) -> None:
    text = nightly.page(nightly.outcomes(report), 61.4, "0123456789ab and changes")
    for row in (
        "passed | 1",
        "failed | 2",
        "skipped | 1",
        "seconds | 61",
        "commit | 0123456789ab and changes",
        "torch | ",
    ):
        assert f"| {row}" in text
    assert "- `tests/test_a.py: test_wrong[1]`" in text.partition("\nFailed:\n")[2].partition("\nSkipped:\n")[0]
    assert max(map(len, text.splitlines())) <= 120
