"""What `train.py` and `evaluate.py` share: Hydra composes, refusals are one line, exit codes tell how it ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # what Hydra's main parses flags with: nothing public knows them
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep import began
from lockstep.arithmetic.layout import Refusal
from lockstep.launch.agent import place
from lockstep.launch.environment import STARTED, export, external_workers
from lockstep.launch.group import agree
from lockstep.launch.interpreter import import_quickly, leave
from lockstep.launch.later import import_later
from lockstep.launch.signals import Interrupted
from lockstep.run import checks, resume, slurm, sweep
from lockstep.run.checks import ROOT, options, run_name, unknown
from lockstep.run.config import check_nodes
from lockstep.run.summary import summary_of

Job = Callable[[dict[str, Any], Path], Any]
BAD_INPUT = (Refusal, HydraException, OmegaConfBaseException, OSError)
REFUSED, FAILED = 2, 1
BEGUN = {".hydra", "multirun.yaml", "train.log", "provenance.json", "git.diff", "tensorboard", "csv", "summary.json"}

SEVERAL = {"callbacks", "experiment", "debug"}  # groups whose files add to each other; of any other one is chosen

# What else a user who finds nothing of this name can do.
OWN = dict.fromkeys(("model", "data", "callbacks", "logger"), "; one of your own: docs/own.md") | dict.fromkeys(
    ("optimizer", "scheduler"), "; any other: docs/own.md"
)


def command(job: Job, config_name: str) -> NoReturn:
    """Runs `job(config, run folder)` under Hydra, once or for every job of a sweep, and exits.

    Exit codes: 0 completed, 1 failed (of a sweep: any job), 2 bad input, 130 interrupted from the keyboard, 143
    terminated.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # before and after the workers there is nothing to save
    import_quickly()
    import_later()
    register_resolvers()
    errors: list[Exception] = []  # kept from Hydra, which would print them its own way
    composed = True

    def task(cfg: DictConfig) -> Any:
        folder = Path(HydraConfig.get().runtime.output_dir)
        sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
        goes_on = HydraConfig.get().output_subdir is None  # see resume.overrides
        try:
            with resume.recorded(cfg, folder, BAD_INPUT) if goes_on else nullcontext():
                result = job(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True), folder)  # type: ignore[arg-type]
            shared = external_workers() > 1 or cfg.num_nodes > 1  # another may still be writing the run's summary
            if sweeping and not shared and summary_of(folder).get("status") != "completed":
                sweep.conclude(folder, "completed")  # the program writes none
            return result
        except Exception as error:
            if sweeping and external_workers() > 1 and not all_know(error):  # and would meet this rank in its next job
                print(f"error: {line(error, config_name)}", file=sys.stderr)
                leave(FAILED)
            if sweeping:  # the sweep tells of it, from its own process
                sweep.conclude(folder, "failed", line(error, config_name))
                if full:
                    traceback.print_exception(error)
                return None
            errors.append(error)
            if isinstance(error, BAD_INPUT):
                forget(folder)
            return None

    if {"--help", "-h"} & set(sys.argv):
        try:
            page = chosen_pages(sys.argv[1:]) or front_page(config_name)
        except BAD_INPUT as refused:
            print(f"error: {line(refused, config_name)}", file=sys.stderr)
            leave(REFUSED)
        with suppress(BrokenPipeError):  # piped into head, say
            print(page, flush=True)
        leave(0)
    export(**{STARTED: str(began)})
    full = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # what Hydra itself refuses, it hands on instead of printing it and ending
    try:
        sys.argv[1:] = sweep.arguments(resume.overrides(keyed(sys.argv[1:]), config_name))
        hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name=config_name)(task)()
    except (Interrupted, KeyboardInterrupt) as interrupted:
        print(str(interrupted) or "interrupted by SIGINT", file=sys.stderr)
        code = getattr(interrupted, "code", 130)
        if code == 143 and (told := slurm.requeue()):
            print(told, file=sys.stderr)
        leave(code)
    except sweep.SweepFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        leave(FAILED)
    except Exception as refused:  # by Hydra, or for a whole sweep, before any job: what a job raises is kept above
        errors.append(refused)
        composed = False
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN and isinstance(refused, BAD_INPUT):
            forget(Path(HydraConfig.get().sweep.dir))
    if not errors:
        leave(0)
    if full:
        for error in errors:
            traceback.print_exception(error)
    print(f"error: {line(errors[0], config_name)}", file=sys.stderr)
    leave(FAILED if composed and not isinstance(errors[0], BAD_INPUT) else REFUSED)


