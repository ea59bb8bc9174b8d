"""The repository itself: installs from hashed pins, names no machine, and says only what is there."""

import ast
import os
import re
import subprocess
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import lockstep

pytestmark = pytest.mark.usefixtures("whole_run")

ROOT = Path(__file__).resolve().parent.parent
HOST = re.compile(
    r"pypi\.(?:org|python)|pythonhosted\.|download\.pytorch\.org|(?:ana)?conda\.(?:org|com)|index-url[= ]\S*//"
)
MACHINE = re.compile(r"(?<![\w.$}-])/(?:work|root|home|Users|opt|tmp/[a-z]+)/\w|(?<![\w-])shared[/]\w")
PIN = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>\S+)")


def tracked() -> list[Path]:
    """Return what a clone would hold, files not yet committed included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def texts() -> dict[Path, str]:
    return {path.relative_to(ROOT): path.read_text(errors="replace") for path in tracked()}


def pins(python: str) -> dict[str, str]:
    """Return the versions in requirements.lock by name, for a version of Python on Linux."""
    lines = [line.rstrip("\\ ") for line in (ROOT / "requirements.lock").read_text().splitlines() if PIN.match(line)]
    chosen = [pin for pin in map(Requirement, lines) if serves(pin, python)]
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in chosen}


def serves(requirement: Requirement, python: str) -> bool:
    """Return whether a requirement is for this version of Python on Linux."""
    environment = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    return requirement.marker is None or requirement.marker.evaluate(environment)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("pattern", [HOST, MACHINE], ids=["registry hosts", "machine paths"])
def test_no_file_names(pattern: re.Pattern[str]) -> None:
    hits = [f"{path}: {match[0]}" for path, text in texts().items() for match in pattern.finditer(text)]
    assert not hits


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (HOST, "--index-url " + "https://mirror"),
        (HOST, "files.python" + "hosted.org"),
        (MACHINE, "cd /ro" + "ot/x"),
        (MACHINE, "see sha" + "red/x"),
    ],
)
def test_the_patterns_can_fail(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)


@pytest.mark.usefixtures("processes")
def test_no_second_lock_and_nothing_large() -> None:
    assert not {"uv.lock", "poetry.lock", "Pipfile.lock"} & {path.name for path in tracked()}
    assert not [path for path in tracked() if path.stat().st_size > 1_000_000]


def test_every_line_of_the_lock_is_pinned_and_hashed() -> None:
    joined = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    lines = [line for line in joined if line.strip() and not line.lstrip().startswith("#")]
    assert lines
    assert [line for line in lines if not PIN.match(line) or "--hash=sha256:" not in line] == []


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_the_lock_serves_what_pyproject_asks_for(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = pins(python)
    for wanted in map(Requirement, project["dependencies"] + project["optional-dependencies"]["dev"]):
        if serves(wanted, python):
            assert wanted.name in locked, f"{wanted.name} is not in requirements.lock: make lock"
            version = locked[wanted.name]
            assert wanted.specifier.contains(version, prereleases=True), f"{wanted} but locked {version}: make lock"


def test_python_3_14_gets_the_hydra_that_starts_with_it() -> None:
    assert pins("3.13")["hydra-core"].startswith("1.3.")
    assert pins("3.14")["hydra-core"].startswith("1.4.")


def test_ci_runs_the_documented_commands() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    kinds = {"make lint", "make docs", "make test", "make engines"}
    assert kinds <= set(script.read_text().splitlines())
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = {command for job in jobs.values() for step in job["steps"] for command in [step.get("run", "")]}
    missing = {kind for kind in kinds - {"make docs"} if not any(kind in command for command in commands)}
    assert missing <= {"make test", "make engines"} & set(jobs["tests"]["strategy"]["matrix"]["command"])
    assert any("make pages" in command for command in commands)


PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_what_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = "\n".join([*re.findall(r"`+([^`]+)`+", text), *re.findall(r"^ {4}(.+)$", text, flags=re.MULTILINE)])
    assert set(re.findall(r"\bmake ([a-z]+)", commands)) <= targets
    programs = re.findall(r"(?:python|torchrun|bash)\b[^\n]*?\s((?:src|scripts)/[\w/.-]+)", commands)
    assert [name for name in programs if not (ROOT / name).is_file()] == []
    links = re.findall(r"\]\((?!http)([^)#]+\.(?:md|py|json))", text)
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).is_file()] == []


# --- CONTRIBUTING.md and the pre-commit hooks ---

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_rooms_stand_in_the_order_that_is_checked() -> None:
    rows = re.findall(r"^\| (`.*?`) \| ", CONTRIBUTING, re.MULTILINE)
    named = [set(re.findall(r"`(\w+)/?`", row)) for row in rows]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["name"] == "rooms")
    assert named == [set(layer.split(" | ")) for layer in reversed(layers)]


def test_hooks_are_local_and_run_what_exists() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    lint = re.findall(r"\$\(BIN\)/(.+)", (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0])
    entries = {hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") for hook in hooks}
    assert {"ruff format" if command == "ruff format --check" else command for command in lint} < entries


# --- tests of promises know the public surface only -------------------------------------------------------------------

PUBLIC = {f"lockstep.{name}" for name in lockstep.__all__} | {"lockstep", "lockstep.testing"}


def imports_of(text: str) -> set[str]:
    """Return the modules and names that a module imports, also in programs that it writes as strings: `a.b` for each
    `from a import b` and `import a.b`."""
    tree = ast.parse(text)
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=str(module), names=aliases):
                names |= {f"{module}.{alias.name}" for alias in aliases}
            case ast.Constant(value=str(program)) if re.search(r"^\s*(from|import) \w", program, re.MULTILINE):
                with suppress(SyntaxError, ValueError):
                    names |= imports_of(program)
    return names


def internals_in(text: str) -> list[str]:
    """Return what a module imports of the library beside its public names, and from other tests."""
    names = imports_of(text)
    of_library = {name for name in names if name.split(".")[0] == "lockstep"} - PUBLIC
    public = {name for name in of_library if name.startswith("lockstep.testing.")}
    return sorted((of_library - public) | {name for name in names if re.search(r"(^|\.)test_", name)})


def promise_files(folder: Path) -> list[Path]:
    """Return the tests of promises, and the helpers that no other test uses."""
    promises = sorted(folder.glob("test_promise_*.py"))
    users: dict[str, set[Path]] = {}
    for path in folder.rglob("*.py"):
        for name in {name.split(".")[0] for name in imports_of(path.read_text())}:
            users.setdefault(name, set()).add(path)
    files, size = set(promises), 0
    while size < len(files):  # a helper may have helpers
        size = len(files)
        helpers = [path for path in folder.glob("*.py") if not path.name.startswith("test_")]
        files |= {path for path in helpers if path.stem in users and users[path.stem] <= files}
    return sorted(files)


def test_tests_of_promises_import_public_names_only() -> None:
    """So that a file which moves inside the library breaks none of them. What needs internals is in a room's folder."""
    files = promise_files(ROOT / "tests")
    assert len(files) >= 12
    assert {path.name: internals for path in files if (internals := internals_in(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("text", "internals"),
    [
        ("from lockstep import compose, hash64\nimport lockstep\nfrom lockstep.testing import ModuleTests", []),
        ("def f():\n    from lockstep.errors import UserError", ["lockstep.errors.UserError"]),
        ("import lockstep.commands.cli", ["lockstep.commands.cli"]),
        ("from lockstep import files", ["lockstep.files"]),
        ("P = '''\nimport os\nfrom lockstep.commands import cli\n'''", ["lockstep.commands.cli"]),
        ("from callbacks.test_dashboard import Board", ["callbacks.test_dashboard.Board"]),
    ],
)
def test_an_import_of_internals_is_seen(text: str, internals: list[str]) -> None:
    assert internals_in(text) == internals


def test_a_helper_of_promises_alone_is_one_of_their_files(tmp_path: Path) -> None:
    for name, text in {
        "test_promise_1.py": "import one, both",
        "room/test_room.py": "import both",
        "one.py": "import two",
        "two.py": "",
        "both.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [path.stem for path in promise_files(tmp_path)] == ["one", "test_promise_1", "two"]


# --- CONTRIBUTING.md: promise, tests, controls ---


def test_each_promise_names_tests_and_controls_that_exist() -> None:
    section = CONTRIBUTING.partition("\n## Promises and their tests\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d)\..* \| (whole run|control) \| `(\w+)` \|", section, re.MULTILINE)
    assert len(rows) == section.count("\n| ") - 1, "all lines but the head"
    for kind in ("whole run", "control"):
        assert {number for number, of, _ in rows if of == kind} == set("123456789")
    texts = [path.read_text() for path in (ROOT / "tests").glob("test_promise_*.py")]
    functions = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    assert {name for _, _, name in rows} <= functions
