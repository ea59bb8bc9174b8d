"""docs/reference/code.md leads through the engine: the files and names that it mentions exist."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.usefixtures("whole_run")

PAGE = ROOT / "docs" / "reference" / "code.md"
FILE = re.compile(r"`((?:src/)?[a-z_/]+\.py)`")
NAME = re.compile(r"`([A-Za-z_]\w+)`")


def defined_names(file: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


def missing(text: str) -> list[str]:
    """Return the files that a step of a walk names and that are not there, and the names that its files lack."""
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)  # a table says what was there at an earlier commit
    steps = re.split(r"^\d+\. |^## ", text, flags=re.MULTILINE)[1:]
    problems = []
    for step in steps:
        files = [
            ROOT / path if path.startswith("src/") else ROOT / "src/lockstep" / path for path in FILE.findall(step)
        ]
        problems += [str(file) for file in files if not file.is_file()]
        names = set().union(*(defined_names(file) for file in files if file.is_file()))
        problems += [name for name in NAME.findall(step) if files and name not in names | OF_OTHERS]
    return problems


# Names on the page that are no functions or classes of the files in the same step.
OF_OTHERS = {"Config", "DataModule", "layout", "optimizer_step", "training_step", "batch_size"}


def test_the_page_names_what_exists() -> None:
    text = PAGE.read_text()
    assert len(FILE.findall(text)) > 30
    assert missing(text) == []


@pytest.mark.parametrize(
    ("old", "new"), [("`error_line`", "`last_line`"), ("`commands/cli.py`", "`commands/command.py`")]
)
def test_a_stale_page_is_noticed(old: str, new: str) -> None:
    text = PAGE.read_text()
    assert old in text
    assert missing(text.replace(old, new))
