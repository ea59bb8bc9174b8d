"""Whoever deletes an extra's files has a project without it, in which all else still works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY
from extras_of_the_core import extras, files_of, named_in_the_core

EXTRAS = extras()
PROGRAMS = Path(sys.executable).parent


def copied(folder: Path) -> Path:
    """Return a copy of this checkout."""
    folder.mkdir()
    for part in (".gitignore", "pyproject.toml", "README.md", "mkdocs.yml", "src", "conf", "tests", "scripts", "docs"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, folder / part)
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for command in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def remove(names: list[str], root: Path) -> None:
    for path in [path for name in names for path in files_of(name, root)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=900)


def broken(root: Path, promises: list[str]) -> str:
    """Return the output of the first check that fails in a checkout; nothing where all pass. `promises` are test files
    of which the fast half is run."""
    python, train = sys.executable, "src/train.py"
    for command in (
        (str(PROGRAMS / "ruff"), "check", "--no-cache"),
        (str(PROGRAMS / "lint-imports"), "--no-cache"),
        (python, "tests/extras_of_the_core.py"),
        (python, "-m", "mkdocs", "build", "--strict", "--quiet"),
        (python, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache")),
        (python, train, "--help"),
        (python, train, *TINY, "max_steps=2", "exact=true", "strategy=ddp", "devices=2"),
        (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "unit or ranks", *promises),
    ):
        done = run(root, *command)
        if done.returncode:
            return f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return ""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "names",
    [
        *([name] for name in EXTRAS),
        EXTRAS,
    ],
    ids="+".join,
)
@pytest.mark.nightly
def test_all_else_works_without(names: list[str], tmp_path: Path) -> None:
    root = copied(tmp_path / "project")
    remove(names, root)
    assert not set(names) & set(extras(root))
    promises = [str(path.relative_to(root)) for path in sorted(root.glob("tests/test_promise_*.py"))]
    if len(names) == 1:  # all are run where all extras are gone
        promises = [path for path in promises if path.endswith(("batch_size.py", "data_order.py", "gradient.py"))]
    assert not broken(root, promises)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("package", "works", "refused", "message"),
    [
        (
            "lockstep_extras",
            ["extras=[audit]", "strategy=ddp", "devices=2"],
            "extras=[audit]",
            "extras=audit: known: none",
        ),
        ("lockstep_streams", [], "data=shards", "data=shards: known: cifar10, "),
    ],
)
def test_lockstep_works_without_a_package_beside_it(
    package: str, works: list[str], refused: str, message: str, tmp_path: Path
) -> None:
    for part in ("src", "conf"):
        shutil.copytree(ROOT / part, tmp_path / part)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    # This checkout may be installed, so a program would find its packages.
    alone = f"import sys, runpy; sys.path.remove({str(ROOT / 'src')!r}) if {str(ROOT / 'src')!r} in sys.path else 0"
    program = f"{alone}; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    train = (sys.executable, "-c", program, "src/train.py", *TINY, "max_steps=2", "exact=true")
    assert run(tmp_path, *train, *works).returncode == 0  # the control
    assert message not in run(tmp_path, *train, refused, "lr=-1").stderr
    shutil.rmtree(tmp_path / "src" / package)
    assert run(tmp_path, *train).returncode == 0
    assert message in run(tmp_path, *train, refused).stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", EXTRAS)
def test_an_import_in_the_core_is_noticed(name: str, tmp_path: Path) -> None:
    """The control."""
    root = copied(tmp_path / "project")
    with open(root / "src" / "lockstep" / "step" / "passes.py", "a") as file:
        file.write(f"\nimport lockstep_extras.{name}  # noqa: E402, F401\n")
    assert [line for line in named_in_the_core(root) if f"import lockstep_extras.{name}" in line]
    assert run(root, str(PROGRAMS / "lint-imports"), "--no-cache").returncode
    remove([name], root)
    assert run(root, sys.executable, "src/train.py", *TINY, "max_steps=1").returncode
