"""Begin a project of your own:

    lockstep new dogs

The folder dogs/ gets a config, a net, a data set, the programs and one test: what you own and edit. It depends on
Lockstep as a package. A newer Lockstep is a newer version of that package, and touches no file of yours.
"""

import importlib.util
import json
import keyword
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from lockstep.errors import UserError
from lockstep.programs.common.parser import parser_of
from lockstep.programs.common.template import PACKAGE, copy_template, template

DISTRIBUTION = "pytorch-lockstep"
TAKEN = {"lockstep", "project", "train", "evaluate", "predict", "src", "tests", "conf"}

FILES = Path(__file__).with_name("new_project")  # texts of a project's files; their names end with .txt


def check_name(name: str) -> None:
    """Check that src/ can have a package of this name.

    Raises:
        UserError: a package can't have this name, or there is a module of this name already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"{name or 'NAME'}: must be a package's name: lower-case letters, digits and _, such as dogs")
    if name in sys.stdlib_module_names | TAKEN or importlib.util.find_spec(name) is not None:
        raise UserError(f"{name}: a module of this name exists already: choose another name")


def requirement() -> str:
    """Return what a project must require to get this very Lockstep."""
    if (source := template()) != PACKAGE / "template":  # it runs from a checkout, installed or not
        return f"{DISTRIBUTION} @ {source.as_uri()}"
    installed = metadata.distribution(DISTRIBUTION)
    major, minor, *_ = installed.version.split(".")
    text = installed.read_text("direct_url.json")  # PEP 610: pip writes it if it got a URL, a file or a folder
    if not text:
        return f"{DISTRIBUTION}>={installed.version},<{major}.{int(minor) + 1}"
    origin = json.loads(text)
    if of_git := origin.get("vcs_info"):
        return f"{DISTRIBUTION} @ {of_git['vcs']}+{origin['url']}@{of_git['commit_id']}"
    return f"{DISTRIBUTION} @ {origin['url']}"


def check_pin(pin: str) -> None:
    """Check that pip can install a requirement of Lockstep.

    Raises:
        UserError: it can't, or it is no requirement of Lockstep.
    """
    if "git+file:" in pin:
        right = f'clone it, and give --require "{DISTRIBUTION} @ file:///<the clone>"'
        raise UserError(f"{pin}: pip before 24.1 can't install this requirement: {right}")
    try:
        name = Requirement(pin).name
    except ValueError:
        name = ""
    if name.replace("_", "-").lower() != DISTRIBUTION:
        raise UserError(f"--require {pin}: must be a requirement, such as {DISTRIBUTION}==0.1.0")


def locked() -> str:
    """Return the versions of all that Lockstep and a project's tests require here, a line each, for pip."""
    versions: dict[str, str] = {}
    left = [DISTRIBUTION, "pytest"]
    while left:
        required = Requirement(left.pop())
        name = required.name.replace("_", "-").lower()
        if name in versions or (required.marker and not required.marker.evaluate({"extra": ""})):
            continue
        if _is_installed(name):
            versions[name] = Version(metadata.version(name)).public  # of 2.11.0+cpu, say, 2.11.0
            left += metadata.requires(name) or ()
    lines = (f"{name}=={version}\n" for name, version in sorted(versions.items()) if name != DISTRIBUTION)
    return "".join(lines)


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def write(name: str, folder: Path, pin: str) -> None:
    """Write the files of a project into an empty folder.

    Args:
        name: the name of its package.
        folder: the project's folder.
        pin: the requirement of Lockstep.
    """
    copy_template(template(), folder)
    (folder / "src" / "project").rename(folder / "src" / name)
    for path in [*(folder / "src").rglob("*.py"), *(folder / "conf").rglob("*.yaml")]:
        text = re.sub(r"\b((?:from|import) )project\b", rf"\g<1>{name}", path.read_text())
        path.write_text(re.sub(r"\bproject\.(?=(?:models|data)\b)", f"{name}.", text))
    words = {"name": name, "pin": json.dumps(pin), "locked": locked(), "python": platform.python_version()}
    for file in FILES.rglob("*.txt"):
        target, text = file.relative_to(FILES).with_suffix("").as_posix(), file.read_text()
        for word, value in words.items():
            target, text = (each.replace(f"{{{word}}}", value) for each in (target, text))
        (folder / target).parent.mkdir(exist_ok=True)
        (folder / target).write_text(text)


def git(folder: Path, *arguments: str) -> None:
    """Run git in a folder.

    Raises:
        UserError: git failed.
    """
    author = {f"GIT_{role}_{field}": "lockstep" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    # In a hook, git sets GIT_* variables that point to another repository: leave them out.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    result = subprocess.run(
        ["git", *arguments], cwd=folder, env=inherited | author, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise UserError(f"git {arguments[0]} in {folder}: {result.stderr.strip().partition(chr(10))[0]}")


def main(words: list[str]) -> int:
    """Make the project's folder and its first commit, and print what to do next. Return the exit code.

    Raises:
        UserError: the name or the folder can't be taken.
    """
    parser = parser_of("new", __doc__)
    parser.add_argument("name", help="name of the package with your code, such as dogs")
    parser.add_argument("folder", nargs="?", type=Path, help="the project's folder; without it, the name")
    parser.add_argument("--require", metavar="PIN", help="the requirement of Lockstep; without it, the one that runs")
    options = parser.parse_args(words)
    folder = Path(os.path.abspath(options.folder or options.name))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already: name a new folder")
    check_name(options.name)
    if shutil.which("git") is None:
        raise UserError("git is not installed: a project is a git repository")
    pin = options.require or requirement()
    check_pin(pin)
    folder.mkdir(parents=True, exist_ok=True)
    write(options.name, folder, pin)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "A new project, as `lockstep new` wrote it")
    print(f"{folder} is ready:\n    cd {folder}\n    make train\n    make test")
    print(f"it requires {pin}: pyproject.toml has the line")
    if "file:" in pin:
        print("other machines don't have that place: for them, write a version or a git address there")
    return 0
