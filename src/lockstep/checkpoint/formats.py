"""The formats of what Lockstep adds to a checkpoint, and how older ones are read.

| format | what changed |
|---|---|
| 1 | it has no number; classes that are now below `lockstep.vision` are named as a project's |
| 2 | a number, and the classes' names of today |
| 3 | tensors whose parts are in a folder beside the file (`strategy.checkpoint=sharded`) |
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.project import project

FORMAT = 2  # of new checkpoints
WITH_PARTS = 3  # of new ones with a folder of parts
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
    if type(number) is not int or not 1 <= number <= WITH_PARTS:
        raise UserError(
            f"{path}: checkpoint format {number}, this Lockstep reads 1 to {WITH_PARTS}: install a newer one"
        )
    if number == 1:
        record = _renamed(record, _moved_names())
    return dict(record)


def _moved_names() -> dict[str, str]:
    """Return today's name of each class by its name in a project, but for what the project still has.

    The project's package is called `project`, or as the user has named it.
    """
    try:
        source = project().source
    except UserError:  # a checkpoint may be read outside of a project
        source = Path()
    packages = {"project", *(file.parent.name for file in source.glob("*/__init__.py"))} - {"lockstep"}
    names: dict[str, str] = {}
    for file, classes in MOVED.items():
        home = file.partition("/")[0].removesuffix(".py")
        for package in packages:
            moved = (name for name in classes if not _has(source / package / home, name))
            names |= {f"{package}.{home}.{name}": f"lockstep.vision.{home}.{name}" for name in moved}
    return names


def _has(home: Path, name: str) -> bool:
    """Return whether a module or package of the project defines a class or function, or imports it into itself."""
    module = next((file for file in (home.with_suffix(".py"), home / "__init__.py") if file.is_file()), None)
    defined = any(
        re.search(rf"^(class|def) {name}\b", _text(file), re.MULTILINE) for file in (module, *home.rglob("*.py"))
    )
    imported = rf"^from \S+ import (\([^)]*|[^(\n]*)\b{name}\b"
    return defined or re.search(imported, _text(module), re.MULTILINE) is not None


def _text(file: Path | None) -> str:
    return file.read_text(errors="replace") if file else ""


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value with other names of classes, at any depth."""
    if isinstance(value, Mapping):
        return {key: _renamed(part, names) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_renamed(part, names) for part in value)
    return names.get(value, value) if isinstance(value, str) else value
