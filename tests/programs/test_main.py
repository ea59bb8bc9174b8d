"""The command `lockstep`: what it lists, what it refuses, and what it imports."""

import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import ROOT, python

from lockstep.errors import UserError
from lockstep.programs import main
from lockstep.project import VARIABLE, project

IMPORTED = """
import sys
from lockstep.programs.main import main
sys.argv = ["lockstep", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print(end.code, *sorted({"torch", "hydra", "lightning", "omegaconf", "pydantic"} & set(sys.modules)))
"""


def test_each_module_is_a_command_with_one_line() -> None:
    """A module's docstring begins with that line, and shows how the command is called."""
    files = {path.stem for path in ROOT.glob("src/lockstep*/programs/*.py")} - {"__init__", "main"}
    assert {module.rpartition(".")[2] for module in main.commands().values()} == files
    assert {"compare", "export", "fit-memory", "parity", "proof", "schema", "search"} <= set(main.commands())
    lines = dict(re.findall(r"^  ([a-z-]+) +(\S.*\S)$", main.help_text(), re.MULTILINE))
    assert lines.keys() == main.commands().keys()
    for name, module in main.commands().items():
        text = (ROOT / "src" / f"{module.replace('.', '/')}.py").read_text()
        assert text.startswith(f'"""{lines[name]}')
        assert f"\n    lockstep {name}" in text.split('"""')[1]
        assert "\ndef main(" in text


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("parit", "did you mean parity?"), ("fit_memory", "did you mean fit-memory?"), ("main", "known: compare, ")],
)
def test_an_unknown_command_is_refused_with_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"lockstep {name}: no such command: {nearest}")):
        main.run(name, [])


@pytest.mark.parametrize("name", ["fit-memory", "parity", "schema"])
def test_a_command_that_needs_a_project_refuses_to_run_without_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).name != "src"])
    monkeypatch.setattr(sys, "argv", ["lockstep", name, *["lr=1"] * (name != "schema")])
    project.cache_clear()
    with pytest.raises(SystemExit) as end:
        main.main()
    monkeypatch.undo()
    project.cache_clear()
    refusal = f"error: {tmp_path} is in no project: the project's folder has conf/train.yaml\n"
    assert (end.value.code, capsys.readouterr().err) == (2, refusal)


def test_the_project_is_no_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable is for processes that a command starts."""
    for name in ("here", "other"):
        (tmp_path / name / "conf").mkdir(parents=True)
        (tmp_path / name / "conf" / "train.yaml").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other"))
    project.cache_clear()
    assert project().root == tmp_path / "other"  # the control
    project.cache_clear()
    monkeypatch.setattr(sys, "argv", ["lockstep", "conf", "optimizer/adamw"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        main.main()
    project.cache_clear()
    assert end.value.code == 0, capsys.readouterr().err
    assert (tmp_path / "here" / "conf" / "optimizer" / "adamw.yaml").exists()


def test_a_file_that_can_not_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "else")
    (tmp_path / "file").touch()
    for folder, reason in (("link", "File exists"), ("file/sub", "Not a directory"), ("x" * 300, "File name too long")):
        monkeypatch.setattr(sys, "argv", ["lockstep", "new", "dogs_of_mine", str(tmp_path / folder)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as end:
            main.main()
        assert (end.value.code, capsys.readouterr().err) == (2, f"error: {tmp_path / folder}: {reason}\n")


@pytest.mark.usefixtures("processes")
def test_the_list_needs_neither_torch_nor_hydra() -> None:
    assert python(IMPORTED, "--help").stdout.endswith("describes one of them.\n0\n")
    assert python(IMPORTED, "schema", "--help").stdout.splitlines()[-1] == "0 hydra omegaconf pydantic"  # the control


@pytest.mark.usefixtures("processes")
def test_python_runs_the_command_without_its_script() -> None:
    done = python("import runpy; runpy.run_module('lockstep', run_name='__main__')", "shema")
    assert (done.returncode, done.stderr) == (2, "error: lockstep shema: no such command: did you mean schema?\n")


def test_the_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"lockstep": f"{main.__name__}:{main.main.__name__}"}


def test_the_version_is_that_of_the_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", "--version"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert (end.value.code, capsys.readouterr().out) == (0, f"lockstep {version('pytorch-lockstep')}\n")


def test_a_package_that_a_format_needs_is_missed_before_the_command_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    with pytest.raises(UserError, match=r"^format=onnx needs onnx and onnxscript: pip install onnx onnxscript; "):
        main.run("export", ["checkpoint=last", "format=onnx"])
