"""Names say what a thing is: no participle in a noun's place, nothing that speaks or knows. Docstrings of helpers begin
with a command; ruff checks those in `src/` and `scripts/`, and these tests those in `tests/`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("whole_run")

ROOT = Path(__file__).resolve().parent.parent
BANNED = {
    *("told", "held", "given", "found", "kept", "own", "said", "there", "asked"),
    *("tell", "tells", "say", "says", "hear", "hears", "know", "knows"),
    *("keeper", "wire", "endings", "let_in", "alike"),
}
OF_OTHERS = "hydra_template"  # tests/docs/hydra_template/ holds another project's files, as they are
# What a description begins with, and a command does not.
NO_COMMAND = re.compile(
    r"(the|an?|what|whether|who|how|when|all|both|each|one|two|three|four|another|as|of|below|is|are"
    r"|[a-z]+[^s\W]s|[a-z]+ing)\b|\W",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def banned_words(name: str) -> set[str]:
    """Return the banned words in a name, between its underscores and capitals."""
    joined = "_".join(WORD.findall(name)).lower()
    return {word for word in BANNED if f"_{word}_" in f"_{joined}_"}


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each function, class, argument, variable and attribute that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


def offences(text: str, path: str) -> list[str]:
    """Return `file:line: name` for each name that has a banned word, the module's own among them."""
    names = [(1, Path(path).stem), *names_in(ast.parse(text))]
    return [f"{path}:{line}: {name}" for line, name in names if banned_words(name)]


def test_no_name_has_a_banned_word() -> None:
    for folder, least in (("src", 100), ("scripts", 30), ("tests", 100)):
        files = [path for path in sorted((ROOT / folder).rglob("*.py")) if OF_OTHERS not in path.parts]
        assert len(files) > least
        assert [each for file in files for each in offences(file.read_text(), str(file.relative_to(ROOT)))] == []


def descriptions(text: str, path: str) -> list[str]:
    """Return `file:line: docstring` for each function that is no test and whose docstring begins with no command."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    docstrings = [
        (node.lineno, ast.get_docstring(node) or "Do") for node in functions if not node.name.startswith("test_")
    ]
    return [f"{path}:{line}: {docstring}" for line, docstring in docstrings if NO_COMMAND.match(docstring)]


def test_docstrings_of_helpers_begin_with_a_command() -> None:
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if OF_OTHERS not in path.parts]
    assert [each for file in files for each in descriptions(file.read_text(), str(file.relative_to(ROOT)))] == []


@pytest.mark.parametrize(
    "docstring",
    ["The runs of a sweep.", "A run.", "What a run prints.", "Runs a program.", "Whether it ended.", "`name` -> Run."],
)
def test_a_description_is_seen(docstring: str) -> None:
    assert len(descriptions(f'def helper():\n    """{docstring}"""', "planted.py")) == 1
    assert descriptions(f'def test_it():\n    """{docstring}"""', "planted.py") == []


@pytest.mark.parametrize("docstring", ["Return the runs.", "Pass on what is read.", "Process a row.", "Add up."])
def test_a_command_is_taken(docstring: str) -> None:
    assert descriptions(f'async def helper():\n    """{docstring}"""', "planted.py") == []


@pytest.mark.parametrize(
    "text",
    [
        "def told(): ...",
        "def held_out(): ...",
        "async def keep(*own): ...",
        "class BatchKeeper: ...",
        "kept = 1",
        "KEPT: int = 1",
        "for at, found in pairs: ...",
        "lines = [said for said in words]",
        "self._let_in = 1",
        "import torch as wire",
        "if (there := name): ...",
        "try: ...\nexcept ValueError as asked: ...",
        "work(lambda given: 0)",
        "class Row:\n    alike: bool",
    ],
)
def test_a_planted_name_is_seen(text: str) -> None:
    assert len(offences(text, "planted.py")) == 1


def test_the_name_of_a_module_is_seen() -> None:
    assert offences("", "launch/endings.py") == ["launch/endings.py:1: endings"]


@pytest.mark.parametrize("name", ["owner", "_foundation", "unknown", "saying", "Tellurium", "thereafter", "alive"])
def test_a_longer_word_is_another_word(name: str) -> None:
    assert banned_words(name) == set()
