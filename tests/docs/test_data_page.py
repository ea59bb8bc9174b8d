"""docs/data.md, followed literally: its file is written, its commands are run."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, Program, template
from PIL import Image

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "data.md").read_text()
SHORT = ("max_steps=2", "batch_size=8", "threads=1", "num_workers=0", "accelerator=cpu", "logger=none")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the template, with the page's file and a folder of images that its list names."""
    folder = template(tmp_path_factory.mktemp("project"))
    ((name, text),) = re.findall(r"`(conf/[\w/.]+)`:\n\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    (folder / name).write_text(text)
    (rows,) = re.findall(r"```csv\n(.*?)```", PAGE, re.DOTALL)
    labels = dict(reversed(row.split(",")) for row in rows.split()[1:])
    (folder / "scans").mkdir()
    for name, label in ((f"scans/{number}.png", list(labels)[number % 2]) for number in range(48)):
        Image.new("L", (70, 64), int(name[6:-4])).save(folder / name)
        rows += f"{name},{label}\n" * (name not in labels.values())
        (folder / "images" / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, folder / "images" / label)
    (folder / "list.csv").write_text(rows)
    return folder


COMMANDS = re.findall(r"^    (python .*)$", PAGE, re.MULTILINE)
COMMANDS += [f"python src/train.py {keys}" for keys in re.findall(r"`(data=image_list [^`]*)`", PAGE)]


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) == 10


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(project: Path, tmp_path: Path, command: str) -> None:
    _, script, *overrides = shlex.split(command)
    named = [each.replace("data_dir=<folder>", "data_dir=images").replace("<file>", "list.csv") for each in overrides]
    run = Program(tmp_path, str(project / script))(*named, *SHORT, cwd=project)
    assert (run.summary["status"], run.summary["steps"]) == ("completed", 2)
    if "image_folder" in command:
        assert "image_folder: a folder per class in" in run.stderr
