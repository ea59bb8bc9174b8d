"""The command line: Hydra's flags, overrides and config folders; the help page; and messages about unknown names."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from lockstep.config import pages
from lockstep.config.hydra_quirks import get_args_parser, whole_config
from lockstep.config.pages import options, quote_path
from lockstep.config.value_checks import CHOICES, keys_called, no_such_key_message, unknown_name_message
from lockstep.errors import UserError
from lockstep.project import project

MODELINE = "# yaml-language-server: $schema"  # the beginning of the line that names a file's schema to editors
LIST_GROUPS = {"callbacks", "extras", "logger", "experiment", "debug"}  # several of their files can be chosen


@dataclass(frozen=True)
class Arguments:
    """The arguments of a command, read once.

    Attributes:
        program: the program's config, such as `train`.
        overrides: what is changed in its config, in order.
        flags: Hydra's flags with their values.
    """

    program: str
    overrides: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def line(self) -> list[str]:
        """The arguments as Hydra reads them.

        The flags come last: a flag without its value would take the next override as its value, and argparse takes
        overrides only if they stand together.
        """
        return [*self.overrides, *self.flags]

    @property
    def config_dir(self) -> str | None:
        """The folder of `--config-dir`."""
        folder: str | None = _parsed(self.flags).config_dir
        return folder

    def value(self, name: str) -> str | None:
        """Return the last value of a key as it was typed; None if it is null or missing.

        Raises:
            UserError: the value is empty.
        """
        values = [each.partition("=")[2] for each in self.overrides if key(each) == name and "=" in each]
        if "" in values:
            raise UserError(f"{name}= is empty: give a value, or {name}=null for none")
        return values[-1] if values and values[-1] not in ("null", "None") else None

    def without(self, name: str) -> list[str]:
        """Return the overrides of other keys."""
        return [each for each in self.overrides if key(each) != name]


def read_arguments(arguments: Sequence[str], program: str) -> Arguments:
    """Read and check the arguments of a command. Hydra's own messages about these errors would not name the cause.

    Args:
        arguments: as in `sys.argv[1:]`.
        program: the program's config, such as `train`.

    Raises:
        UserError: an argument is an unknown flag, is not an override, gives a group a value that is not a name, or
            chooses several files of a group that takes one.
    """
    parsed = _parsed(arguments)
    added = [Path(parsed.config_dir)] if parsed.config_dir else []
    for argument in arguments:
        plain = argument.lstrip("+")
        if plain in CHOICES and not pages.find(plain.replace("=", "/"), added):
            raise UserError(f"{argument}: there is no such file; give {CHOICES[plain]}")
        if (match := re.match(r"\+*(\w+)(@[\w.]*)?=", argument)) and pages.is_group(match[1]):
            value = OverridesParser.create().parse_overrides([argument])[0].value()
            lists_names = isinstance(value, list) and match[1] in LIST_GROUPS
            if isinstance(value, int | float | dict | list | None) and not lists_names:
                raise UserError(
                    f"{argument}: takes one name; {unknown_name_message(str(value or None).lower(), options(match[1]))}"
                )
    for argument in get_args_parser().parse_known_args(arguments)[1]:
        if argument.startswith("-"):
            name, _, value = argument.lstrip("-").replace("-", "_").partition("=")
            override = f"{[*keys_called(name), name][0]}={value or '<value>'}"
            raise UserError(f"{argument}: there is no such flag; an override has no dashes, {override}")
    if name := parsed.config_name or parsed.config_path:
        raise UserError(
            f"--config-name and --config-path ({name}): a run begins with conf/train.yaml: write what differs into "
            "conf/experiment/<name>.yaml and give experiment=<name>"
        )
    overrides = parsed.overrides
    sweeps = parsed.multirun or any(key(each) in ("hydra.mode", "sweep.resume") for each in overrides)
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise UserError(f"{override}: an override is <key>=<value>; --help lists the keys")
        if not sweeps and not parsed.help and is_sweep(override):
            name, _, value = override.partition("=")
            right = f"add -m for a run with each of them, or give '{name}=[{value}]' for a list"
            raise UserError(f"{override}: has several values: {right}; decimals have a point")
    flags = [argument for argument in arguments if argument not in overrides]
    return Arguments(program, tuple(overrides), tuple(flags))


def _parsed(arguments: Sequence[str]) -> Any:
    """Return a command line as Hydra parses it."""
    return get_args_parser().parse_known_intermixed_args(arguments)[0]


def config_dirs_of(record: Any) -> list[str]:
    """Return the `--config-dir` of an earlier run, if it had one.

    Args:
        record: the run's `hydra.yaml` or `multirun.yaml`.
    """
    sources = OmegaConf.select(record, "hydra.runtime.config_sources", default=[])
    return [source.path for source in sources if source.provider.endswith("command-line") and source.schema == "file"]


def key(override: str) -> str:
    """Return the key of an override."""
    return override.split("=", 1)[0].lstrip("+~")


def overridden_keys() -> list[str]:
    """Return the keys of the overrides with which Hydra has composed the current config."""
    return [key(override) for override in HydraConfig.get().overrides.task]


def experiment_keys() -> set[str]:
    """Return the top-level keys and the groups that the chosen files of conf/experiment/ set."""
    config = HydraConfig.get() if HydraConfig.initialized() else None
    chosen = str(config.runtime.choices.get("experiment") or "") if config else ""
    folders = [Path(source.path) for source in config.runtime.config_sources] if config else []
    keys: set[str] = set()
    names = re.findall(r"[^\s,'\[\]]+", chosen)
    for name in names:  # the files that a file names in its `defaults` are appended
        file = pages.find(f"experiment/{name}", folders)
        content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False) if file else {}
        for default in content.pop("defaults", []):
            if isinstance(default, str):
                names += [default] * (default not in names)
            else:
                keys |= {re.sub(r"^(override )?/?|@.*", "", str(each)) for each in default}
        keys |= {str(each) for each in content}
    return keys


def exact_of(arguments: Sequence[str]) -> Any:
    """Return the `exact` that a command line sets, itself or by its experiment, before Hydra composes it."""
    chosen = dict(argument.lstrip("+").partition("=")[::2] for argument in arguments)
    recipe = pages.find(f"experiment/{chosen.get('experiment')}")
    if "exact" not in chosen and recipe:
        chosen = yaml.safe_load(recipe.read_text())
    return chosen.get("exact")


def is_sweep(override: str) -> bool:
    """Check whether an override has values for several runs, as in `lr=0.1,0.2` and `seed=range(3)`."""
    try:
        return OverridesParser.create().parse_overrides([override])[0].is_sweep_override()
    except OverrideParseException:  # it is refused later, with how to quote it
        return False


# --- help ---


def help_page(arguments: Arguments, config_folder: Path | None = None) -> str:
    """Return the help text of a program.

    It is the text of the config files that the arguments choose, or the program's front page if they choose none.

    Args:
        arguments: the arguments of the command.
        config_folder: a folder in which the program's page is looked for first.
    """
    chosen = []
    further = [Path(arguments.config_dir)] if arguments.config_dir else []
    for override in arguments.overrides:
        group, _, names = override.partition("=")
        for name in names.strip("[]").split(",") if pages.is_group(group) else ():
            file = pages.find(f"{group}/{name}", further)
            if file is None:
                raise UserError(no_option_message(group, name))
            chosen.append(f"{group}={name}\n\n{_text(file).strip()}")
    if chosen:
        return "\n\n".join(chosen)
    more = [config_folder] if config_folder else []
    program = arguments.program
    pages_of_it = (f"program/{program}", program, f"primary/{program}")
    page = next((file for name in pages_of_it if (file := pages.find(name, more))), None)
    if page is None:
        raise UserError(f"{program}.yaml: no such page in conf/")
    return front_page(page)


def front_page(page: Path) -> str:
    """Return a program's usage, the files of each group, and the keys of its config with their comments.

    The keys are those of its page, then those that it inherits.
    """
    text = _text(page)
    usage, _, keys = text.partition("defaults:\n")
    usage = re.sub("^# @.*\n", "", usage, flags=re.MULTILINE)  # an instruction to Hydra
    keys = keys[keys.index("\n\n") :].strip()
    inherited = _text(pages.BASE) if "- base" in text else ""
    chosen = text + inherited
    if page.parent.name == "program":  # it adds keys to train.yaml, of which it has all
        chosen = _text(project().conf / "train.yaml") + _text(pages.BASE)
    groups = []
    for group in sorted({path.name for folder in pages.folders() for path in folder.iterdir() if path.is_dir()}):
        if group != "hydra" and f"- {group}:" in chosen:
            groups.append(f"{group}=")
            files = [file for name in pages.options(group) if (file := pages.find(f"{group}/{name}"))]
            groups += [f"  {file.stem:<16} {_purpose(file)}" for file in files]
    if inherited:
        keys += f"\n\n# --- what {page.name} inherits: give it there, or on the command line ---\n"
        keys += _without(inherited[inherited.index("\n\n") :], re.findall(r"^(\w+):", keys, re.MULTILINE)).strip()
    notes = (
        "More: <group>=<name> --help shows that file's keys, -m sweeps over comma-separated values, --cfg job prints "
        "the config, --hydra-help lists Hydra's flags."
    )
    return "\n\n".join([usage.replace("# ", "").strip(), "GROUPS", "\n".join(groups), "KEYS", keys, notes])


def _without(page: str, keys: Sequence[str]) -> str:
    """Return a page without the lines of some of its keys, each of which has a value of one line."""
    lines: list[str] = []
    for line in page.splitlines():
        if (match := re.match(r"(\w+): \S", line)) and match[1] in keys:
            while lines and lines[-1].startswith("# ") and not lines[-1].startswith("# ---"):
                lines.pop()
        else:
            lines.append(line)
    sections = re.split(r"\n\n+", "\n".join(lines))
    return "\n\n".join(each for each in sections if not re.fullmatch(r"# --- [^\n]*", each.strip()))


def no_option_message(group: str, name: str) -> str:
    """Return the message for a group that has no file of this name. It names the files that exist."""
    elsewhere = [f"did you mean {other}={name}?" for other in ("strategy", "extras") if name in options(other)]
    known = options(group)
    if group == "strategy" and not elsewhere and not difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return f"strategy={name}: not supported: use ddp on several devices, auto on one; known: {', '.join(known)}"
    files = {each: pages.find(f"{group}/{each}") for each in known}
    libraries = [each for each, file in files.items() if file and "\nname: ${.arch}" in _text(file)]  # of many nets
    nets = [f"others are in {' or '.join(f'{group}={each}' for each in libraries)} with {group}.arch=<net>"]
    parts = [*elsewhere, unknown_name_message(name, known)]
    return f"{group}={name}: {'; '.join([' '.join(parts), *nets[: len(libraries)]])}"


def no_name_message(group: str, overrides: Sequence[str]) -> str:
    """Return the message for a chosen config file that lacks the key `name`, which is part of the run's name."""
    chosen = [each.partition("=")[2] for each in overrides if key(each) == group]
    name = chosen[-1] if chosen else "mine"
    return f"{group}.name: conf/{group}/{name}.yaml has no name for the run's folder: add the line `name: {name}`"


