"""Makes what a config names by `_target_`, as Hydra does, with a line that says what is wrong where it can't."""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, get_type_hints

import hydra.utils
from hydra.errors import InstantiationException
from pydantic.errors import PydanticUserError

from lockstep.config.suggestions import unknown_name_message
from lockstep.config.targets import check_target
from lockstep.config.value_checks import checker, show
from lockstep.errors import UserError

LATER = "later:"  # begins the text that stands for an offer, `T_max: later:total_steps`: a number known in the run only
OF_HYDRA = {"_target_", "_partial_"}
HOLD = ("lockstep.", "lightning.pytorch.callbacks.", "torch.optim.")  # modules whose annotations can be relied on


def instantiate(key: str, config: Mapping[str, Any], /, **offers: Any) -> Any:
    """The object that a config names, made from its other keys by `hydra.utils.instantiate`: what they name in turn is
    made first, and with `_partial_: true` the object is what makes it.

    Args:
        key: where the config stands, for messages.
        offers: further arguments, passed on where the target takes one of that name and the config gives none. Numbers
            and texts are offered to nested targets too, and are what `later:<name>` stands for.

    Raises:
        UserError: the target is missing, can't be called so, or refuses its arguments with a ValueError or TypeError.
    """
    numbers = {name: value for name, value in offers.items() if isinstance(value, int | float | str)}
    options = _completed(key, config, numbers)
    makes = options.pop("_partial_", False)
    target = locate(f"{key}._target_", options.pop("_target_"))
    try:
        made = hydra.utils.instantiate({**options, "_convert_": "all"})
    except InstantiationException as error:
        raise UserError(f"{key}: {error.__cause__ or error}".partition("\n")[0]) from error
    if target.__module__.startswith(HOLD):
        _check_option_types(key, target, made)
    takes = parameters(target)
    make = partial(target, **{name: value for name, value in offers.items() if name in takes} | made)
    return make if makes else call(key, make)


def call(key: str, make: partial[Any], *args: Any) -> Any:
    """`make(*args)`, whose ValueErrors and TypeErrors are about what the config says."""
    name, arguments = make.func.__name__, make.keywords
    try:
        return make(*args)
    except TypeError as error:
        _check_option_types(key, make.func, arguments)
        shown = ", ".join(
            f"{k}={show(v)}" for k, v in arguments.items() if isinstance(v, int | float | str | list | dict | None)
        )
        raise UserError(f"{key}: {name}({shown}): {error}") from error
    except Exception as error:
        # Lightning's own kind of ValueError, by its name: its module takes a second to import
        if not isinstance(error, ValueError) and type(error).__name__ != "MisconfigurationException":
            raise
        option = str(error).partition("=")[0]
        raise UserError(f"{key}.{error}" if option in arguments else f"{key}: {error}") from error


def _check_option_types(key: str, target: Any, arguments: Mapping[str, Any]) -> None:
    """UserError: an option that is not what its annotation says. What others annotate wrongly may work, so of them it
    is asked only where something has gone wrong."""
    for maker in _makers(target):
        try:
            kinds = get_type_hints(maker)
        except Exception:  # names that are there for a type checker only
            continue
        for name in (name for name in arguments if name in kinds):
            with suppress(PydanticUserError):  # of another kind than configs hold
                checker(kinds[name])(f"{key}.{name}", arguments[name])


def parameters(target: Any) -> set[str]:
    """Names of the arguments that a class or function takes; a class that passes `**kwargs` on takes its base's too."""
    return {parameter.name for parameter in _parameters(target) if parameter.kind is not parameter.VAR_KEYWORD}


def _parameters(target: Any) -> Iterator[inspect.Parameter]:
    makers = _makers(target)
    seen: set[str] = set()
    before: list[inspect.Parameter] = []  # the `**kwargs` of the class below
    for maker in makers:
        signature_parameters = inspect.signature(maker).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = {
            each.name: each for each in signature_parameters if each.kind in kinds and each.name not in seen | {"self"}
        }
        yield from named.values()
        rest = [parameter for parameter in signature_parameters if parameter.kind is parameter.VAR_KEYWORD]
        if len(makers) < 2:  # it takes the rest itself
            yield from rest
        if not rest:
            if not named:  # the base takes nothing more, so the class below keeps its `**kwargs`
                yield from before
            return
        seen |= set(named)
        before = rest


def _makers(target: Any) -> list[Any]:
    """A function; of a class its constructor, and those of its bases."""
    if not inspect.isclass(target):
        return [target]
    return [vars(owner)["__init__"] for owner in inspect.getmro(target)[:-1] if "__init__" in vars(owner)]


def locate(key: str, target: str) -> Any:
    """The class or function that a dotted path names, imported.

    Raises:
        UserError: there is none, or one without a signature.
    """
    check_target(key, target)
    module, _, attribute = target.rpartition(".")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise UserError(f"{key}={target}: there is no module {error.name}") from None
        raise UserError(f"{key}={target}: {module} imports {error.name}, which is not installed") from None
    if not hasattr(holder, attribute):
        raise UserError(f"{key}={target}: {module} has no {attribute}")
    located = getattr(holder, attribute)
    try:
        inspect.signature(located)
    except (TypeError, ValueError):
        raise UserError(f"{key}={target}: can't be called with the keys of a config") from None
    return located


def _completed(key: str, config: Mapping[str, Any], numbers: Mapping[str, float | str]) -> dict[str, Any]:
    """A config for Hydra: names checked, what is known later put in, numbers given to nested targets that take them."""
    target = locate(f"{key}._target_", str(config.get("_target_")))
    takes = parameters(target)
    options = {name: _value(f"{key}.{name}", value, numbers) for name, value in config.items()}
    if "name" not in takes:  # it says which file of the group was chosen
        options.pop("name", None)
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(target))
    odd = [name for name in options if name not in takes | OF_HYDRA]
    if odd and not anything:
        near = unknown_name_message(odd[0], sorted(takes - set(numbers))) if len(odd) == 1 else ""
        raise UserError(
            f"{', '.join(f'{key}.{name}' for name in odd)}: {target.__name__} takes no such option; "
            f"leave it out ({' '.join(f'~{key}.{name}' for name in odd)}){near and '; ' + near}"
        )
    return options


def _value(key: str, value: Any, numbers: Mapping[str, float | str]) -> Any:
    if isinstance(value, Mapping):
        if "_target_" not in value:
            return {name: _value(f"{key}.{name}", part, numbers) for name, part in value.items()}
        made = _completed(key, value, numbers)
        takes = parameters(locate(f"{key}._target_", str(value["_target_"])))
        return {name: number for name, number in numbers.items() if name in takes} | made
    if isinstance(value, list | tuple):
        return [_value(key, part, numbers) for part in value]
    if not isinstance(value, str) or not value.startswith(LATER):
        return value
    name = value.removeprefix(LATER)
    if name not in numbers:
        raise UserError(f"{key}={value}: {unknown_name_message(name, sorted(numbers))}")
    return numbers[name]
