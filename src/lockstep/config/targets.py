"""What a config names by `_target_`. The user's own config may name whatever is installed; what comes in a file from
elsewhere, only what the user's own config names too, since it would be code otherwise."""

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig

from lockstep.config.value_checks import ROOT
from lockstep.errors import UserError

EXTRAS = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}  # classes of Lightning's that need a package beside it


def targets_in(key: str, value: Any) -> Iterable[tuple[str, str]]:
    """Every `_target_` inside a value at any depth, as `(dotted key, target)`."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield f"{key}._target_", str(value["_target_"])
        for name, part in value.items():
            yield from targets_in(f"{key}.{name}", part)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from targets_in(key, part)


def check_target(key: str, target: str) -> None:
    """Refuses a target that is no dotted path, or of which there is no package. Nothing is imported."""
    if "." not in target or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"{key}={target}: must be a dotted path such as project.models.MnistCNN")
    package = target.split(".")[0]
    try:
        module_spec = importlib.util.find_spec(package)
    except ValueError:  # __main__, say, which is the program itself
        module_spec = None
    if module_spec is None:
        raise UserError(f"{key}={target}: there is no module {package}, neither in src/ nor installed")
    extra = EXTRAS.get(target.rpartition(".")[2])
    if extra and importlib.util.find_spec(extra) is None:
        raise UserError(f"{key}={target}: needs {extra}: pip install -e .[{extra}]")


def check_targets_named(path: Path, group: str, carried: Any, requested: Any = None) -> None:
    """Refuses what a file from elsewhere names in a group and the user's own config does not: neither in the files of
    conf/, and of the folders that Hydra composes from besides, nor in what is `requested` on the command line. Nothing
    of it was imported."""
    carried_targets = list(targets_in(group, carried))
    if not carried_targets:
        return
    files = [(file, folder) for folder in _config_folders() for file in folder.rglob("*.yaml")]
    parts = [requested, *(_part(file, folder, group) for file, folder in files)]
    allowed = {target for part in parts for _, target in targets_in(group, part)}
    for key, target in carried_targets:
        if target not in allowed:
            raise UserError(
                f"{path}: its {key} is {target}, which no file of conf/{group} names: if you know where this "
                f"checkpoint comes from, name it there, or give +{key}={target}"
            )


def _config_folders() -> list[Path]:
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    return [ROOT / "conf", *(Path(source.path) for source in sources if source.schema == "file")]


def _part(file: Path, folder: Path, group: str) -> Any:
    """What a config file says of a group: all of it where it lies in the group's folder."""
    text = file.read_text()
    if "_target_" not in text:
        return None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:  # who composes with it is told
        return None
    if file.relative_to(folder).parts[0] == group:
        return content
    return content.get(group) if isinstance(content, dict) else None
