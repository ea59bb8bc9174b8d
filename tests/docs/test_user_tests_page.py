"""The page on tests of your own code, followed literally: its files are written, pytest is run on them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import site_pages
from conftest import TIMEOUT, template

NAME = "use/test-your-own-code.md"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the template with the files of the pages, outside of this repository."""
    folder = template(tmp_path_factory.mktemp("project"))
    for name in ("use/own-model.md", "use/own-data.md", NAME):
        for path, text in site_pages.read(name).files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            with (folder / path).open("a") as file:
                file.write(text)
    return folder


def run_tests(project: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m pytest <file>` as a user does, whose PYTHONPATH is an installed checkout."""
    words = command.split()
    assert words[:3] == ["python", "-m", "pytest"]
    return subprocess.run(
        [sys.executable, *words[1:]],
        cwd=project,
        # in the order of the file, as without our plugins
        env={**os.environ, "PYTHONPATH": str(project / "src"), "COLUMNS": "80", "PYTEST_ADDOPTS": "-p no:randomly"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_the_sound_code_passes_and_the_faulty_fails_as_shown(project: Path) -> None:
    sound, faulty = site_pages.read(NAME).commands
    done = run_tests(project, sound.text)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
    done = run_tests(project, faulty.text)
    assert faulty.output is not None
    assert site_pages.matches(faulty.output, done.stdout.splitlines()), done.stdout


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_the_remedy_of_the_page_passes(project: Path) -> None:
    text = (project / "src" / "project" / "warm.py").read_text()
    remedy = "min(1.0, (self.global_step + 1) / 25)"
    assert remedy in site_pages.path_of(NAME).read_text()
    (project / "src" / "project" / "warm.py").write_text(text.replace("min(1.0, self.calls / 100)", remedy))
    done = run_tests(project, "python -m pytest tests/test_warm.py")
    assert done.returncode == 0, done.stdout


def test_the_page_lists_every_test() -> None:
    from lockstep.testing import DataTests, ModuleTests

    text = site_pages.path_of(NAME).read_text()
    for tests in (ModuleTests, DataTests):
        names = [name for name in vars(tests) if name.startswith("test_")]
        assert [name for name in names if f"| `{name}` |" not in text] == []
