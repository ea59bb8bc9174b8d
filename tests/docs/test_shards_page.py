"""The page on shards, followed literally: its commands are run on shards that its `tar` makes, and on a local copy."""

import os
import subprocess
from pathlib import Path

import pytest
import site_pages
from conftest import Program, template
from written_shards import write_folder

PAGE = site_pages.read("use/shards.md")
SHORT = ("max_steps=2", "batch_size=8", "threads=1", "num_workers=0", "accelerator=cpu", "logger=none")
TRAIN = [command.words for command in PAGE.commands if command.words[1] == "src/train.py" and "s3:" not in command.text]


@pytest.fixture(scope="module")
def project(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the template, with a folder of images and the shards that the page's commands make of it."""
    folder = template(tmp_path_factory.mktemp("project"))
    write_folder(folder / "images")
    (folder / "shards").mkdir()
    text = (site_pages.DOCS / PAGE.name).read_text()
    for line in (line.strip() for line in text.splitlines() if line.startswith("    tar ")):
        subprocess.run(line.split(), cwd=folder, check=True)
    return folder


@pytest.mark.usefixtures("processes")
def test_the_page_has_commands(project: Path) -> None:
    assert len(TRAIN) == 4
    assert sorted(path.name for path in (project / "shards").iterdir()) == ["test-0.tar", "train-0.tar"]


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("words", TRAIN, ids=" ".join)
def test_a_command(project: Path, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, script, *overrides = words
    used = [each.replace("data_dir=<folder>", "data_dir=shards").replace("<folder>", "copy") for each in overrides]
    if "data=huggingface" in used:
        datasets = pytest.importorskip("datasets", reason="pip install -e .[huggingface] brings it")
        paths = sorted((project / "images" / "train").rglob("*.*"))
        table = {"image": [path.read_bytes() for path in paths], "label": [path.parent.name for path in paths]}
        datasets.Dataset.from_dict(table).save_to_disk(project / "copy")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    online = "data.path=<name>" in used
    used = [each.replace("<name>", "nobody/nothing") for each in used]
    run = Program(tmp_path, script, project)(*used, *SHORT, env=os.environ | offline, ok=not online)
    if online:  # there is no network: one line says so
        assert (run.returncode, run.stderr.count("error: huggingface: data.path=nobody/nothing can't be opened")) == (
            2,
            1,
        )
    else:
        assert (run.summary["status"], run.summary["steps"]) == ("completed", 2)
