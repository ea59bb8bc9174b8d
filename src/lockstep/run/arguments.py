"""The words of a command line: Hydra's flags, overrides, and the folders that it composes from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser  # what Hydra's main parses flags with: nothing public knows them
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import ROOT, options, unknown

SEVERAL = {"callbacks", "logger", "experiment", "debug"}  # groups whose files add to each other


def keyed(arguments: list[str]) -> list[str]:
    """The arguments as they are.

    Raises:
        Refusal: one is no flag of Hydra's, on which argparse would explain all of these; or chooses of a group what is
            no name, which Hydra would not name, or several files where it would take the last.
    """
    for argument in arguments:
        if (match := re.match(r"\+*(\w+)(@[\w.]*)?=", argument)) and (ROOT / "conf" / match[1]).is_dir():
            value = OverridesParser.create().parse_overrides([argument])[0].value()
            if isinstance(value, int | float | dict | None) or (isinstance(value, list) and match[1] not in SEVERAL):
                raise Refusal(f"{argument}: takes one name; {unknown(str(value or None).lower(), options(match[1]))}")
    for argument in get_args_parser().parse_known_args(arguments)[1]:
        if argument.startswith("-"):
            right = argument.lstrip("-") + "=<value>" * ("=" not in argument)
            raise Refusal(f"{argument}: there is no such flag; an override has no dashes, {right}")
    for override in parsed(arguments).overrides:
        if "=" not in override and not override.startswith("~"):
            raise Refusal(f"{override}: an override is <key>=<value>; --help lists the keys")
    return arguments


def separated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line's flags, with their values, and its overrides. Together again, flags stand last: a value of theirs
    may be left out, and argparse takes overrides in one row only."""
    overrides = parsed(arguments).overrides
    return [argument for argument in arguments if argument not in overrides], overrides


def config_folders(record: Any, arguments: Sequence[str]) -> list[str]:
    """Where what `record` tells of was composed with `--config-dir`, and the command line has none: the override that
    stands for it."""
    if parsed(arguments).config_dir:
        return []
    sources = OmegaConf.select(record, "hydra.runtime.config_sources", default=[])
    return searched(source.path for source in sources if source.provider.endswith("command-line"))


def composed_of(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """A command line's overrides, and the folders that they choose from."""
    found = parsed(arguments)
    return found.overrides, [ROOT / "conf", *([Path(found.config_dir)] if found.config_dir else [])]


def parsed(arguments: Sequence[str]) -> Any:
    """What Hydra makes of a command line."""
    return get_args_parser().parse_known_intermixed_args(arguments)[0]


def searched(folders: Iterable[str]) -> list[str]:
    """The override, if any, that stands for config folders."""
    paths = ",".join(quoted(f"file://{folder}") for folder in folders)
    return [f"hydra.searchpath=[{paths}]"] if paths else []


def quoted(path: Path | str) -> str:
    """A path as an override's value, whatever characters it has."""
    return QuotedString(str(path), Quote.single).with_quotes()


def key(override: str) -> str:
    """What an override of the command line is about."""
    return override.split("=", 1)[0].lstrip("+~")


def given() -> list[str]:
    """The keys of the command line that the current config was composed with."""
    return [key(override) for override in HydraConfig.get().overrides.task]


def sweeps(override: str) -> bool:
    """Whether an override lists values for several runs."""
    return OverridesParser.create().parse_override(override).is_sweep_override()