def no_key_message(key: str, error: Any) -> str:
    """Return the message for an unknown key, with the nearest known key.

    Args:
        key: the dotted key.
        error: OmegaConf's error; None if the key is a group that the program's defaults list lacks.
    """
    if error is None:
        return f"{key}: there is no such key; +{key}=<name> adds it"
    group, _, rest = key.partition(".")
    if (file := rest.partition(".")[0]) and group in LIST_GROUPS and file in options(group):
        return f"{key}: {group}={file} is not chosen: give {group}=[{file}] too"
    if key in options("extras"):
        return f"{key}: there is no such key; did you mean extras=[{key}]?"
    if error.full_key == group and (names := options(group)):
        return f"{key}: there is no such key; files of {group} add keys: give {group}=<name>, one of {', '.join(names)}"
    return no_such_key_message(key, whole_config(error))


def unreadable_override_message(override: str) -> str:
    """Return the message for an override that Hydra can't parse. It shows how to quote the value."""
    key, _, value = override.partition("=")
    pairs = (("[", "]"), ("{", "}"), ("(", ")"))
    if any(value.count(one) != value.count(other) for one, other in pairs) or value.count('"') % 2:
        return f"{override}: a bracket or a quotation mark in the value of {key} is not closed"
    return f"""{override}: a value with spaces, commas, brackets or = must be quoted: "{key}={quote_path(value)}\""""


def _text(file: Path) -> str:
    """Return the text of a config file without the line that names its schema."""
    return "".join(line for line in file.read_text().splitlines(keepends=True) if not line.startswith(MODELINE))


def _purpose(file: Path) -> str:
    """Return the first comment of a config file that is not an instruction to Hydra, such as `@package`."""
    comments = (line.removeprefix("#").strip() for line in _text(file).splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@")), "")
