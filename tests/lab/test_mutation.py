"""The program that changes the code at random places, and its page."""

import time
from pathlib import Path

import mutation
import pytest

SOURCE = mutation.ROOT / "src" / "lockstep"
NAMES = [f"lockstep.lightning.steps.xǁStepLoopǁadvance__mutmut_{number}" for number in range(1, 9)]
DIFF = """# lockstep.lightning.steps.x_next__mutmut_1: survived
--- src/lockstep/lightning/steps.py
+++ src/lockstep/lightning/steps.py
@@ -1,2 +1,2 @@
 def next(one: int) -> int:
-    return one + 1
+    return one - 1
"""


def test_the_same_seed_draws_the_same_changes_and_another_one_others() -> None:
    assert mutation.draw(NAMES, 4, seed=1) == mutation.draw(NAMES[::-1], 4, seed=1) != mutation.draw(NAMES, 4, seed=2)
    assert sorted(mutation.draw(NAMES, 100, seed=1)) == NAMES


def test_the_page_has_the_figures_of_each_room_and_what_survived() -> None:
    outcomes = dict(zip(NAMES, ["killed"] * 5 + ["out of time", "survived", "no test"], strict=True))
    text = mutation.page({"step": outcomes}, {NAMES[6]: mutation.change(DIFF)}, 45, "0123456789ab and changes")
    assert "| step | 8 | 5 | 1 | 1 | 1 | 0 | 75% |" in text
    assert "- `lockstep.lightning.steps.StepLoop.advance`: `return one + 1` becomes `return one - 1`" in text
    assert "seed 45" in text
    assert "0123456789ab and changes" in text
    assert text.partition("Not called")[2].count("lockstep.lightning.steps.StepLoop.advance") == 1


def test_a_change_that_leaves_the_program_as_it_was_does_not_count() -> None:
    outcomes = dict(zip(NAMES[:5], ["killed"] * 3 + ["survived"] * 2, strict=True))
    changes = {NAMES[3]: "`zip(a, b, strict=True)` becomes `zip(a, b, )`", NAMES[4]: mutation.change(DIFF)}
    text = mutation.page({"step": outcomes}, changes, 45, "0123456789ab")
    assert "| step | 5 | 3 | 0 | 1 | 0 | 1 | 75% |" in text
    assert "`zip(a, b, )`. The same program: the lists always have one length" in text


def sleeping(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def test_a_fork_that_takes_too_long_ends_and_so_does_one_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "FOLDER", tmp_path)
    assert mutation.forked(lambda: 0, 60) == 0
    assert mutation.forked(lambda: sleeping(60), 0.2) < 0
    assert mutation.forked(lambda: 1 // 0, 60) == 1


def test_what_was_tried_twice_has_the_last_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "FOLDER", tmp_path)
    assert mutation.last_outcomes("step") == {}
    lines = f"survived: {NAMES[0]}\nno test: {NAMES[1]}\nkilled: {NAMES[0]}\n"
    (tmp_path / "step.txt").write_text(lines)
    assert mutation.last_outcomes("step") == {NAMES[0]: "killed", NAMES[1]: "no test"}


def test_a_change_that_leaves_the_program_as_it_was_is_known() -> None:
    assert mutation.why_equivalent("`zip(a, b, strict=True)` becomes `zip(a, b, )`")
    assert mutation.why_equivalent(
        "`for a in zip(x, f(y), strict=True):` becomes `for a in zip(x, f(y), strict=None):`"
    )
    assert not mutation.why_equivalent("`zip(a, b, strict=True)` becomes `zip(a, strict=True)`")
    assert not mutation.why_equivalent("`f(a, b)` becomes `f(a, None)`")
    for part, other in mutation.EQUIVALENT:
        assert mutation.why_equivalent(f"`a = {part}` becomes `a = {other}`"), part
        assert not mutation.why_equivalent(f"`a = {part}` becomes `b = {other}`"), part


def test_the_parts_that_may_change_are_in_the_code() -> None:
    code = "".join(file.read_text() for room in mutation.ROOMS for file in (SOURCE / room).glob("*.py"))
    assert [part for part, _ in mutation.EQUIVALENT if part not in code] == []
