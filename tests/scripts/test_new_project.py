"""`make project`: a new project trains and passes its tests, takes a newer Lockstep, and bad names end in one line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import new_project
import pytest
from conftest import ROOT, summary_of

pytestmark = pytest.mark.usefixtures("processes")

ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("GIT_")}


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """Return what a command prints."""
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def git(folder: Path, *arguments: str) -> str:
    return run("git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments, cwd=folder)


def make(checkout: Path, *arguments: str | Path, code: int = 0) -> str:
    return run(sys.executable, checkout / "scripts" / "new_project.py", *arguments, cwd=checkout, code=code)


@pytest.fixture(scope="module")
def dogs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new project with the environment of these tests."""
    folder = tmp_path_factory.mktemp("projects") / "dogs"
    assert f"cd {folder}" in make(ROOT, "dogs", folder)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".git" / "info" / "exclude").write_text(".venv\n")  # .gitignore has the folder .venv/, not a link
    return folder


def test_its_two_commands_work(dogs: Path) -> None:
    assert git(dogs, "log", "--oneline").count("\n") == 1
    assert git(dogs, "status", "--short") == ""
    # `-o`: the environment is not built again; `false`: not by mistake either
    without_setup = ("make", "-o", ".venv/.from-lock", "PYTHON=false")
    short = "ARGS=strategy=ddp devices=2 max_steps=3 data=synthetic optimizer=muon threads=1"
    run(*without_setup, "train", short, cwd=dogs)
    (summary,) = map(summary_of, (dogs / "outputs").glob("*/*"))
    assert (summary["status"], summary["steps"], summary["model"]) == ("completed", 3, "mnist_cnn")
    tested = run(*without_setup, "test", "ARGS=-n 0", cwd=dogs)
    assert " passed" in tested
    assert "failed" not in tested
    assert git(dogs, "status", "--short") == "", "no run is committed by mistake"


def test_nothing_of_ours_is_left(dogs: Path) -> None:
    for name in ("scripts/lab", "docs", "src/project", "tests/conftest.py"):
        assert (ROOT / name).exists()
        assert not (dogs / name).exists()
    program = (
        "import dogs.models, lockstep, pathlib; print(*(pathlib.Path(m.__file__).parents[1] for m in (dogs, lockstep)))"
    )
    assert run(sys.executable, "-c", program, cwd=dogs / "src").split() == [str(dogs / "src")] * 2
    texts = [path.read_text() for path in [*dogs.glob("src/dogs/**/*.py"), *dogs.glob("conf/**/*.yaml")]]
    assert [text for text in texts if "import project" in text or "from project" in text or ": project." in text] == []
    bin = Path(sys.executable).parent
    for lint in (("ruff", "check", "--no-cache"), ("ruff", "format", "--check", "--no-cache")):
        run(bin / lint[0], *lint[1:], cwd=dogs)


def test_a_newer_lockstep_is_merged(dogs: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    for part in (*new_project.COPIED, "LICENSE"):
        (newer / part).parent.mkdir(exist_ok=True)
        copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copied(ROOT / part, newer / part)
    with (newer / "src" / "lockstep" / "text.py").open("a") as file:
        file.write("NEWER = True\n")
    page = (newer / "conf" / "train.yaml").read_text()
    (newer / "conf" / "train.yaml").write_text(page.replace("\nlog_every: 50", "\nlog_every: 40"))
    mine = (dogs / "conf" / "train.yaml").read_text()
    (dogs / "conf" / "train.yaml").write_text(mine.replace("\nseed: 0", "\nseed: 7"))
    (dogs / "src" / "dogs" / "poodle.py").write_text("BARKS = True\n")
    git(dogs, "add", "conf", "src")
    git(dogs, "commit", "-qm", "mine")
    assert "has this Lockstep already" in make(ROOT, "dogs", dogs, "--upgrade")
    assert "git merge lockstep" in make(newer, "dogs", dogs, "--upgrade")
    assert "log_every: 50" in (dogs / "conf" / "train.yaml").read_text(), "nothing is changed before the merge"
    git(dogs, "merge", "-q", "-m", "newer", "lockstep")
    merged = (dogs / "conf" / "train.yaml").read_text()
    assert "\nseed: 7" in merged
    assert "\nlog_every: 40" in merged
    assert (dogs / "src" / "lockstep" / "text.py").read_text().endswith("NEWER = True\n")
    assert (dogs / "src" / "dogs" / "poodle.py").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Dogs", "new"), "error: Dogs: must be a module's name"),
        (("", "new"), "error: NAME: must be a module's name"),
        (("torch", "new"), "error: torch: a module of this name exists already"),
        (("project", "new"), "error: project: a module of this name exists already"),
        (("cats", "full"), "/full: exists already: name a new folder, or give --upgrade"),
        (("cats", "full", "--upgrade"), "/full: has no branch lockstep: --upgrade is for a project"),
    ],
)
def test_what_cant_be_made_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    name, folder, *more = arguments
    printed = make(ROOT, name, tmp_path / folder, *more, code=2)
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_the_name_of_another_project_is_refused(dogs: Path) -> None:
    assert "branch lockstep has no src/cats" in make(ROOT, "cats", dogs, "--upgrade", code=2)
