"""scripts/lab/stores.py: without the package that it compares with, it says so in one line."""

from conftest import forked


def test_the_other_package_is_named() -> None:
    done = forked("scripts/lab/stores.py")
    assert done.returncode == 1
    line = "error: scripts/lab/stores.py compares with streaming, which is missing: pip install mosaicml-streaming\n"
    assert done.stderr == line
