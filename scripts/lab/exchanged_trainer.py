"""A plug-in of pytest: Lightning's tests get `lockstep.Trainer` in the place of Lightning's; see lightning_tests.py.

The environment says where a line of JSON is added for each test, `LIGHTNING_TESTS`, and whose Trainer they get,
`TESTED_TRAINER`: `lockstep` or `lightning`.
"""

import ast
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.trainer.trainer
import pytest

import lockstep
from lockstep.errors import UserError

outcomes: dict[str, dict[str, Any]] = {}

if os.environ.get("TESTED_TRAINER") == "lockstep":
    for place in (lightning, pl, pl.trainer, pl.trainer.trainer):
        place.Trainer = lockstep.Trainer  # type: ignore[attr-defined]


def refusal_in(error: BaseException | None) -> str | None:
    """Return the text of the UserError that an error is, or from which it came."""
    while error is not None:
        if isinstance(error, UserError):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def is_expected(path: Path, line: int) -> bool:
    """Return whether a line of a test is in the block of a `with pytest.raises(...)`."""
    blocks = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.With)]
    around = [each for each in blocks if each.lineno <= line <= (each.end_lineno or 0)]
    return any("raises(" in ast.unparse(item) for each in around for item in each.items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Remember the outcome of a phase of a test: the first that is no success counts."""
    report: Any = yield
    row = outcomes.setdefault(item.nodeid, {"test": item.nodeid, "outcome": "passed"})
    if row["outcome"] == "passed" and report.outcome != "passed":
        row["outcome"] = report.outcome
        if call.excinfo is not None and report.outcome == "failed":
            frames = [(Path(each.path), each.lineno + 1) for each in call.excinfo.traceback]
            row |= {
                "error": call.excinfo.typename,
                "message": " ".join(str(call.excinfo.value).split())[:400],
                "refusal": refusal_in(call.excinfo.value),
                "expected": any(is_expected(*each) for each in frames if "tests_pytorch" in each[0].parts),
                "at": [f"{path.name}:{line}" for path, line in frames][-5:],
            }
    return report


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write a test down."""
    with open(os.environ["LIGHTNING_TESTS"], "a") as file:
        file.write(json.dumps(outcomes.pop(nodeid)) + "\n")
