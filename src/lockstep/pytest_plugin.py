"""The pytest fixture `same`: fail a test when two trainings differ. The plug-in of pytest that brings it.

It imports nothing heavy: pytest loads it in every environment where Lockstep is installed.
"""

from collections.abc import Callable

import pytest


@pytest.fixture
def same() -> Callable[..., str]:
    """Return a function: `same("python before.py", "python after.py", steps=20)`.

    It fails the test with the verdict, the cause and what to change if the programs differ by more than rounding, and
    returns the verdict otherwise. Either side may be a command line or the path of a `.trace` file.
    """

    def check(before: str, after: str, steps: int = 20, timeout: float = 600.0) -> str:
        from lockstep.errors import UserError
        from lockstep.programs.sameness.running import Limits
        from lockstep.programs.sameness.sides import compare

        __tracebackhide__ = True
        try:
            verdict = compare(str(before), str(after), Limits(steps, timeout))
        except UserError as error:
            pytest.fail(f"error: {error}", pytrace=False)
        if verdict.code:
            pytest.fail(verdict.text, pytrace=False)
        return verdict.line

    return check
