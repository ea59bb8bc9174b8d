"""scripts/lab/defects.py: its list fits the library as it is, and it tells a mistake that tests find from another."""

from collections import Counter
from pathlib import Path

import yaml
from conftest import ROOT, forked
from defects import changed, read_defects

LABELS = {"file": "data/labels.py", "test": "tests/data/test_labels.py"}


def test_each_text_occurs_once() -> None:
    """Also no defect is listed twice, and each leaves a program that Python can read."""
    listed = read_defects()
    assert len(listed) == 50
    assert max(Counter((each["file"], each["new"]) for each in listed).values()) == 1
    for each in listed:
        file = ROOT / "src" / "lockstep" / each["file"]
        compile(changed(file.read_text(), each), file, "exec")
        assert (ROOT / each["test"]).is_file(), each["test"]


def test_a_mistake_is_detected_and_a_change_of_nothing_is_not(tmp_path: Path) -> None:
    mistake = {"old": "(y >= self.num_classes)", "new": "(y > self.num_classes)", "breaks": "the last class"}
    nothing = {"old": "(torch.int64, torch.uint8)", "new": "(torch.uint8, torch.int64)", "breaks": "nothing"}
    (tmp_path / "list.yaml").write_text(yaml.safe_dump([LABELS | nothing, LABELS | mistake]))
    file = ROOT / "src" / "lockstep" / LABELS["file"]
    before = file.read_text(), file.stat().st_mtime_ns
    done = forked("scripts/lab/defects.py", "--list", str(tmp_path / "list.yaml"), "-m", "unit or ranks")
    assert done.returncode == 1, done.stdout + done.stderr
    assert ": nothing\n    not found\n" in done.stdout
    assert ": the last class\n    tests/data/test_labels.py::" in done.stdout
    assert "1 of 2 found" in done.stdout
    assert (file.read_text(), file.stat().st_mtime_ns) == before


def test_a_text_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = {"old": "no such line", "new": "", "breaks": "nothing"}
    (tmp_path / "list.yaml").write_text(yaml.safe_dump([LABELS | gone]))
    done = forked("scripts/lab/defects.py", "--list", str(tmp_path / "list.yaml"), "-m", "unit or ranks")
    assert done.returncode == 1
    assert "data/labels.py: 'no such line' occurs 0 times: it must occur once" in done.stderr
