"""The pages of the site as lists of what they show: files to write and commands to run, with their output."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conftest import ROOT

DOCS = ROOT / "docs"
# What a command begins with; anything else in an indented block is output or code.
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S* )*(?:python|lockstep|make|pip|torchrun|scripts/|sbatch|mpirun|apt|eval|sed|export|unshare|ls) ?"
)
WRITTEN_FILE = re.compile(r"<!-- written by make reference: file of (\S+) -->\n\n```\w+\n(.*?)^```$", re.DOTALL | re.M)
FILE = re.compile(r"`((?:src|conf|tests)/[\w/.-]+)`")
# What depends on the machine or the moment: fractions, speeds, run folders, hashes, the step that was the best.
VARIES = re.compile(
    r"outputs/\S+|\d[\d,]*(?= samples/s)|\d+(?= threads?)|\b[0-9a-f]{12,64}\b|(?<=correct )\d+|\d*\.\d+(?:e-?\d+)?"
    r"|(?<=\blr )\d+\b|(?<=val/acc, step )\d+|(?<= at step )\d+"
)


@dataclass
class Command:
    """A command of a page, in one line, and the lines that it prints there; None where the page shows none."""

    text: str
    output: list[str] | None = None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


@dataclass
class Page:
    """A page: its files by path, its commands in order, and the code of its fenced blocks by language."""

    name: str
    files: dict[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    blocks: list[tuple[str, str]] = field(default_factory=list)


def pages() -> list[str]:
    """Return the names of all pages."""
    return sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def without_written(text: str) -> str:
    """Return a page without the parts that `make reference` writes."""
    return re.sub(r"<!-- written by .*?<!-- end -->", "", text, flags=re.DOTALL)


def read(name: str) -> Page:
    """Return what a page shows."""
    page, text = Page(name), (DOCS / name).read_text()
    page.files = dict(WRITTEN_FILE.findall(text))
    text, prose = without_written(text), ""
    for part in re.split(r"^(```\w*\n.*?^```\n)", text, flags=re.DOTALL | re.MULTILINE):
        if not (fence := re.match(r"```(\w*)\n(.*)```\n", part, flags=re.DOTALL)):
            prose = part
            page.commands += _indented(part)
            continue
        language, code = fence.groups()
        page.blocks.append((language, code))
        if language == "console":
            page.commands += _console(code)
        elif language == "bash":
            page.commands.append(Command(code.strip()))
        elif language in ("python", "yaml") and (named := FILE.findall(prose.strip().rpartition("\n\n")[2])):
            page.files[named[0]] = page.files.get(named[0], "") + code + "\n\n"
    return page


def matches(expected: list[str], printed: list[str]) -> bool:
    """Return whether the printed lines are the expected ones. `...` stands for any lines, VARIES is not compared."""
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else re.escape(VARIES.sub("#", line.rstrip())) + r"\n" for line in expected
    )
    return re.fullmatch(pattern, "".join(VARIES.sub("#", line.rstrip()) + "\n" for line in printed)) is not None


def _indented(text: str) -> Iterator[Command]:
    """Yield the commands of indented blocks and of inline code that begins with `python`."""
    for block in re.findall(r"(?<=\n\n)((?: {4}.*\n)+)", "\n\n" + text + "\n"):
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            if PROGRAM.match(line.strip()):
                yield Command(line.strip())
    for code in re.findall(r"(?<!`)`(python [^`]+)`", text):
        yield Command(code.replace("\n", " "))


def _console(code: str) -> Iterator[Command]:
    """Yield the commands of a terminal session, `$ command`, each with the lines below it."""
    for part in re.split(r"^\$ ", re.sub(r" *\\\n *", " ", code), flags=re.MULTILINE)[1:]:
        command, *output = part.rstrip("\n").split("\n")
        yield Command(command, output)


def path_of(name: str) -> Path:
    """Return the file of a page."""
    return DOCS / name
