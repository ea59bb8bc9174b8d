"""The template of a project and the pages for its user: this repository's own, which the wheel has a copy of."""

import shutil
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
TEMPLATE = (
    *("conf", "src/project", "src/train.py", "src/evaluate.py", "src/predict.py"),
    "scripts/slurm.sh",
)
MANUAL = ("use", "devices", "trust", "extras", "troubleshooting")  # what of docs/ is for those who use Lockstep


def template() -> Path:
    """Return the folder that has the template: the checkout from which Lockstep runs, else the wheel's copy."""
    checkout = PACKAGE.parents[1]
    return checkout if all((checkout / name).exists() for name in TEMPLATE) else PACKAGE / "template"


def copy_template(source: Path, folder: Path) -> None:
    """Copy the files of the template from one folder to another."""
    ignored = shutil.ignore_patterns("__pycache__", "schema")
    for name in TEMPLATE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, ignore=ignored)
        else:
            shutil.copy(source / name, folder / name)


def manual() -> Path:
    """Return the folder that has the pages of the documentation: the installed copy, else the checkout's docs/."""
    copy = PACKAGE / "docs"
    return copy if copy.exists() else PACKAGE.parents[1] / "docs"


def manual_pages(folder: Path) -> list[Path]:
    """Return the pages in a folder of documentation that are for those who use Lockstep."""
    candidates = (page for name in MANUAL for page in [folder / f"{name}.md", *(folder / name).rglob("*.md")])
    return sorted(page for page in candidates if page.is_file())


def copy_manual(source: Path, folder: Path) -> None:
    """Copy the pages for those who use Lockstep from one folder to another, without pictures."""
    for page in manual_pages(source):
        target = folder / page.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, target)
