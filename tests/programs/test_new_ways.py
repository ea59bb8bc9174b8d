"""`lockstep new` from each way of installing Lockstep: the project's two commands work, without an index.

Every environment is empty but for a folder of links to the packages of these tests, without Lockstep.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from conftest import ROOT, TIMEOUT, summary_of

pytestmark = pytest.mark.usefixtures("processes")

# `--no-build-isolation`, by a variable that pip reads the wrong way round
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_CACHE_DIR": "1", "OMP_NUM_THREADS": "1"}
LEFT_OUT = ("PYTHONPATH", "GIT_", "PIP_")
MARK = "WAYS = {}\n"  # a line that tells one state of the checkout from another


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(LEFT_OUT)} | OFFLINE
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def python(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program that makes environments: `<python> -m venv <folder>`."""
    folder = tmp_path_factory.mktemp("python")
    packages = folder / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "lockstep" not in path.name and not path.name.endswith(".pth"):
            (packages / path.name).symlink_to(path)
    program = folder / "python3"
    program.write_text(
        f'#!/bin/sh\n"{sys.executable}" -m venv --without-pip "$3"\n'
        f'for site in "$3"/lib/python3*/site-packages; do echo "{packages}" > "$site/packages.pth"; done\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    for name in ("src", "conf", "scripts", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "lab", "schema", "*.png", "benchmarks")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    mark(folder, 1)
    return folder


def mark(checkout: Path, number: int) -> None:
    """Change the library and not its version."""
    (checkout / "src" / "lockstep" / "ways.py").write_text(MARK.format(number))


def mark_of(environment: Path) -> str:
    code = "import lockstep.ways; print(lockstep.ways.WAYS, lockstep.__file__)"
    return run(environment / "bin" / "python", "-c", code, cwd=environment).split()[0]


def commit(checkout: Path) -> str:
    """Commit all of a checkout, for a server of plain files. Return the commit."""
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    run("git", "init", "--quiet", cwd=checkout)
    run("git", "add", "--all", cwd=checkout)
    run("git", *author, "commit", "--quiet", "-m", "all", cwd=checkout)
    run("git", "update-server-info", cwd=checkout)
    return run("git", "rev-parse", "HEAD", cwd=checkout).strip()


def wheel(checkout: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, checkout, cwd=checkout)
    shutil.rmtree(checkout / "build")
    (file,) = folder.glob("*.whl")
    return file


def installed(python: Path, folder: Path, *what: str | Path) -> Path:
    """Return a new environment with Lockstep in it."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *what, cwd=folder.parent)
    return folder


def made(environment: Path, python: Path) -> Path:
    """Return a new project whose two commands have run, with a Lockstep of its own."""
    project = environment.parent / "dogs"
    run(environment / "bin" / "lockstep", "new", "dogs", cwd=environment.parent)
    make = ("make", f"PYTHON={python}")
    run(*make, "train", "ARGS=max_steps=2 data=synthetic data.samples=120 threads=1 logger=none", cwd=project)
    (summary,) = map(summary_of, (project / "outputs").glob("*/*"))
    assert summary["status"] == "completed"
    assert " passed" in run(*make, "test", "ARGS=-q -k TestDigits", cwd=project)
    assert run("git", "status", "--short", cwd=project) == ""
    assert mark_of(project / ".venv") == "1"
    place = run(project / ".venv" / "bin" / "python", "-c", "import lockstep; print(lockstep.__file__)", cwd=project)
    assert place.startswith(str(project / ".venv")), "the control"
    return project


def set_up(project: Path, python: Path) -> str:
    run("make", f"PYTHON={python}", "setup", cwd=project)
    return mark_of(project / ".venv")


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_an_editable_checkout(python: Path, checkout: Path, tmp_path: Path) -> None:
    project = made(installed(python, tmp_path / "env", "--editable", checkout), python)
    assert checkout.as_uri() in (project / "pyproject.toml").read_text()
    mark(checkout, 2)
    (project / "pyproject.toml").touch()
    assert set_up(project, python) == "2"


@pytest.mark.nightly
def test_a_wheel(python: Path, checkout: Path, tmp_path: Path) -> None:
    file = wheel(checkout, tmp_path / "one")
    environment = installed(python, tmp_path / "env", file)
    elsewhere = checkout.rename(tmp_path / "gone")
    project = made(environment, python)
    mark(elsewhere, 2)
    shutil.copy(wheel(elsewhere, tmp_path / "two"), file)
    (project / "pyproject.toml").touch()
    assert set_up(project, python) == "2", "another wheel of the same version"


@pytest.mark.nightly
def test_a_commit_of_git(python: Path, checkout: Path, tmp_path: Path) -> None:
    first = commit(checkout)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.func.log_message = lambda *args: None  # type: ignore[attr-defined]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"git+http://127.0.0.1:{server.server_port}/a%20checkout/.git"
    try:
        project = made(installed(python, tmp_path / "env", f"pytorch-lockstep @ {url}@{first}"), python)
        mark(checkout, 2)
        replace(project / "pyproject.toml", first, commit(checkout))
        assert set_up(project, python) == "2", "another commit of the same version"
    finally:
        server.shutdown()
        server.server_close()


def test_an_index(python: Path, checkout: Path, tmp_path: Path) -> None:
    """One that has the version, as far as pip can tell: a folder of wheels."""
    folder = wheel(checkout, tmp_path / "index").parent
    environment = installed(python, tmp_path / "env", "--find-links", folder, "pytorch-lockstep")
    run(environment / "bin" / "lockstep", "new", "dogs", cwd=tmp_path)
    assert '"pytorch-lockstep>=0.1.0,<0.2",' in (tmp_path / "dogs" / "pyproject.toml").read_text()
