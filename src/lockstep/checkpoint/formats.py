"""The formats of what Lockstep adds to a checkpoint, and how older ones are read.

| format | what changed |
|---|---|
| 1 | it has no number; classes that are now below `lockstep.vision` are named as a project's |
| 2 | a number, and the classes' names of today |
"""

import re
from collections.abc import Mapping
from typing import Any

from lockstep.errors import UserError
from lockstep.project import project

FORMAT = 2  # of new checkpoints
# Where a project of format 1 had what is now in the same place below `lockstep.vision`.
MOVED = {
    "callbacks/dashboard.py": ("Dashboard",),
    "callbacks/first_page.py": ("TensorBoard",),
    "callbacks/golden.py": ("Golden",),
    "callbacks/pictures.py": ("Pictures",),
    "data/digits.py": ("synthetic",),
    "data/files.py": ("cifar10", "fashion_mnist", "mnist"),
    "data/folders.py": ("image_folder",),
    "data/huggingface.py": ("huggingface",),
    "data/image_list.py": ("image_list",),
    "data/shards.py": ("shards",),
    "models/classifier.py": ("ImageClassifier",),
    "models/fast_cnn.py": ("FastCNN",),
    "models/multi_label.py": ("MultiLabel",),
    "models/published.py": ("Timm", "Torchvision"),
    "models/regression.py": ("Regression",),
    "models/resnet9.py": ("ResNet9",),
    "models/segmentation.py": ("Segmentation",),
    "optimizers.py": ("LrScale", "Muon"),
    "parameters.py": ("Unfreeze",),
    "schedules.py": ("Plateau", "constant", "cosine", "multistep", "onecycle", "warm_restarts"),
}


def up_to_date(record: Mapping[str, Any], path: object) -> dict[str, Any]:
    """Return the record of a checkpoint as one of today's format.

    Args:
        record: the entry `lockstep` of the checkpoint.
        path: the checkpoint's file, for the message.

    Raises:
        UserError: a newer Lockstep wrote it.
    """
    number = record.get("format", 1)
    if type(number) is not int or not 1 <= number <= FORMAT:
        raise UserError(f"{path}: checkpoint format {number}, this Lockstep reads 1 to {FORMAT}: install a newer one")
    if number == 1:
        record = _renamed(record, _moved_names())
    return {**record, "format": FORMAT}


def _moved_names() -> dict[str, str]:
    """Return today's name of each class by its name in a project, but for what the project still has."""
    names: dict[str, str] = {}
    for file, classes in MOVED.items():
        home = file.partition("/")[0].removesuffix(".py")
        names |= {
            f"project.{home}.{name}": f"lockstep.vision.{home}.{name}" for name in classes if not _has(file, name)
        }
    return names


def _has(file: str, name: str) -> bool:
    """Return whether the project defines a class or function in this file of its package."""
    try:
        text = (project().source / "project" / file).read_text()
    except (OSError, UserError):  # a checkpoint may be read outside of a project
        return False
    return re.search(rf"^(class|def) {name}\b", text, re.MULTILINE) is not None


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value with other names of classes, at any depth."""
    if isinstance(value, Mapping):
        return {key: _renamed(part, names) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_renamed(part, names) for part in value)
    return names.get(value, value) if isinstance(value, str) else value