def all_know(error: Exception) -> bool:
    """Whether what ended a run ended it on all ranks alike."""
    from lockstep.step.finite import NonFinite

    return isinstance(error, Refusal | NonFinite)


def keyed(arguments: list[str]) -> list[str]:
    """The arguments as they are. Refusal: one sets nothing, on which Hydra fails an assertion; or is no flag of
    Hydra's, on which argparse explains all of these; or chooses of a group what is no name, and Hydra names neither; or
    several files of a group of which one is chosen, and Hydra takes the last."""
    for argument in arguments:
        if re.match(r"[+~]*=", argument):
            raise Refusal(f"{argument}: there is no key before the =, an override is <key>=<value>")
        if (match := re.match(r"\+*(\w+)=", argument)) and (ROOT / "conf" / match[1]).is_dir():
            value = OverridesParser.create().parse_overrides([argument])[0].value()
            if value in (None, "") or isinstance(value, int | float | dict):
                raise Refusal(f"{argument}: {unknown(str(value or None).lower(), options(match[1]))}")
            if isinstance(value, list) and match[1] not in SEVERAL:
                raise Refusal(f"{argument}: takes one name, {match[1]}=<name>; known: {', '.join(options(match[1]))}")
    for argument in get_args_parser().parse_known_args(arguments)[1]:
        if argument.startswith("-"):
            right = argument.lstrip("-") + "=<value>" * ("=" not in argument)
            raise Refusal(f"{argument}: there is no such flag; an override has no dashes, {right}")
    return arguments


def front_page(config_name: str) -> str:
    """The help: how to call it, what each group offers, and the front page of conf/ itself, with its comments."""
    page = (ROOT / "conf" / f"{config_name}.yaml").read_text()
    usage, _, keys = page.partition("defaults:\n")
    keys = keys[keys.index("\n\n") :].strip()
    groups = []
    for folder in sorted(path for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "hydra"):
        if f"- {folder.name}:" in page:
            groups.append(f"{folder.name}=")
            groups += [f"  {file.stem:<16} {_purpose(file)}" for file in sorted(folder.glob("*.yaml"))]
    notes = (
        "More: <group>=<name> --help shows that file's keys, -m sweeps over comma-separated values, --cfg job prints "
        "the config, --hydra-help has Hydra's flags."
    )
    return "\n\n".join([usage.replace("# ", "").strip(), "GROUPS", "\n".join(groups), "KEYS", keys, notes])


def chosen_pages(arguments: list[str]) -> str:
    """The help of what a command line chooses: the files of its groups, with their comments. Empty where it chooses
    none.

    Raises:
        Refusal: there is no such file.
    """
    overrides, folders = resume.composed_of(keyed(arguments))
    pages = []
    for override in OverridesParser.create().parse_overrides(overrides):
        group = override.key_or_group
        if not (ROOT / "conf" / group).is_dir() or override.is_delete():
            continue
        chosen = override.value() if not override.is_sweep_override() else list(override.sweep_string_iterator())
        for name in chosen if isinstance(chosen, list) else [chosen]:
            files = [file for folder in folders if (file := folder / group / f"{name}.yaml").is_file()]
            if not files:
                raise Refusal(f"{group}={name}: {unknown(str(name), options(group))}{OWN.get(group, '')}")
            pages.append(f"{group}={name}\n\n{files[0].read_text().strip()}")
    return "\n\n".join(pages)


