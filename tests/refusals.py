"""What a user reads whose config is refused."""

import re

import pytest
from conftest import composed

from lockstep.config.check import Config, check
from lockstep.run.cli import BAD_INPUT, error_line


def checked(*overrides: str) -> Config:
    return check(composed(*overrides))


def refused(*overrides: str) -> str:
    """The line that a user would read; an AssertionError if there is none, or more than one."""
    with pytest.raises(BAD_INPUT) as caught:
        checked(*overrides)
    said = error_line(caught.value)
    assert said
    assert "\n" not in said
    return said


def refused_with(overrides: str, says: str) -> None:
    """Compose and check a command line's overrides; the one line that refuses them must hold the pattern `says`."""
    said = refused(*overrides.split())
    assert re.search(says, said), said
