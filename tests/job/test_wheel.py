"""The wheel is all that a project needs beside its own conf/ and src/."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT, TINY

pytestmark = pytest.mark.usefixtures("processes")
UV = (str(Path(sys.executable).parent / "uv"), "-q", "--offline")


def run(*command: str, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of this checkout, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"  # of its own, since building leaves files behind
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("src", "conf", "scripts", "docs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "lab"))
    done = run(
        *UV, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", str(folder), cwd=checkout
    )
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_what_is_in_it(wheel: Path) -> None:
    assert wheel.name.startswith("pytorch_lockstep-")
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "hydra_plugins/lockstep_sweeps.py",
        "lockstep/py.typed",
        "lockstep/conf/base.yaml",
        "lockstep/template/src/project/models/resnet18.py",
        "lockstep/conf/hydra/default.yaml",
        "lockstep_extras/conf/extras/audit.yaml",
        "lockstep_streams/conf/data/shards.yaml",
        "lockstep/docs/use/module-rules.md",
        "lockstep/docs/troubleshooting.md",
    } <= {*names}
    packages = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"hydra_plugins", "lockstep", "lockstep_extras", "lockstep_streams"}


def test_a_project_runs_with_it(wheel: Path, tmp_path: Path) -> None:
    installed, project = tmp_path / "installed", tmp_path / "dogs"
    done = run(*UV, "pip", "install", "--no-deps", "--target", str(installed), "--python", sys.executable, str(wheel))
    assert done.returncode == 0, done.stderr
    done = run(sys.executable, "-m", "lockstep", "docs", "module-rules", cwd=tmp_path, path=installed)
    assert (done.returncode, done.stdout) == (0, (ROOT / "docs" / "use" / "module-rules.md").read_text())
    done = run(sys.executable, "-m", "lockstep", "new", "dogs", cwd=tmp_path, path=installed)
    assert done.returncode == 0, done.stderr
    home = run(sys.executable, "-c", "import lockstep; print(lockstep.__file__)", cwd=project, path=installed)
    assert home.stdout.startswith(str(installed)), "the control: it is not this checkout's"
    ddp = ("strategy=ddp", "devices=2", "max_steps=4", "logger=none", "name=one")
    done = run(sys.executable, "src/train.py", *TINY, *ddp, cwd=project, path=installed)
    assert done.returncode == 0, done.stderr
    assert (project / "outputs" / "one").is_dir(), done.stderr
    sweep = (*TINY, "max_steps=2", "logger=none", "name=two", "seed=1,2")
    done = run(sys.executable, "src/train.py", "-m", *sweep, cwd=project, path=installed)
    assert done.returncode == 0, done.stderr
    assert len([*(project / "outputs" / "two").rglob("summary.json")]) == 2, done.stderr
