"""Which project a process belongs to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.commands import project_programs
from lockstep.errors import UserError
from lockstep.project import VARIABLE, Project, project, use_project_of


@pytest.fixture(autouse=True)
def no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return a process outside of any project, where none is installed."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    project.cache_clear()
    yield
    project.cache_clear()


def made(folder: Path) -> Path:
    """Return a project with nothing but its first page, and a program."""
    for name in ("conf/train.yaml", "src/train.py"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    return folder


def test_a_programs_project_is_the_one_above_its_file(tmp_path: Path) -> None:
    other, here = made(tmp_path / "other"), made(tmp_path / "here")
    use_project_of(other / "src" / "train.py")
    assert project() == Project(other)
    use_project_of(here / "src" / "train.py")
    assert (project().conf, project().train_program) == (here / "conf", here / "src" / "train.py")


def test_without_a_program_it_is_the_one_above_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, installed = made(tmp_path / "home"), made(tmp_path / "installed")
    monkeypatch.setattr("sys.path", [str(tmp_path / "src"), str(installed / "src")])
    assert project() == Project(installed)
    (home / "notes" / "deep").mkdir(parents=True)
    monkeypatch.chdir(home / "notes" / "deep")
    project.cache_clear()
    assert project() == Project(home)


def test_a_folder_in_the_outputs_of_a_project_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run there may be somebody else's, with pages and code in its folder."""
    home = made(tmp_path / "home")
    for folder, expected in ((made(home / "outputs" / "a" / "b"), home), (made(home / "more"), home / "more")):
        monkeypatch.chdir(folder)
        project.cache_clear()
        assert project() == Project(expected)


def test_no_project_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is in no project: the project's folder has conf/train\.yaml"):
        project()
    with pytest.raises(UserError, match="is in no project"):
        use_project_of(tmp_path / "train.py")


def test_a_program_s_function_is_taken_whatever_its_owner_calls_the_job(tmp_path: Path) -> None:
    programs = {
        "own": "def train(run, extra=None): return 'own'",
        "none": "",
    }
    projects = {name: Project(tmp_path / name) for name in programs}
    for name, text in programs.items():
        projects[name].source.mkdir(parents=True)
        projects[name].train_program.write_text(text)
    changed = projects["own"].function("train")
    assert changed(None) == "own", "lockstep parity would else train otherwise than src/train.py"
    with pytest.raises(UserError, match=r"train.py: it has no function train: it must define train\(job\)"):
        projects["none"].function("train")


def test_a_function_of_another_name_is_no_program(capsys: pytest.CaptureFixture[str]) -> None:
    def run(job: Any) -> None:
        raise AssertionError

    with pytest.raises(SystemExit) as end:
        project_programs.run(run, __file__)
    line = "the function's name says what the program does, and is run: it must be one of train, evaluate, predict"
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: lockstep.command: {line}\n")
