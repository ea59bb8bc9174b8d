"""Checks of what a config names by `_target_`.

The user's own config may name anything that is installed. A config inside a checkpoint may only name what the user's
own config names too, because a checkpoint from elsewhere could otherwise run any code.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig

from lockstep.config.value_checks import ROOT
from lockstep.errors import UserError

EXTRAS = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}  # Lightning's classes that need a further package


def targets_in(key: str, value: Any) -> Iterable[tuple[str, str]]:
    """Yield every `_target_` at any depth of a value, as `(dotted key, target)`."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield f"{key}._target_", str(value["_target_"])
        for name, part in value.items():
            yield from targets_in(f"{key}.{name}", part)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from targets_in(key, part)


def check_target(key: str, target: str) -> None:
    """Refuse a target that is not a dotted path, or whose package is not installed. Nothing is imported.

    Raises:
        UserError: it names the key and the target.
    """
    if "." not in target or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"{key}={target}: must be a dotted path such as project.models.MnistCNN")
    package = target.split(".")[0]
    try:
        module_spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec, such as __main__
        module_spec = None
    if module_spec is None:
        raise UserError(f"{key}={target}: there is no module {package}, neither in src/ nor installed")
    extra = EXTRAS.get(target.rpartition(".")[2])
    if extra and importlib.util.find_spec(extra) is None:
        raise UserError(f"{key}={target}: needs {extra}: pip install -e .[{extra}]")


def check_targets_named(path: Path, group: str, carried: Any, requested: Any = None) -> None:
    """Refuse targets in a checkpoint's config that the user's own config does not name. Nothing is imported.

    Args:
        path: the checkpoint, for messages.
        group: the config group, such as `model`.
        carried: the group's config in the checkpoint.
        requested: the group's config on the command line. Targets in it are allowed, and so are those in conf/ and in
            the other folders from which Hydra composes.

    Raises:
        UserError: it names the first such target.
    """
    carried_targets = list(targets_in(group, carried))
    if not carried_targets:
        return
    files = [(file, folder) for folder in _config_folders() for file in folder.rglob("*.yaml")]
    parts = [requested, *(_part(file, folder, group) for file, folder in files)]
    allowed = {target for part in parts for _, target in targets_in(group, part)}
    for key, target in carried_targets:
        if target not in allowed:
            raise UserError(
                f"{path}: its {key} is {target}, which no file of conf/{group} names: if you trust this checkpoint, "
                f"name it there, or give +{key}={target}"
            )


def _config_folders() -> list[Path]:
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    return [ROOT / "conf", *(Path(source.path) for source in sources if source.schema == "file")]


def _part(file: Path, folder: Path, group: str) -> Any:
    """Return a config file's value of a group: its whole content if the file is in the group's folder."""
    text = file.read_text()
    if "_target_" not in text:
        return None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:  # composing with this file raises its own error
        return None
    if file.relative_to(folder).parts[0] == group:
        return content
    return content.get(group) if isinstance(content, dict) else None
