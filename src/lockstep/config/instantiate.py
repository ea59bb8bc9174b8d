"""Creates the object that a config names by `_target_`, as Hydra does, but with one-line errors.

The user's own config may name anything that is installed. A config inside a checkpoint may only name what the user's
own config names too, because a checkpoint from elsewhere could otherwise run any code.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.core.hydra_config import HydraConfig
from pydantic.errors import PydanticUserError

from lockstep.config import pages
from lockstep.config.value_checks import checker, show, unknown_name_message
from lockstep.errors import UserError
from lockstep.launch.failures import is_user_code, user_code_location

LATER = "later:"  # prefix of a value that is only known during the run, as in `T_max: later:total_steps`
HYDRA_KEYS = {"_target_", "_partial_"}
# modules whose annotations are reliable
ANNOTATED = ("lockstep.", "lockstep_", "lightning.pytorch.callbacks.", "torch.optim.")
CHECKED = ("lockstep.vision.", "lockstep_streams.")  # modules that check their options themselves, and say more
PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}  # Lightning's classes that need a further package


def instantiate(key: str, config: Mapping[str, Any], yielding: Collection[str] = (), /, **offers: Any) -> Any:
    """Create the object that a config names, from its other keys.

    Nested targets are created first. With `_partial_: true` return a `functools.partial` that creates the object.

    Args:
        key: the dotted key of the config, for messages.
        config: it has `_target_`, a dotted path.
        yielding: offers that a target with a default of its own, other than None, does not get.
        offers: further arguments. An offer is passed if the target takes an argument of its name and the config has no
            such key. Numbers and strings are also offered to nested targets, and replace the value `later:<name>`.

    Raises:
        UserError: the target is missing, does not take the config's keys, or raises an error, see `call`.
    """
    target = locate(f"{key}._target_", str(config.get("_target_")))
    taken, takes_any = _arguments(target)
    takes = set(taken)
    numbers = {name: value for name, value in offers.items() if isinstance(value, int | float | str)}
    options = {name: value for name, value in config.items() if name not in HYDRA_KEYS}
    if "name" not in takes:  # `name` is then our label of the config group's yaml file, no option of the target
        options.pop("name", None)
    unknown = [name for name in options if name not in takes]
    if unknown and not takes_any:
        near = unknown_name_message(unknown[0], takes - set(numbers)) if len(unknown) == 1 else ""
        # Hydra can't delete a key whose value is null
        deletions = " ".join(f"~{key}.{name}" for name in unknown if options[name] is not None)
        raise UserError(
            f"{', '.join(f'{key}.{name}' for name in unknown)}: {target.__name__} takes no such option; "
            f"leave it out{deletions and f' ({deletions})'}{near and '; ' + near}"
        )
    arguments = {name: _argument(f"{key}.{name}", value, numbers, yielding) for name, value in options.items()}
    if yielding:
        takes -= {name for name, value in defaults(target).items() if value is not None and name in yielding}
    if is_user_code(getattr(sys.modules.get(target.__module__), "__file__", None) or "<"):
        _refuse_letters(key, target, arguments)
    if target.__module__.startswith(ANNOTATED) and not target.__module__.startswith(CHECKED):
        _check_option_types(key, target, arguments)
    make = partial(target, **{name: value for name, value in offers.items() if name in takes} | arguments)
    return make if config.get("_partial_") else call(key, make)


def _argument(key: str, value: Any, numbers: Mapping[str, float | str], yielding: Collection[str]) -> Any:
    """Return the argument for a config's value: with its nested targets created, and its `later:` values replaced."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return instantiate(key, value, yielding, **numbers)
        return {name: _argument(f"{key}.{name}", part, numbers, yielding) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_argument(key, part, numbers, yielding) for part in value]
    if not isinstance(value, str) or not value.startswith(LATER):
        return value
    name = value.removeprefix(LATER)
    if name not in numbers:
        raise UserError(f"{key}={value}: {unknown_name_message(name, numbers)}")
    return numbers[name]


