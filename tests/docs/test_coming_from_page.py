"""docs/coming-from-lightning-hydra-template.md, followed literally: its files train, and its tables of keys hold."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Program, template
from refusals import checked, refused
from user_runs import same_bits

from project.data import digits

PAGE = (ROOT / "docs" / "coming-from-lightning-hydra-template.md").read_text()
BLOCKS = re.findall(r"`(conf/[\w/.]+)`:\n\n```yaml\n(.*?)```", PAGE, re.DOTALL)
TABLES = re.findall(r"^\| there.*\| here \|\n\|---\|---\|\n((?:\|.*\|\n)+)", PAGE, re.MULTILINE)
KEYS, CHOICES = ([row.strip("| ").split(" | ") for row in table.splitlines()] for table in TABLES[:2])
BESIDE = ("accelerator=cpu", "logger=none")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the template with their files and the page's, and a small MNIST in `data/`: scikit-learn's
    digits."""
    folder = template(tmp_path_factory.mktemp("project"))
    shutil.copytree(ROOT / "tests" / "docs" / "hydra_template" / "src", folder / "src", dirs_exist_ok=True)
    for package in ("models", "models/components", "data"):
        (folder / "src" / package / "__init__.py").touch()
    for name, text in BLOCKS:
        (folder / name).write_text(text)
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    source = digits()
    for name, part in (("train", source.train), ("t10k", source.test)):
        for kind, values in (("images-idx3", part.images[:, 0]), ("labels-idx1", part.labels)):
            array = np.asarray(values).astype(np.uint8)
            header = np.array([8 << 8 | array.ndim, *array.shape], dtype=">u4").tobytes()
            (raw / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return folder


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_module_and_data_module_train_as_they_are(project: Path, tmp_path: Path) -> None:
    """Evaluated, predicted and resumed: tests/commands/test_hydra_template.py."""
    shown = re.compile(r"^    \$ python (src/train.py model=(?s:.*?))\n((?:    \w.*\n)+)", re.MULTILINE)
    ((command, output),) = shown.findall(PAGE)
    script, *keys = shlex.split(command.replace("\\\n", ""))
    layout = ("strategy=ddp", "devices=2")
    assert {*layout, "exact=true"} < set(keys)
    two = Program(tmp_path / "two", script, project)(*keys, *BESIDE)
    alone = [key for key in keys if key not in layout]
    one = Program(tmp_path / "one", script, project)(*alone, "pieces=2", *BESIDE)
    assert [line for line in output.splitlines()[:-1] if line.strip() not in two.stderr] == []
    assert same_bits(one, two)
    assert (one.summary["layout"]["strategy"], two.summary["layout"]["strategy"]) == ("single", "ddp")
    assert one.summary["metrics"]["test/acc"] == two.summary["metrics"]["test/acc"] > 0.8


def test_the_page_has_its_parts() -> None:
    """A parser that finds none would make every other test pass."""
    assert BLOCKS
    assert KEYS
    assert CHOICES


@pytest.mark.usefixtures("whole_run")
@pytest.mark.usefixtures("two_cores_no_gpu")
@pytest.mark.parametrize(("their_key", "here"), KEYS)
def test_the_message_for_their_key_names_ours(their_key: str, here: str) -> None:
    printed = refused(their_key.strip("`"))
    assert re.search(rf"; did you mean (.* or )?{re.escape(here.strip('`').split('=')[0])}\b", printed), printed
    checked(here.strip("`"))


@pytest.mark.usefixtures("whole_run")
@pytest.mark.usefixtures("two_cores_no_gpu")
@pytest.mark.parametrize("here", [here for _, here in CHOICES])
def test_our_choice_exists(here: str) -> None:
    """Programs are checked by tests/test_repo.py."""
    for overrides in re.findall(r"`([^`]+)`", here):
        if not overrides.startswith(("python", "lockstep")):
            checked(*shlex.split(overrides))


def test_the_message_that_the_page_shows_is_printed() -> None:
    ((keys, line),) = re.findall(r"^    \$ python src/train.py (\S*)\n    error: (.*)$", PAGE, re.MULTILINE)
    assert refused(*shlex.split(keys)) == line
