"""Objects that a config names by `_target_`. The user's own config may name whatever is installed; what comes in a file
from elsewhere, only what the user's own config names too, since it would be code otherwise."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import ROOT, unknown


def named(key: str, value: Any) -> Iterable[tuple[str, str]]:
    """Every `_target_` inside a value at any depth, as `(dotted key, target)`."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield f"{key}._target_", str(value["_target_"])
        for name, part in value.items():
            yield from named(f"{key}.{name}", part)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from named(key, part)


def check_target(key: str, target: str) -> None:
    """Whether a target looks like one that can be imported. Nothing is imported.

    Raises:
        Refusal: it is no dotted path, or there is no such package.
    """
    if "." not in target or not all(part.isidentifier() for part in target.split(".")):
        raise Refusal(f"{key}={target}: must be a dotted path such as project.models.MnistCNN")
    package = target.split(".")[0]
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # __main__, say, which is the program itself
        found = None
    if found is None:
        raise Refusal(f"{key}={target}: there is no module {package}, neither in src/ nor installed")


def must_be_named(path: Path, group: str, carried: Any, given: Any = None) -> None:
    """Compares what a file from elsewhere names in a group with what the user's own config names there: in the files of
    conf/, and of the folders that Hydra composes from besides, and in what is `given` on the command line.

    Raises:
        Refusal: the file names something else. Nothing of it was imported.
    """
    found = list(named(group, carried))
    if not found:
        return
    allowed = locally(group) | {target for _, target in named(group, given)}
    for key, target in found:
        if target not in allowed:
            raise Refusal(
                f"{path}: its {key} is {target}, which no file of conf/{group} names: if you know where this "
                f"checkpoint comes from, name it there, or give +{key}={target}"
            )


def locally(group: str) -> set[str]:
    """What the files of conf/, and of the folders that Hydra composes from besides, name in a group."""
    files = [(file, folder) for folder in _config_folders() for file in folder.rglob("*.yaml")]
    return {target for file, folder in files for _, target in named(group, _part(file, folder, group))}


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


def build(key: str, config: Mapping[str, Any], wanted: Mapping[str, str] | None = None, /, **offers: Any) -> Any:
    """The object that a config names by `_target_`, made from its other keys; those that name an object themselves are
    made first. With `_partial_: true` what makes it, as in Hydra.

    Args:
        key: where the config stands, for messages.
        wanted: offers that would be missed, each with the key that the user has given.
        offers: further arguments, passed on where the target takes them by name.

    Raises:
        Refusal: the target is missing, or does not take an argument that the config gives, or a wanted offer.
    """
    target = str(config.get("_target_"))
    made = _find(f"{key}._target_", target)
    attribute = target.rpartition(".")[2]
    try:
        signature, takes = inspect.signature(made), _parameters(made)
    except (TypeError, ValueError):
        raise Refusal(f"{key}._target_={target}: can't be called with the keys of a config") from None
    options = {name: value for name, value in config.items() if name not in ("_target_", "_partial_")}
    if "name" not in takes:  # it says which file of the group was chosen
        options.pop("name", None)
    anything = not inspect.isclass(made) and any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name, value in options.items():
        if name not in takes and not anything:
            raise Refusal(
                f"{key}.{name}: {attribute} takes no such option; {unknown(name, sorted(set(takes) - set(offers)))}"
            )
        if isinstance(value, Mapping) and "_target_" in value:
            options[name] = build(f"{key}.{name}", value, **offers)
    for name, given in (wanted or {}).items():
        if name not in takes:
            raise Refusal(
                f"{given}: {target} takes no {name}, so this would change nothing; leave it out, or give its "
                f"constructor a parameter {name}"
            )
    arguments = {name: value for name, value in offers.items() if name in takes} | options
    if config.get("_partial_"):
        return partial(made, **arguments)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise Refusal(f"{key}: {attribute} has {error}") from None
    return made(**arguments)


def _find(key: str, target: str) -> Any:
    """What a dotted path names, imported."""
    check_target(key, target)
    module, _, attribute = target.rpartition(".")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise Refusal(f"{key}={target}: there is no module {error.name}") from None
        raise Refusal(f"{key}={target}: {module} imports {error.name}, which is not installed") from None
    if not hasattr(holder, attribute):
        raise Refusal(f"{key}={target}: {module} has no {attribute}")
    return getattr(holder, attribute)


def _parameters(made: Any) -> dict[str, Any]:
    """Parameters by name; a class that passes `**kwargs` on to its base takes the base's too."""
    found: dict[str, Any] = {}
    for owner in made.__mro__ if inspect.isclass(made) else [made]:
        if inspect.isclass(owner) and "__init__" not in vars(owner):
            continue
        parameters = inspect.signature(vars(owner)["__init__"] if inspect.isclass(owner) else owner).parameters
        for name, parameter in parameters.items():
            if name != "self" and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found
