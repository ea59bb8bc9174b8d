"""Parts of pages that follow from code are current."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

PAGES = [path for path in (ROOT / "docs").rglob("*.md") if "<!-- written by make reference:" in path.read_text()]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_make_reference_writes_is_current(reference: ModuleType, page: Path) -> None:
    text = page.read_text()
    emptied = reference.PART.sub(lambda match: match[1] + match[3], text)
    assert emptied != text
    assert reference.written(emptied) == text, "run `make reference`"


def test_pages_are_written() -> None:
    assert {path.stem for path in PAGES} >= {"keys", "groups", "refusals", "api"}
