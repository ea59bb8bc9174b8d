"""Begin a project of your own in another folder, with this checkout's Lockstep in it:

    python scripts/new_project.py dogs ../dogs

src/project becomes src/dogs. The tests, measurements and pages of Lockstep itself stay here. The new folder is a git
repository. Its branch `lockstep` has what this program wrote, so with --upgrade, from a newer checkout, it writes that
again, and `git merge lockstep` in the project combines it with your changes.
"""

import argparse
import importlib.util
import keyword
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "lockstep"
COPIED = ("conf", "src", "scripts", "Makefile", "pyproject.toml", "requirements.lock", ".gitignore")
LEFT_OUT = ("scripts/lab", "scripts/new_project.py")
TARGETS_LEFT_OUT = ("proof", "docs", "docs-serve", "project")  # of the Makefile: they need what is left out
TESTS = '''"""Tests of your modules and data sets: see lockstep.testing. Add a class for each."""

import pytest

from lockstep.testing import DataTests, ModuleTests


@pytest.mark.slow
class TestMnistCNN(ModuleTests):
    overrides = ["model=mnist_cnn", "data=synthetic", "data.samples=200", "data.image_size=12"]


class TestDigits(DataTests):
    overrides = ["data=digits"]
'''
README = """# {name}

    make train                                              # digits; no download
    make train ARGS="model=resnet18 strategy=ddp devices=2"
    make test

The first command builds `.venv`. `python src/train.py --help` lists all settings.

    conf/          every choice; train.yaml is the front page
    src/{name}/    nets, one LightningModule, data sets
    src/lockstep/  Lockstep, which computes the same steps on any number of devices
    tests/         tests of src/{name}/

The branch `lockstep` has the files as Lockstep's `make project` wrote them. For a newer Lockstep: in its checkout
`make project NAME={name} DIR=<this folder> ARGS=--upgrade`, then here `git merge lockstep`.
"""


class Refused(Exception):
    """The command line has a mistake; the message is one line."""


def check_name(name: str) -> None:
    """Refuse a name that src/ can't have, or that a module has already.

    Raises:
        Refused: the name is such a one.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise Refused(f"{name or 'NAME'}: must be a module's name: lower-case letters, digits and _, such as dogs")
    taken = sys.stdlib_module_names | {"lockstep", "project", "train", "evaluate", "predict", "common"}
    if name in taken or importlib.util.find_spec(name) is not None:
        raise Refused(f"{name}: a module of this name exists already: choose another name")


def write(name: str, folder: Path) -> None:
    """Write the files of a project into an empty folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for part in COPIED:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=ignored)
        else:
            shutil.copy(source, folder / part)
    for part in LEFT_OUT:
        path = folder / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copy(ROOT / "LICENSE", folder / "src" / "lockstep" / "LICENSE")
    (folder / "src" / "project").rename(folder / "src" / name)
    renamed = [
        *(folder / "src" / name).rglob("*.py"),
        *(folder / "src").glob("*.py"),
        *(folder / "conf").rglob("*.yaml"),
    ]
    for path in renamed:
        _replace(
            path, (r"\b((?:from|import) )project\b", rf"\g<1>{name}"), (r"\bproject\.(?=[a-z_]+\.?\w)", f"{name}.")
        )
    (folder / "tests").mkdir()
    (folder / "tests" / f"test_{name}.py").write_text(TESTS)
    (folder / "README.md").write_text(README.format(name=name))
    _replace(
        folder / "pyproject.toml",
        (r'(?m)^name = "lockstep"$', f'name = "{name}"'),
        (r"(?m)^(description|license|license-files) = .*\n", ""),
        (r'"project(?=[*".])', f'"{name}'),
        (r'"scripts/lab[^"]*", ', ""),
    )
    if (ruff := Path(sys.executable).with_name("ruff")).exists():  # another name is sorted elsewhere among imports
        for command in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
            subprocess.run([ruff, *command, "--no-cache", "src"], cwd=folder, check=True)
    blocks = "|".join(TARGETS_LEFT_OUT)
    _replace(
        folder / "Makefile",
        (rf"(?m)^(?:{blocks}):.*\n(?:\t.*\n)*\n?", ""),
        (r"(?m)^\.PHONY:.*$", lambda line: re.sub(rf" (?:{blocks})(?= |$)", "", line[0])),
        (r"(?m)^\t.*extras_of_the_core.*\n", ""),
        (r", and that the core names no extra", ""),
    )


