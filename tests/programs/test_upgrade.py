"""A project that an older `lockstep new` wrote goes on with today's library, as it is.

older/<version>.json has the files of conf/, src/ and tests/ of a project `dogs`, as `lockstep new` of that version
wrote them. No change of the library may need a change of them, but for a new major version.
"""

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Program, checkpoint_of
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config import pages
from lockstep.config.check import as_plain, check
from lockstep.config.hydra_quirks import VERSION_BASE
from lockstep.config.instantiate import locate, targets_in
from lockstep.errors import UserError
from lockstep.project import use_project_of

OLDER = sorted((Path(__file__).parent / "older").glob("*.json"))
SHORT = ("seed=1", "exact=true", "pieces=2", "batch_size=32", "max_steps=6", "threads=1", "model.dropout=0.2")
SMALL = ("data=synthetic", "data.samples=120", "data.image_size=12", "data.num_classes=3", "logger=none")


@pytest.fixture(params=OLDER, ids=lambda path: path.stem)
def dogs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an older project."""
    for name, text in json.loads(request.param.read_text()).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    use_project_of(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "src")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "dogs"]:
        del sys.modules[name]


def checked(*overrides: str) -> set[str]:
    """Return the keys of a config, which is composed, checked, and whose classes are imported."""
    page = pages.primary("train")
    with initialize_config_dir(str(page.folder), **VERSION_BASE):
        raw = as_plain(compose(page.name, [*page.overrides, *overrides]))
    check(raw)
    for key, target in targets_in("", raw):
        locate(key, target)
    return {*raw}


@pytest.mark.usefixtures("whole_run")
def test_its_pages_compose_and_are_accepted(dogs: Path) -> None:
    inherited: dict[str, object] = OmegaConf.to_container(OmegaConf.load(pages.INHERITED / "base.yaml"))  # type: ignore
    assert checked() >= inherited.keys() - {"defaults"}
    for group in ("model", "data", "strategy"):
        for file in (dogs / "conf" / group).glob("*.yaml"):
            checked(f"{group}={file.stem}", "devices=1" if file.stem == "auto" else "devices=2", "pieces=4")
    checked(
        "model=fast_cnn", "data=synthetic", "optimizer=adamw", "scheduler=cosine", "callbacks=ema", "extras=[ledger]"
    )


@pytest.mark.usefixtures("whole_run")
@pytest.mark.filterwarnings("ignore:provider=hydra.searchpath")
def test_what_today_lacks_is_seen(dogs: Path) -> None:
    """The control: of a page, of a key, of a class, and of the line that names the inherited pages."""
    page = dogs / "conf" / "train.yaml"
    text = page.read_text()
    page.write_text(text.replace("- optimizer: sgd", "- optimizer: gone"))
    with pytest.raises(MissingConfigException):
        checked()
    page.write_text(f"{text}\nkey_that_is_gone: 1\n")
    with pytest.raises(UserError, match="key_that_is_gone"):
        checked()
    page.write_text(text.replace("pkg://lockstep.conf", "pkg://lockstep.gone"))
    with pytest.raises((MissingConfigException, OmegaConfBaseException)):
        checked()
    page.write_text(text)
    net = dogs / "src" / "dogs" / "models" / "mnist_cnn.py"
    net.write_text(net.read_text().replace("from lockstep.vision", "from lockstep.gone"))
    with pytest.raises(UserError, match=r"dogs\.models imports lockstep\.gone|there is no module"):
        checked()


def missing(source: Path) -> list[str]:
    """Return what the files of a project import of the library, and is not there."""
    statements = [each for file in source.rglob("*.py") for each in ast.walk(ast.parse(file.read_text()))]
    named = [
        f"{each.module}:{alias.name}"
        for each in statements
        if isinstance(each, ast.ImportFrom) and each.module and each.module.startswith("lockstep")
        for alias in each.names
    ]
    assert named
    return [each for each in named if not _exists(*each.split(":"))]


def _exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}") is not None
    except ModuleNotFoundError:
        return False


def test_its_files_import_nothing_that_is_gone(dogs: Path) -> None:
    """Its programs import more than the public names."""
    assert missing(dogs / "src") == []
    (dogs / "src" / "mine.py").write_text("from lockstep.commands.cli import gone\nfrom lockstep.gone import cli\n")
    assert missing(dogs / "src") == ["lockstep.commands.cli:gone", "lockstep.gone:cli"]


def test_it_trains_to_the_bits_of_a_new_project(dogs: Path, run_train: Program) -> None:
    older = Program(run_train.outputs / "older", home=dogs)(*SHORT, *SMALL).summary
    newer = run_train(*SHORT, *SMALL, f"outputs={run_train.outputs / 'newer'}")
    (folder,) = (each for each in newer.folders if "newer" in each.parts)
    assert older["weights_sha256"] == json.loads((folder / "summary.json").read_text())["weights_sha256"]
    assert checkpoint_of(folder)["lockstep"]["config"]["model"]["_target_"] == "project.models.MnistCNN"  # the control
