"""The page on other tasks, followed literally in a project without their modules: what it shows is copied and run."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import site_pages
from conftest import Program, template
from PIL import Image

PAGE = site_pages.read("use/tasks.md")
TABLES = dict(
    re.findall(r"`(\w+\.csv)`:\n\n```csv\n(.*?)```", site_pages.path_of("use/tasks.md").read_text(), re.DOTALL)
)
COMMANDS = [command.words for command in PAGE.commands if command.words[1] == "src/train.py"]
SHORT = ("max_steps=2", "batch_size=8", "data.image_size=33", "threads=1", "num_workers=0", "accelerator=cpu")


def test_the_page_shows_files_and_commands() -> None:
    """A parser that finds none would make every other test pass."""
    assert PAGE.files
    assert COMMANDS


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the template with the files of the page in place of its own, its tables and their images."""
    folder = template(tmp_path_factory.mktemp("project"))
    for name, text in PAGE.files.items():
        (folder / name).unlink()
        (folder / name).write_text(text)
    rng = np.random.default_rng(0)
    for name, text in TABLES.items():
        header, *rows = csv.reader(text.splitlines())
        images = [at for at, column in enumerate(header) if column in ("path", "outline")]
        with (folder / name).open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(header)
            for copy in range(8):
                for row in rows:
                    cells = [cell.replace("/", f"/{copy}_") if at in images else cell for at, cell in enumerate(row)]
                    table.writerow(cells)
                    for at in images:
                        (folder / cells[at]).parent.mkdir(exist_ok=True)
                        values = 3 if header[at] == "outline" else 256
                        pixels = rng.integers(0, values, (40, 50), dtype=np.uint8)
                        Image.fromarray(pixels).save(folder / cells[at])
    return folder


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[2:5]))
def test_a_command(project: Path, tmp_path: Path, words: list[str]) -> None:
    used = [each for each in words[2:] if not each.startswith("data.image_size=")]
    small = ["data.samples=50"] * ("data=synthetic" in used)
    run = Program(tmp_path, home=project)(*used, *small, *SHORT)
    assert (run.summary["status"], run.summary["steps"]) == ("completed", 2)
