"""`lockstep new`: a small project that trains, passes its tests, and takes a newer Lockstep without a change."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT, summary_of

pytestmark = pytest.mark.usefixtures("processes")

ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("GIT_")}
WITHOUT_SETUP = ("make", "-o", ".venv/.installed", "PYTHON=false")  # `false`: not by mistake either
SHORT = "max_steps=3 data=synthetic optimizer=muon threads=1"


def run(*command: str | Path, cwd: Path, code: int = 0, path: Path = ROOT / "src") -> str:
    """Return what a command prints."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def new(cwd: Path, *arguments: str | Path, code: int = 0) -> str:
    return run(sys.executable, "-m", "lockstep", "new", *arguments, cwd=cwd, code=code)


def with_environment(folder: Path) -> Path:
    """Return a project that has the environment of these tests."""
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture(scope="module")
def dogs(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new project."""
    above = tmp_path_factory.mktemp("projects")
    assert f"cd {above / 'dogs'}" in new(above, "dogs")
    return with_environment(above / "dogs")


def test_its_two_commands_work(dogs: Path) -> None:
    assert run("git", "log", "--oneline", cwd=dogs).count("\n") == 1
    run(*WITHOUT_SETUP, "train", f"ARGS=strategy=ddp devices=2 {SHORT}", cwd=dogs)
    (summary,) = map(summary_of, (dogs / "outputs").glob("*/*"))
    assert (summary["status"], summary["steps"], summary["model"]) == ("completed", 3, "mnist_cnn")
    tested = run(*WITHOUT_SETUP, "test", "ARGS=-q", cwd=dogs)
    assert " passed" in tested
    assert "failed" not in tested
    assert run("git", "status", "--short", cwd=dogs) == "", "no run is committed by mistake"


def test_it_is_small_and_nothing_of_ours_is_left(dogs: Path) -> None:
    files = [dogs / name for name in run("git", "ls-files", cwd=dogs).split()]
    assert len(files) <= 45
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1500
    assert [file for file in files if "project.models" in (text := file.read_text()) or "import project" in text] == []
    home = run(sys.executable, "-c", "import dogs.models; print(dogs.__file__)", cwd=dogs / "src")
    assert home.startswith(str(dogs / "src"))
    assert "pytorch-lockstep" in (dogs / "pyproject.toml").read_text()


def test_a_pin_can_be_chosen(tmp_path: Path) -> None:
    output = new(tmp_path, "cats", "--require", "pytorch-lockstep==9.9")
    assert output.splitlines()[-1] == "it requires pytorch-lockstep==9.9: pyproject.toml has the line"
    assert '"pytorch-lockstep==9.9",' in (tmp_path / "cats" / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("pin", "right"),
    [
        (
            "pytorch-lockstep @ git+file:///srv/lockstep.git@abc",
            "pip before 24.1 can't install this requirement: ",
        ),
        ("lockstep==1.0", "must be a requirement, such as pytorch-lockstep==0.1.0"),
        ("../lockstep", "must be a requirement, such as"),
    ],
)
def test_a_pin_that_pip_can_not_install_is_refused(pin: str, right: str, tmp_path: Path) -> None:
    output = new(tmp_path, "cats", "--require", pin, code=2)
    assert right in output
    assert output.count("\n") == 1
    assert not (tmp_path / "cats").exists()


def test_it_has_the_versions_that_are_installed(dogs: Path) -> None:
    lines = (dogs / "requirements.lock").read_text().splitlines()
    assert f"torch=={metadata.version('torch').partition('+')[0]}" in lines
    assert {"pytest", "hydra-core", "numpy"} <= {line.partition("==")[0] for line in lines}
    assert not [line for line in lines if "lockstep" in line and line[0] != "#"]
    assert not [line for line in lines if line.startswith(("ruff", "timm", "wandb"))], "no extra"


@pytest.mark.parametrize("name", ["Dogs", "2dogs", "my-dogs", "class", "torch", "json", "lockstep", "train", ""])
def test_a_name_that_can_not_be_a_package_is_refused(name: str, tmp_path: Path) -> None:
    output = new(tmp_path, name, "folder", code=2)
    assert output.startswith(f"error: {name or 'NAME'}: ")
    assert output.count("\n") == 1
    assert not (tmp_path / "folder").exists()


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "dogs").mkdir()
    (tmp_path / "dogs" / "mine.txt").write_text("mine")
    output = new(tmp_path, "dogs", code=2)
    assert output == f"error: {tmp_path / 'dogs'}: exists already: name a new folder\n"
    assert [path.name for path in (tmp_path / "dogs").iterdir()] == ["mine.txt"]
