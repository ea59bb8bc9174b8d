"""Objects that a config names by `_target_`: only what lies in `src/`, since a config would be code otherwise."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.checks import ROOT, unknown
from lockstep.layout import Refusal


def named(value: Any) -> Iterable[str]:
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield str(value["_target_"])
        for part in value.values():
            yield from named(part)
    elif isinstance(value, list):
        for part in value:
            yield from named(part)


def check_target(key: str, target: str) -> None:
    """A config may name what `lockstep` and the packages beside it in `src/` define, and nothing else: otherwise a
    config (or a checkpoint, which holds one) could run any function that is installed.

    Raises:
        Refusal: the target lies elsewhere, or its package can't be found.
    """
    package = target.split(".")[0]
    if "." not in target or not all(part.isidentifier() for part in target.split(".")):
        raise Refusal(f"{key}={target}: must be a dotted path such as lockstep.models.MnistCNN")
    own = ROOT / "src"
    if not ((own / package).is_dir() or (own / f"{package}.py").is_file()):
        raise Refusal(
            f"{key}={target}: only what lies in {own.name}/ can be named in a config, and there is no {package} in it"
        )


def build(key: str, config: Mapping[str, Any], wanted: Mapping[str, str] | None = None, /, **offers: Any) -> Any:
    """The object that a config names by `_target_`, made from its other keys.

    Args:
        key: where the config stands, for messages.
        wanted: offers that would be missed, each with the key that the user has given.
        offers: further arguments, passed on where the target takes them by name.

    Raises:
        Refusal: the target is not allowed, missing, or does not take an argument that the config gives, or a wanted
            offer.
    """
    options = {name: value for name, value in config.items() if name not in ("_target_", "name")}
    target = str(config.get("_target_"))
    check_target(f"{key}._target_", target)
    module, _, attribute = target.rpartition(".")
    if importlib.util.find_spec(module.split(".")[0]) is None:
        raise Refusal(f"{key}._target_={target}: there is no module {module}")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise Refusal(f"{key}._target_={target}: there is no module {error.name}") from None
        raise Refusal(f"{key}._target_={target}: {module} imports {error.name}, which is not installed") from None
    if not hasattr(holder, attribute):
        raise Refusal(f"{key}._target_={target}: {module} has no {attribute}")
    made = getattr(holder, attribute)
    takes = _parameters(made)
    for name in options:
        if name not in takes:
            raise Refusal(
                f"{key}.{name}: {attribute} takes no such option; {unknown(name, sorted(set(takes) - set(offers)))}"
            )
    for name, given in (wanted or {}).items():
        if name not in takes:
            raise Refusal(
                f"{given}: {target} takes no {name}, so this would change nothing; leave it out, or give its "
                f"constructor a parameter {name}"
            )
    arguments = {name: value for name, value in offers.items() if name in takes} | options
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise Refusal(f"{key}: {attribute} has {error}") from None
    return made(**arguments)


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