def _replace(path: Path, *changes: tuple[str, str | Callable[[re.Match[str]], str]]) -> None:
    """Replace patterns in a file."""
    text = path.read_text()
    for pattern, replacement in changes:
        text = re.sub(pattern, replacement, text)
    path.write_text(text)


def git(folder: Path, *arguments: str, **environment: str) -> str:
    """Run git in a folder. Return what it prints.

    Raises:
        Refused: git failed.
    """
    named = {f"GIT_{who}_{what}": "lockstep" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    outside = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}  # as in a hook of git
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=outside | named | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Refused(f"git {arguments[0]} in {folder}: {done.stderr.strip().partition(chr(10))[0]}")
    return done.stdout.strip()


def commit(name: str, folder: Path) -> bool:
    """Write the project's files as a commit to the branch, whatever is checked out. Return False if nothing is new."""
    with tempfile.TemporaryDirectory() as temporary:
        files, index = Path(temporary) / "files", str(Path(temporary) / "index")
        files.mkdir()
        write(name, files)
        places = {"GIT_DIR": git(folder, "rev-parse", "--absolute-git-dir"), "GIT_INDEX_FILE": index}
        git(files, "add", "--all", GIT_WORK_TREE=str(files), **places)
        tree = git(files, "write-tree", **places)
    before = git(folder, "for-each-ref", "--format=%(objectname)", f"refs/heads/{BRANCH}")
    if before and git(folder, "rev-parse", f"{before}^{{tree}}") == tree:
        return False
    parent = ["-p", before] if before else []
    new = git(folder, "commit-tree", tree, *parent, "-m", "Lockstep, as its make project writes it")
    git(folder, "update-ref", f"refs/heads/{BRANCH}", new)
    return True


def begin(name: str, folder: Path) -> str:
    """Make the folder and its first commit. Return what to do next."""
    check_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder}: exists already: name a new folder, or give --upgrade")
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(name, folder)
    git(folder, "checkout", "--quiet", "-B", "main", BRANCH)
    return f"{folder} is ready:\n    cd {folder}\n    make train\n    make test"


def upgrade(name: str, folder: Path) -> str:
    """Write this checkout's files to the branch of a project. Return what to do next."""
    if not (folder / ".git").exists() or not git(folder, "branch", "--list", BRANCH):
        raise Refused(f"{folder}: has no branch {BRANCH}: --upgrade is for a project that make project has made")
    if not git(folder, "ls-tree", BRANCH, f"src/{name}/"):
        raise Refused(f"{name}: branch {BRANCH} has no src/{name}: give the name that the project was made with")
    if not commit(name, folder):
        return f"{folder} has this Lockstep already"
    return f"branch {BRANCH} of {folder} has this Lockstep:\n    cd {folder}\n    git merge {BRANCH}"


def main() -> None:
    """Read the command line, and make or upgrade a project."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="name of the module with your code, such as dogs")
    parser.add_argument("folder", help="the project's folder", type=Path)
    parser.add_argument("--upgrade", action="store_true", help="write a newer Lockstep to the branch of a project")
    chosen = parser.parse_args()
    if shutil.which("git") is None:
        sys.exit("error: git is not installed: a project is a git repository")
    try:
        print((upgrade if chosen.upgrade else begin)(chosen.name, Path(os.path.abspath(chosen.folder))))
    except (Refused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
