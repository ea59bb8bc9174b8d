"""Begin a project of your own in another folder, with this checkout's Lockstep in it:

    python scripts/new_project.py dogs ../dogs

src/project becomes src/dogs. The tests, measurements and pages of Lockstep itself are left out. The new folder is a git
repository. Its branch `lockstep` has only the files that this program wrote. To upgrade the project, run this program
with --upgrade in a newer checkout: it commits the new files to that branch. Then `git merge lockstep` in the project
combines them with your changes.
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
COPIED = (
    "conf",
    "src",
    "scripts",
    "Makefile",
    "pyproject.toml",
    "requirements.lock",
    ".gitignore",
    "outputs/.gitignore",
)
LEFT_OUT = ("scripts/lab", "scripts/new_project.py")
# Makefile targets that need files left out, or the kinds of our tests
TARGETS_LEFT_OUT = (
    *("quick", "coverage", "engines", "lab", "pages", "nightly"),
    *("docs", "docs-serve", "project"),
)
TESTS = '''"""Tests of your modules and data sets: see lockstep.testing. Add a class for each."""

if __name__ == "__main__":
    from lockstep import standard_streams

    standard_streams.protect()

from lockstep.testing import DataTests, ModuleTests


class TestMnistCNN(ModuleTests):
    overrides = ["model=mnist_cnn", "data=synthetic", "data.samples=200", "data.image_size=12"]


class TestDigits(DataTests):
    overrides = ["data=digits"]
'''
README = """# {name}

    make train                                              # trains on digits, which need no download
    make train ARGS="model=resnet18 strategy=ddp devices=2"
    make test

The first command builds `.venv`. `python src/train.py --help` lists all settings.

    conf/          every setting; train.yaml is the front page
    src/{name}/    nets, one LightningModule, data sets
    src/lockstep/  Lockstep, which computes the same steps on any number of devices
    tests/         tests of src/{name}/

The branch `lockstep` has the files as Lockstep's `make project` wrote them. To upgrade to a newer Lockstep, run
`make project NAME={name} DIR=<this folder> ARGS=--upgrade` in its checkout, then `git merge lockstep` here.
"""


class Refused(Exception):
    """The command line has a mistake; the message is one line."""


def check_name(name: str) -> None:
    """Check that src/ can have a module of this name.

    Raises:
        Refused: a module can't have this name, or there is a module of this name already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise Refused(f"{name or 'NAME'}: must be a module's name: lower-case letters, digits and _, such as dogs")
    used_names = sys.stdlib_module_names | {"lockstep", "project", "train", "evaluate", "predict", "common"}
    if name in used_names or importlib.util.find_spec(name) is not None:
        raise Refused(f"{name}: a module of this name exists already: choose another name")


def write(name: str, folder: Path) -> None:
    """Write the files of a project into an empty folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for copied in COPIED:
        source = ROOT / copied
        if source.is_dir():
            shutil.copytree(source, folder / copied, ignore=ignored)
        else:
            (folder / copied).parent.mkdir(exist_ok=True)
            shutil.copy(source, folder / copied)
    for left_out in LEFT_OUT:
        path = folder / left_out
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copy(ROOT / "LICENSE", folder / "src" / "lockstep" / "LICENSE")
    (folder / "src" / "project").rename(folder / "src" / name)
    files_naming_project = [
        *(folder / "src" / name).rglob("*.py"),
        *(folder / "src").glob("*.py"),
        *(folder / "conf").rglob("*.yaml"),
    ]
    for path in files_naming_project:
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
        (r'"src", "scripts", "tests"', '"src", "tests"'),
    )
    if (ruff := Path(sys.executable).with_name("ruff")).exists():  # sort the imports again by the new name
        for command in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
            subprocess.run([ruff, *command, "--no-cache", "src"], cwd=folder, check=True)
    targets = "|".join(TARGETS_LEFT_OUT)
    _replace(
        folder / "Makefile",
        (rf"(?m)^(?:{targets}):.*\n(?:\t.*\n)*\n?", ""),
        (r"(?m)^\.PHONY:.*$", lambda match: re.sub(rf" (?:{targets})(?= |$)", "", match[0])),
        (r"(?m)^\t.*extras_of_the_core.*\n", ""),  # a command of `make lint` that needs a file of tests/
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
    author = {f"GIT_{role}_{field}": "lockstep" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    # In a hook, git sets GIT_* variables that point to another repository: leave them out.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    variables = inherited | author | environment
    result = subprocess.run(["git", *arguments], cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if result.returncode:
        raise Refused(f"git {arguments[0]} in {folder}: {result.stderr.strip().partition(chr(10))[0]}")
    return result.stdout.strip()


def commit(name: str, folder: Path) -> bool:
    """Commit the project's files to BRANCH without touching the checked-out files. Return False if nothing is new."""
    with tempfile.TemporaryDirectory() as temporary:
        files, index = Path(temporary) / "files", str(Path(temporary) / "index")
        files.mkdir()
        write(name, files)
        variables = {"GIT_DIR": git(folder, "rev-parse", "--absolute-git-dir"), "GIT_INDEX_FILE": index}
        git(files, "add", "--all", GIT_WORK_TREE=str(files), **variables)
        tree = git(files, "write-tree", **variables)
    previous_commit = git(folder, "for-each-ref", "--format=%(objectname)", f"refs/heads/{BRANCH}")
    if previous_commit and git(folder, "rev-parse", f"{previous_commit}^{{tree}}") == tree:
        return False
    parent = ["-p", previous_commit] if previous_commit else []
    new_commit = git(folder, "commit-tree", tree, *parent, "-m", "Files written by Lockstep's `make project`")
    git(folder, "update-ref", f"refs/heads/{BRANCH}", new_commit)
    return True


def begin(name: str, folder: Path) -> str:
    """Make the project's folder and its first commit. Return what to do next, as text for the user."""
    check_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder}: exists already: name a new folder, or give --upgrade")
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(name, folder)
    git(folder, "checkout", "--quiet", "-B", "main", BRANCH)
    return f"{folder} is ready:\n    cd {folder}\n    make train\n    make test"


def upgrade(name: str, folder: Path) -> str:
    """Commit this checkout's files to BRANCH of a project. Return what to do next, as text for the user."""
    if not (folder / ".git").exists() or not git(folder, "branch", "--list", BRANCH):
        raise Refused(f"{folder}: has no branch {BRANCH}: --upgrade is for a project that `make project` made")
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
    parser.add_argument(
        "--upgrade", action="store_true", help="commit this Lockstep to the branch `lockstep` of a project"
    )
    options = parser.parse_args()
    if shutil.which("git") is None:
        sys.exit("error: git is not installed: a project is a git repository")
    try:
        print((upgrade if options.upgrade else begin)(options.name, Path(os.path.abspath(options.folder))))
    except (Refused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
