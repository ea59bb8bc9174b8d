"""The line that a user reads whose config is refused, and the table of them (refusals.yaml).

The modules that check a config are imported here, so that tests of refusals need not know where they are.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import composed

from lockstep.checkpoint.resume import resolve
from lockstep.commands.cli import BAD_INPUT, error_line
from lockstep.config import check as config_check
from lockstep.config.arguments import read_arguments
from lockstep.config.check import Config, check
from lockstep.job.evaluation import find_checkpoint
from lockstep.launch import machine

TABLE = Path(__file__).with_name("refusals.yaml")


@dataclass(frozen=True)
class Refusal:
    """A row of the table: what is typed, and the line that refuses it. refusals.yaml describes the fields."""

    command: str
    message: str
    program: str = "train"
    gpus: int = 0
    files: dict[str, str] = field(default_factory=dict)
    how: str = "check"

    def overrides(self, folder: Path) -> list[str]:
        """Return the words of the command, and write its files below `folder`."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        return shlex.split(self.command.replace("{folder}", str(folder)))

    def is_message(self, line: str, folder: Path) -> bool:
        """Return whether a line is the row's message, whole."""
        parts = self.message.replace("{folder}", str(folder)).split("…")
        return re.fullmatch(".*".join(map(re.escape, parts)), line) is not None


def read_table(path: Path = TABLE) -> list[Refusal]:
    """Return the rows of all sections of a table."""
    sections: list[dict[str, Any]] = yaml.safe_load(path.read_text())
    common = [{key: value for key, value in section.items() if key not in ("title", "rows")} for section in sections]
    return [Refusal(**row, **of) for section, of in zip(sections, common, strict=True) for row in section["rows"]]


def set_machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Let a config be checked as on a machine with so many GPUs; one with GPUs has a compiler, too."""
    monkeypatch.setattr(machine, "gpu_count", lambda: gpus)
    if gpus:
        monkeypatch.setattr(config_check, "compiler_lacking", lambda accelerator: None)


def checked(*overrides: str) -> Config:
    """Compose and check the config of a command line."""
    return check(composed(*overrides))


def refused(*overrides: str) -> str:
    """Return the line that a user would read; raise an AssertionError if there is none, or more than one."""
    with pytest.raises(BAD_INPUT) as caught:
        checked(*overrides)
    return _one_line(caught.value)


def refused_with(overrides: str, pattern: str) -> None:
    """Compose and check a command line's overrides; the one line that refuses them must match the pattern `says`."""
    line = refused(*overrides.split())
    assert re.search(pattern, line), line


def refused_command(program: str, overrides: Sequence[str]) -> str:
    """Return the line that refuses a command before it starts anything, found without running the program."""
    with pytest.raises(BAD_INPUT) as caught:
        _check_command(program, overrides)
    return _one_line(caught.value)


def _check_command(program: str, overrides: Sequence[str]) -> None:
    arguments = read_arguments(overrides, program)
    if program == "train":
        check(composed(*resolve(arguments).line))
    else:
        find_checkpoint(composed(*arguments.line, page=program))


def _one_line(error: BaseException) -> str:
    line = error_line(error)
    assert line
    assert "\n" not in line
    return line
