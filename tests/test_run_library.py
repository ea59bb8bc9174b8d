"""Training from Python: docs/library.md literally, from a parent that has computed and has no file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Program, python, summary_of

import lockstep
from lockstep.arithmetic.layout import Refusal

COMPUTED = "import torch; a = torch.randn(600, 600); a @ a\n"  # a forked worker would hang in its first such operation
TINY = ("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "max_epochs=1", "logger=none")


def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), flags=re.DOTALL)
    run = python(COMPUTED + code, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "'strategy': 'ddp'" in run.stdout
    assert "'devices': 2" in run.stdout
    (folder,) = (tmp_path / "outputs" / "mnist_cnn_digits").iterdir()
    assert summary_of(folder)["epochs"] == 2
    assert {"config.yaml", "overrides.yaml"} <= {path.name for path in (folder / ".hydra").iterdir()}


def test_it_is_the_run_of_the_command_line(tmp_path: Path) -> None:
    """The same bits, from a script that no `if __name__` guards; and errors are one line."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        COMPUTED + "import json\n"
        "from lockstep import compose, train\n"
        "from lockstep.arithmetic.layout import Refusal\n"
        f"summary = train(compose(*{TINY!r}, 'threads=1', 'accelerator=cpu', 'outputs=script'))\n"
        "print(json.dumps(summary))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(script)]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert summary.pop("folder").startswith(str(tmp_path / "script"))
    shell = Program(tmp_path / "shell")(*TINY, "threads=1", "accelerator=cpu").summary
    assert summary["weights_sha256"] == shell["weights_sha256"]
    assert summary["metrics"] == shell["metrics"]
    assert summary.keys() == shell.keys()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("batchsize=3",), "batchsize: there is no such key; did you mean batch_size"),
        (("data=image_folder", "data_dir=nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=message) as refused:
        lockstep.train(lockstep.compose(*overrides))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("outputs/*"))


def test_a_config_changed_behind_its_back_is_refused() -> None:
    config = lockstep.compose(*TINY)
    config["lr"] = 0.5
    with pytest.raises(Refusal, match=r"lr was changed after compose\(\)"):
        lockstep.train(config)


def test_the_import_is_cheap() -> None:
    code = "import sys, lockstep; print(sorted({'torch', 'hydra', 'lightning', 'numpy'} & set(sys.modules)))"
    run = python(code)
    assert run.stdout.strip() == "[]"
    assert "hydra" in python(code.replace("import sys, lockstep", "import sys, lockstep; lockstep.train")).stdout