def _purpose(file: Path) -> str:
    comments = (line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@")), "")


def line(error: BaseException, config_name: str) -> str:
    """An error as one line for people: with its type and place where it is none of Lockstep's or the program's own."""
    message = str(error)
    if match := re.search(r"Could not override '([^']+)'", message):
        return f"{match[1]}: there is no such key; {_near(match[1], config_name, error.__cause__)}"
    if match := re.search(r"Could not find '([^']+)/([^']+)'", message):
        return f"{match[1]}={match[2]}: {unknown(match[2], options(match[1]))}{OWN.get(match[1], '')}"
    if isinstance(error, OverrideParseException) and re.fullmatch(r"[^=]+=[^\[{(\"'][^\"']*", error.override):
        key, _, value = error.override.partition("=")
        return f"{key}={value}: Hydra can't read this; a text with such characters is quoted: \"{key}='{value}'\""
    if match := re.search(r"Refusal raised while resolving interpolation: (.*)", message):
        return match[1]
    if match := re.search(r"Missing mandatory value: (\S+)", message):
        return f"{match[1]} must be given: {match[1]}=..."
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    refusal = error.__cause__ if isinstance(error.__cause__, Refusal) else error
    name, message = type(refusal).__name__, " ".join(str(refusal).split())
    if not isinstance(refusal, BAD_INPUT) and type(error).__module__.partition(".")[0] not in ("lockstep", "__main__"):
        where = place("".join(traceback.format_exception(error)))
        message = f"{name}{f': {message}' * bool(message)} ({where}HYDRA_FULL_ERROR=1 shows the traceback)"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in message or name)


def _near(key: str, config_name: str, error: Any) -> str:
    """Where an unknown key's name is known, or what is near it: where OmegaConf missed it, or on the front page."""
    *groups, name = key.split(".")
    front = _keys([ROOT / "conf" / f"{config_name}.yaml"])
    if key in front:  # a group of which the front page chooses nothing
        return f"+{key}=<name> adds it"
    files = sorted((ROOT / "conf" / groups[0]).glob("*.yaml")) if groups else []
    if having := [file.stem for file in files if name in _keys([file], *groups[1:])]:
        return f"{groups[0]}={' or '.join(having)} has it"
    beside = error.parent_node if groups and getattr(error, "full_key", None) == key else ()
    known = sorted({str(found) for found in beside} - {"_target_"})
    return unknown(name, front if name in front or not known else known)


def _keys(files: Iterable[Path], *groups: str) -> list[str]:
    """The keys of config files, or of a group inside them; at the top level also the groups that a file composes."""
    found: set[str] = set()
    for file in files:
        node: Any = OmegaConf.to_container(OmegaConf.load(file))
        if not groups:
            found |= {group for entry in node.pop("defaults", []) if isinstance(entry, dict) for group in entry}
        for group in groups:
            node = node.get(group) if isinstance(node, dict) else None
        found |= set(node or ())
    return sorted(found - {"hydra", "_target_"})


def forget(folder: Path) -> None:
    """Removes the folder of a run or a sweep that was refused, unless it holds a checkpoint, or anything not ours."""
    if folder.is_dir() and all(
        path.name in BEGUN or re.fullmatch(r"rank_\d+\.log", path.name) for path in folder.iterdir()
    ):
        shutil.rmtree(folder)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def register_resolvers() -> None:
    """What conf/hydra/default.yaml names a run's folder with."""
    OmegaConf.register_new_resolver("outputs", lambda path: checks.folder("outputs", path), replace=True)
    OmegaConf.register_new_resolver("folder", lambda name: run_name("name", name), replace=True)
    OmegaConf.register_new_resolver("stamp", _stamp, use_cache=True, replace=True)


def _stamp(num_nodes: Any, endpoint: Any, strategy: str) -> str:
    """The name of a run's folder: its start time, the same on all processes that start it together."""
    check_nodes(num_nodes, endpoint, strategy)
    return agree("stamp", datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f"), num_nodes, endpoint)
