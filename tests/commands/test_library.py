"""Training from Python: docs/use/train.md literally, from a parent that has computed and has no file."""

import ast
import importlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Program, forked, python, summary_of, wait_for

import lockstep
from lockstep.errors import UserError

COMPUTED = "import torch; a = torch.randn(600, 600); a @ a\n"  # a forked worker would hang in its first such operation
TINY = ("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "max_epochs=1", "logger=none")


@pytest.mark.usefixtures("processes")
def test_the_example_is_the_run_of_the_command_line(tmp_path: Path) -> None:
    """From a script that no `if __name__` guards."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use" / "train.md").read_text(), flags=re.DOTALL)
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


@pytest.mark.usefixtures("processes")
def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="nowhere") as refused:
        lockstep.train(lockstep.compose("data=image_folder", "data_dir=nowhere"))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("outputs/*"))


OUTER = """
import hydra
import lockstep

@hydra.main(version_base="1.3", config_path=None)
def main(_):
    config = lockstep.compose(*{job}, "max_steps=1", "name='run_${{now:%f}}'")
    summary = lockstep.train(config)
    print("NAMES:", config["name"] == summary["name"], hydra.core.global_hydra.GlobalHydra.instance().is_initialized())
    config["seed"] = 3
    try:
        lockstep.train(config)
    except lockstep.UserError as error:
        print("REFUSED:", error)

main()
"""


@pytest.mark.usefixtures("processes")
def test_inside_of_another_program_with_hydra(tmp_path: Path) -> None:
    """Its Hydra is set aside, and a name with the time in it is that of `compose`."""
    (tmp_path / "outer.py").write_text(OUTER.format(job=TINY))
    run = forked(tmp_path / "outer.py", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "NAMES: True True",
        "REFUSED: seed was changed after compose(): pass it to compose() as an override",
    ]


FAILING = """
from lockstep import compose, train
from lockstep.errors import WorkerFailed

try:
    train(compose(*{job}, "max_epochs=1", "lr=1e30", "scheduler=constant"))
except WorkerFailed as failed:
    print("FAILED:", failed, flush=True)
try:
    train(compose(*{job}, "max_epochs=100000", "checkpoint_every=20"))
except KeyboardInterrupt as interrupted:
    print("INTERRUPTED:", interrupted, flush=True)
"""


@pytest.mark.usefixtures("processes")
def test_failures_and_signals(tmp_path: Path) -> None:
    job = [*TINY[:-2], "logger=none", f"outputs={tmp_path}"]
    script, output = tmp_path / "calls.py", tmp_path / "said"
    script.write_text(FAILING.format(job=job))
    with output.open("w") as out:
        process = subprocess.Popen([sys.executable, script], stdout=out, stderr=subprocess.DEVNULL, text=True)

    def runs() -> list[Path]:
        return sorted(tmp_path.glob("*/*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime_ns)

    wait_for(lambda: "FAILED" in output.read_text(), process)
    failed = len(runs())
    wait_for(lambda: len(runs()) > failed, process)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "INTERRUPTED" in output.read_text(), process)
    folder = runs()[-1].parent.parent
    assert summary_of(folder)["status"] == "interrupted"
    assert process.wait() == 0
    lines = output.read_text().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"FAILED: .*step \d+: .*(not finite|nan|inf).*", lines[0]), lines
    assert lines[1] == "INTERRUPTED: interrupted by SIGINT"


@pytest.mark.usefixtures("processes")
def test_the_command_ends_with_the_process_that_called_it() -> None:
    """Linux ends it when that process is killed; here that is gone already."""
    calls = (
        "import os; os.environ['LOCKSTEP_PARENT'] = '1'; from lockstep.commands import cli; cli.command(print, 'train')"
    )
    assert python(calls).returncode == -signal.SIGKILL


@pytest.mark.usefixtures("whole_run")
def test_a_config_changed_behind_its_back_is_refused() -> None:
    config = lockstep.compose(*TINY)
    with pytest.raises(UserError, match=r'config.lr: .* after compose\(\): use compose\("lr=0.1"\)'):
        config.lr = 0.1
    config["lr"] = 0.5
    with pytest.raises(UserError, match=r"lr was changed after compose\(\)"):
        lockstep.train(config)


def test_the_public_names_exist_for_people_and_for_type_checkers() -> None:
    source = ast.parse(Path(lockstep.__file__).read_text())
    (block,) = [node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    declared = {
        each.asname or each.name: f"{statement.module}:{each.name}"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for each in statement.names
    }
    homes = {name: f"{home}:{name}" for name, home in lockstep.HOMES.items()}
    assert declared == homes
    for name, home in homes.items():
        module, _, attribute = home.partition(":")
        public, internal = getattr(lockstep, name), getattr(importlib.import_module(module), attribute)
        assert public is internal or name == "launch", "a package of this name, which can be called"
    assert callable(lockstep.launch)
    page = (ROOT / "docs" / "use" / "train.md").read_text()
    assert [name for name in homes if f"`{name}`" not in page and f"`lockstep.{name}`" not in page] == []


@pytest.mark.usefixtures("processes")
def test_the_import_is_cheap() -> None:
    code = "import sys, lockstep; print(sorted({'torch', 'hydra', 'lightning', 'numpy'} & set(sys.modules)))"
    assert python(code).stdout.strip() == "[]"
    assert "hydra" in python(code.replace("import sys, lockstep", "import sys, lockstep; lockstep.train")).stdout