def call(key: str, make: partial[Any], *args: Any, of_any_kind: bool = True) -> Any:
    """Call `make(*args)` and turn its errors into a UserError about the config.

    Args:
        key: the dotted key of the config, for messages.
        make: a class or function with the config's keys as arguments.
        args: further arguments.
        of_any_kind: whether to turn other errors than ValueErrors and TypeErrors, too, if a library raises them: an
            option may be wrong in any way, as torchvision looks weights up by name. Those that the user's own code
            raises are left as they are: the traceback shows where.
    """
    name, arguments = make.func.__name__, make.keywords
    try:
        return make(*args)
    except UserError:
        raise
    except Exception as error:
        location = user_code_location(traceback.format_exc()).removesuffix("; ")
        place = f" ({location})" * bool(location)
        # Compare the name of Lightning's exception, because importing its module takes a second.
        if isinstance(error, ValueError) or type(error).__name__ == "MisconfigurationException":
            option = str(error).partition("=")[0]
            raise UserError(f"{key}.{error}" if option in arguments else f"{key}: {error}{place}") from error
        text = str(error)
        if isinstance(error, TypeError):
            _check_option_types(key, make.func, arguments)
        elif not of_any_kind or location:
            raise
        else:
            text = f"{type(error).__name__}: {text}".partition("\n")[0]
        shown = ", ".join(
            f"{k}={show(v)}" for k, v in arguments.items() if isinstance(v, int | float | str | list | dict | None)
        )
        raise UserError(f"{key}: {name}({shown}): {text}{place}") from error


def _check_option_types(key: str, target: Any, arguments: Mapping[str, Any]) -> None:
    """Check options against the annotations of a class or function.

    An annotation of another library may be wrong while the call works. So options of other libraries are only checked
    after an error.
    """
    kinds = _annotations(target)
    for name in (name for name in arguments if name in kinds):
        with suppress(PydanticUserError):  # pydantic can't validate this type
            checker(kinds[name])(f"{key}.{name}", arguments[name])


