"""Training from Python: docs/library.md literally, from a parent that has computed and has no file."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, Program, forked, python, summary_of

import lockstep
from lockstep.errors import UserError

COMPUTED = "import torch; a = torch.randn(600, 600); a @ a\n"  # a forked worker would hang in its first such operation
TINY = ("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "max_epochs=1", "logger=none")


def test_the_example_is_the_run_of_the_command_line(tmp_path: Path) -> None:
    """From a script that no `if __name__` guards."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), flags=re.DOTALL)
    script = tmp_path / "unguarded.py"
    script.write_text(COMPUTED + code + "import json\nprint(json.dumps(summary))\n")
    run = forked(script, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "'strategy': 'ddp'" in run.stdout
    summary = json.loads(run.stdout.splitlines()[-1])
    folder = Path(summary.pop("folder"))
    assert folder.parent == tmp_path / "outputs" / "mnist_cnn_digits"
    assert {"config.yaml", "overrides.yaml"} <= {path.name for path in (folder / ".hydra").iterdir()}
    (overrides,) = re.findall(r"compose\((.*?)\)", code)
    shell = Program(tmp_path / "shell")(*ast.literal_eval(f"({overrides})")).summary
    assert summary_of(folder) == summary
    assert summary["weights_sha256"] == shell["weights_sha256"]
    assert summary["metrics"] == shell["metrics"]
    assert summary.keys() == shell.keys()


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="nowhere") as refused:
        lockstep.train(lockstep.compose("data=image_folder", "data_dir=nowhere"))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("outputs/*"))


def test_a_config_changed_behind_its_back_is_refused() -> None:
    config = lockstep.compose(*TINY)
    with pytest.raises(UserError, match=r'config.lr: .* after compose\(\): compose\("lr=0.1"\)'):
        config.lr = 0.1
    config["lr"] = 0.5
    with pytest.raises(UserError, match=r"lr was changed after compose\(\)"):
        lockstep.train(config)


def test_the_public_names_are_there_for_people_and_for_type_checkers() -> None:
    source = ast.parse(Path(lockstep.__file__).read_text())
    (block,) = [node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    declared = {
        each.asname or each.name: f"{statement.module}:{each.name}"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for each in statement.names
    }
    homes = {name: home if ":" in home else f"{home}:{name}" for name, home in lockstep.HOMES.items()}
    assert sorted(lockstep.__all__) == sorted(homes)
    assert declared == homes
    for name, home in homes.items():
        module, _, attribute = home.partition(":")
        assert getattr(lockstep, name) is getattr(importlib.import_module(module), attribute)
    page = (ROOT / "docs" / "library.md").read_text()
    assert [name for name in homes if f"`{name}`" not in page and f"`lockstep.{name}`" not in page] == []


def test_the_import_is_cheap() -> None:
    code = "import sys, lockstep; print(sorted({'torch', 'hydra', 'lightning', 'numpy'} & set(sys.modules)))"
    assert python(code).stdout.strip() == "[]"
    assert "hydra" in python(code.replace("import sys, lockstep", "import sys, lockstep; lockstep.train")).stdout
