"""docs/troubleshooting.md: each message that it quotes is printed when it is provoked, or stands in the source."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, composed

from lockstep.checkpoint import resume
from lockstep.commands.cli import BAD_INPUT, error_line
from lockstep.config.arguments import read_arguments
from lockstep.config.check import check
from lockstep.data.build import open_data
from lockstep.job.build import make_module

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# A message that is longer than a line goes on in lines that are indented further.
BLOCKS = [
    re.sub(r"\n {6}", " ", block).replace("    ", "").splitlines()
    for block in re.findall(r"(?:^ {4,}\S.*\n)+", PAGE, re.MULTILINE)
]
COMMANDS = [(block[0].removeprefix("$ "), block[1]) for block in BLOCKS if block[0].startswith("$ ")]
QUOTED = [block[0] for block in BLOCKS if not block[0].startswith("$ ")]


def texts(folder: str) -> str:
    """Return the texts of all Python files in a folder, one per line; an f-string's are those between its values."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def prepare(*overrides: str) -> None:
    """Do all that `src/train.py` does with its overrides before the first step."""
    raw = composed(*resume.resolve(read_arguments(overrides, "train")).line)
    config = check(raw, overridden=[each.partition("=")[0] for each in overrides])
    make_module(config, open_data(config.data, config.data_dir, config.seed))


def test_the_page_shows_problems() -> None:
    """A parser that finds none would make every other test pass."""
    assert COMMANDS
    assert QUOTED
    assert all(len(block) == 1 + block[0].startswith("$ ") for block in BLOCKS)


@pytest.mark.usefixtures("whole_run")
@pytest.mark.usefixtures("two_cores_no_gpu")
@pytest.mark.parametrize(("command", "message"), COMMANDS)
def test_what_a_command_prints(command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, script, *overrides = shlex.split(command)
    assert (program, script) == ("python", "src/train.py")
    monkeypatch.chdir(tmp_path)
    pattern = re.sub(r"<(folder|layout|reason)>", ".+", re.escape(message.removeprefix("error: ")))
    with pytest.raises(BAD_INPUT) as caught:
        prepare(*overrides)
    assert re.fullmatch(pattern, error_line(caught.value))


@pytest.fixture(scope="module")
def source() -> str:
    """Return what the source prints, and what other tests assert of it, word for word."""
    return texts("src") + texts("tests")


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("message", QUOTED)
def test_a_message_stands_in_the_source(message: str, source: str) -> None:
    """Each part between two `<word>`s, which may be put together of two texts."""
    fixed = [part for part in re.split(r"<[\w ]+>", message.removeprefix("error: ")) if part.strip()]
    assert max(len(part.split()) for part in fixed) >= 2

    def stands(part: str) -> bool:
        cuts = [space.end() for space in re.finditer(" ", part)]
        return part in source or any(part[:at] in source and part[at:] in source for at in cuts)

    assert [part for part in fixed if not stands(part)] == []