def _refuse_letters(key: str, target: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse a string for an option of a user's code that is a list: it would be a list of its letters."""
    kinds = _annotations(target)
    for name, value in arguments.items():
        if isinstance(value, str) and _is_list(kinds.get(name)):
            raise UserError(f"{key}.{name}={value}: must be a list: use {key}.{name}=[{value}]")


def _is_list(kind: Any) -> bool:
    """Check whether an annotation takes lists, and no strings; None is left out."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    origins = [get_origin(each) or each for each in kinds if each not in (None, type(None))]
    return bool(origins) and all(each in (list, tuple, set, Sequence, Iterable, Collection) for each in origins)


def parameters(target: Any) -> set[str]:
    """Return the names of the arguments that a class or function takes; see `_arguments`."""
    return set(_arguments(target)[0])


def defaults(target: Any) -> dict[str, Any]:
    """Return the arguments of a class or function that have a default, with it; see `_arguments`."""
    return {name: each.default for name, each in _arguments(target)[0].items() if each.default is not each.empty}


def _arguments(target: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the arguments that a class or function takes, by name, and whether it takes any other name too.

    A class whose constructor has `**kwargs` also takes the arguments of its base class.
    """
    makers = _makers(target)
    taken: dict[str, inspect.Parameter] = {}
    for number, maker in enumerate(makers):
        signature = inspect.signature(maker).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        new = {each.name: each for each in signature if each.kind in kinds and each.name not in ("self", *taken)}
        taken |= new
        if not any(each.kind is each.VAR_KEYWORD for each in signature):
            # If this base class takes no arguments, the subclass uses its `**kwargs` itself.
            return taken, number > 0 and not new
    return taken, len(makers) == 1  # without a base class, `**kwargs` takes any name


def _annotations(target: Any) -> dict[str, Any]:
    """Return the types of the arguments of a class or function, and of its base classes, by name."""
    kinds: dict[str, Any] = {}
    for maker in reversed(_makers(target)):  # the class's own constructor comes last
        with suppress(Exception):  # the annotation uses names that are imported for type checkers only
            kinds |= get_type_hints(maker)
    return kinds


def _makers(target: Any) -> list[Any]:
    """Return a list with the function; for a class, with its constructor and those of its base classes."""
    if not inspect.isclass(target):
        return [target]
    return [vars(owner)["__init__"] for owner in inspect.getmro(target)[:-1] if "__init__" in vars(owner)]


def locate(key: str, target: str) -> Any:
    """Import the class or function that a dotted path names. `key` is the path's key in the config, for messages."""
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
        raise UserError(f"{key}={target}: must be a class or function with a signature") from None
    return located


# --- which targets are allowed ---


def targets_in(key: str, value: Any) -> Iterable[tuple[str, str]]:
    """Yield every `_target_` at any depth of a value, as `(dotted key, target)`. One that is null names nothing."""
    if isinstance(value, Mapping):
        if value.get("_target_") is not None:
            yield f"{key}._target_", str(value["_target_"])
        for name, part in value.items():
            yield from targets_in(f"{key}.{name}", part)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from targets_in(key, part)


def check_target(key: str, target: str) -> None:
    """Refuse a target that is not a dotted path, or whose package is not installed. Nothing is imported."""
    if "." not in target or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"{key}={target}: must be a dotted path such as lockstep.vision.models.ImageClassifier")
    package = target.split(".")[0]
    try:
        module_spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec, such as __main__
        module_spec = None
    if module_spec is None:
        rest = f": leave out `{package}.`, as src/ is where modules are looked for" if package == "src" else ""
        raise UserError(f"{key}={target}: there is no module {package}, neither in src/ nor installed{rest}")
    needed = PACKAGES.get(target.rpartition(".")[2])
    if needed and importlib.util.find_spec(needed) is None:
        raise UserError(f"{key}={target}: needs {needed}: pip install {needed}")


def check_targets_named(path: Path, group: str, saved: Any, requested: Any = None) -> None:
    """Refuse targets in a checkpoint's config that the user's own config does not name. Nothing is imported.

    Args:
        path: the checkpoint, for messages.
        group: the config group, such as `model`.
        saved: the group's config in the checkpoint.
        requested: the group's config on the command line. Targets in it are allowed, and so are those in conf/ and in
            the other folders from which Hydra composes.
    """
    saved_targets = list(targets_in(group, saved))
    if not saved_targets:
        return
    files = [(file, folder) for folder in _config_folders() for file in folder.rglob("*.yaml")]
    parts = [requested, *(_part(file, folder, group) for file, folder in files)]
    allowed = {target for part in parts for _, target in targets_in(group, part)}
    for key, target in saved_targets:
        if target not in allowed:
            raise UserError(
                f"{path}: its {key} is {target}, which no file of conf/{group} names: if you trust this checkpoint, "
                f"name it there, or give +{key}={target}"
            )


def _config_folders() -> list[Path]:
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    return [*pages.folders(), *(Path(source.path) for source in sources if source.schema == "file")]


def _part(file: Path, folder: Path, group: str) -> Any:
    """Return a config file's value of a group: its whole content if the file is in the group's folder."""
    content = _content_with_targets(file.read_text())
    if file.relative_to(folder).parts[0] == group:
        return content
    return content.get(group) if isinstance(content, dict) else None


@cache  # each group of a checkpoint is compared with all files
def _content_with_targets(text: str) -> Any:
    """Return the content of a config file; None if it names no target, or can't be read."""
    try:
        return yaml.safe_load(text) if "_target_" in text else None
    except yaml.YAMLError:  # composing with this file raises its own error
        return None
