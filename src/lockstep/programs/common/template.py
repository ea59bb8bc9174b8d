"""The template of a project: this repository's own conf/ and src/project, which the wheel has a copy of."""

import shutil
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
TEMPLATE = (
    *("conf", "src/project", "src/train.py", "src/evaluate.py", "src/predict.py"),
    *("scripts/slurm.sh", "scripts/torchrun.sh"),
)


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
