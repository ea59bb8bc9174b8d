"""The pages on images and transforms, followed literally: their file is written, their commands are run."""

import re
import shutil
from pathlib import Path

import pytest
import site_pages
from conftest import Program, template
from PIL import Image

pytestmark = pytest.mark.slow

PAGES = [site_pages.read(f"use/{name}.md") for name in ("images", "transforms")]
SHORT = ("max_steps=2", "batch_size=8", "threads=1", "num_workers=0", "accelerator=cpu", "logger=none")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the template, with the page's file and a folder of images that its list names."""
    folder = template(tmp_path_factory.mktemp("project"))
    ((name, text),) = [file for page in PAGES for file in page.files.items()]
    (folder / name).write_text(text)
    (rows,) = [code for page in PAGES for language, code in page.blocks if language == "csv"]
    labels = {label: path for path, label in (row.split(",") for row in rows.split()[1:])}
    (folder / "scans").mkdir()
    for name, label in ((f"scans/{number}.png", list(labels)[number % 2]) for number in range(48)):
        Image.new("L", (70, 64), int(name[6:-4])).save(folder / name)
        rows += f"{name},{label}\n" * (name not in labels.values())
        (folder / "images" / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, folder / "images" / label)
    (folder / "list.csv").write_text(rows)
    return folder


COMMANDS = [command.words for page in PAGES for command in page.commands]


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) == 11


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command(project: Path, tmp_path: Path, words: list[str]) -> None:
    _, script, *overrides = words
    used = [each.replace("data_dir=<folder>", "data_dir=images").replace("<file>", "list.csv") for each in overrides]
    if script == "src/evaluate.py":
        Program(tmp_path / "trained")("data=image_folder", "data_dir=images", *SHORT, cwd=project)
        (folder,) = (tmp_path / "trained").glob("*/*")
        used[used.index("checkpoint=last")] = f"checkpoint={folder}"
        run = Program(tmp_path / "tested", str(project / script))(*used, "accelerator=cpu", cwd=project)
        assert "count 48" in run.stderr + run.stdout or "tested:" in run.stderr + run.stdout
        return
    run = Program(tmp_path, str(project / script))(*used, *SHORT, cwd=project)
    assert (run.summary["status"], run.summary["steps"]) == ("completed", 2)
    if "data=image_folder" in used:
        (line,) = re.findall(
            r"^    (image_folder: .*)$", (site_pages.DOCS / "use" / "images.md").read_text(), re.MULTILINE
        )
        assert line.replace("<folder>", str(project / "images")) in run.stderr
