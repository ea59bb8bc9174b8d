"""`resume=` finds a run's folder, and the run goes on there with its own config; what the command line says wins. A run
is its folder: its workers go on from the last.ckpt that they find in it (start.py). `sweep.resume=` does the
same for the jobs of a sweep."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.checkpoint import paths
from lockstep.config import value_checks
from lockstep.config.arguments import (
    SEVERAL,
    config_folders,
    is_sweep,
    key,
    parse_arguments,
    quote_path,
    search_path_override,
    split_flags,
)
from lockstep.config.value_checks import ROOT, options
from lockstep.errors import UserError
from lockstep.files import write
from lockstep.launch import slurm
from lockstep.launch.environment import external_workers
from lockstep.launch.process_group import gather_objects
from lockstep.launch.rank_zero_decisions import decide_on_rank_zero
from lockstep.text import shell_override

MULTIRUN = {"-m", "--multirun"}
LENGTH = {"max_epochs", "max_steps"}
RECORD = "overrides.yaml"  # in .hydra/
NAMED = {"name", "model", "data", "experiment"}  # what a run's name is made of


def expand_resume(arguments: Sequence[str], config_name: str) -> list[str]:
    """The command line with `resume=` replaced by what it stands for: the overrides of the run that goes on, the
    config folders that it was composed with, what is given now, the run's own folder and its checkpoint.

    Args:
        arguments: `sys.argv[1:]`.

    Raises:
        UserError: there is nothing to resume, or the program is another one than train.py.
    """
    flags, task = split_flags(arguments)
    for name in ("resume", "init_from"):
        if f"{name}=" in task:
            raise UserError(f"{name}: is empty; {name}=null for none")
    run, new_overrides = _split_off("resume", task)
    if run is None:
        return _expand_init_from(arguments, new_overrides, flags, config_name)
    if any(key(override) == "init_from" for override in new_overrides):
        raise UserError(
            f"resume={run}: goes on with a run's own weights, and init_from begins a new run; leave one out"
        )
    if config_name != "train":
        raise UserError(
            f"resume={run}: only train.py goes on with a run; evaluate, predict and export take checkpoint="
        )

    def find() -> tuple[float, str, list[str]]:
        checkpoint = _find_checkpoint(run, new_overrides, flags, config_name)
        return checkpoint.stat().st_mtime, str(checkpoint), _saved_overrides(checkpoint, flags)

    _, checkpoint, saved = _newest_of_ranks(find)
    folder = paths.run_of(Path(checkpoint))
    if not folder.exists():  # another machine's: this one has a folder of the same name in its own `outputs`
        folder = Path("${outputs}", *folder.parts[-2:])
    merged = {key(override): override for override in saved}
    _drop_length(merged, new_overrides)
    for group in SEVERAL:
        _drop_options(merged, group, new_overrides)
    merged |= {key(override): override for override in new_overrides}
    merged |= {"resume": f"resume={quote_path(checkpoint)}", "hydra.run.dir": f"hydra.run.dir={quote_path(folder)}"}
    return [*merged.values(), *flags]


def _drop_options(saved: dict[str, str], group: str, new_overrides: Sequence[str]) -> None:
    """Leave out saved options of files that the group chosen now does not have: `extras=none` after `extras.x.y=1`."""
    chosen = [override for override in new_overrides if key(override) == group]
    if not chosen:
        return
    names = chosen[-1].partition("=")[2].strip("[]").split(",")
    for name in set(options(group)) - {name.strip() for name in names}:
        for option in [each for each in saved if each.startswith(f"{group}.{name}.")]:
            del saved[option]


def _newest_of_ranks(find: Callable[[], tuple[float, str, list[str]]]) -> tuple[float, str, list[str]]:
    """Return what `find` returns where the checkpoint is the newest: machines may each have copies, and rank zero none.

    Raises:
        UserError: rank zero's; no rank finds anything.
    """
    try:
        mine: Any = find()
    except UserError as refusal:
        mine = str(refusal)
    everywhere = gather_objects(mine)
    usable = [each for each in everywhere if not isinstance(each, str)]
    if not usable:
        raise UserError(everywhere[0])
    newest_of_all: tuple[float, str, list[str]] = max(usable, key=lambda each: each[0])
    return newest_of_all


def _expand_init_from(
    arguments: Sequence[str], new_overrides: list[str], flags: list[str], config_name: str
) -> list[str]:
    """The arguments, where `init_from=last` stands for the run that is the newest before any of these begins."""
    if "init_from=last" not in new_overrides:
        return list(arguments)

    def newest_run() -> str:
        return str(
            newest_run_folder(
                "init_from",
                Path(value_checks.folder("outputs", _compose_single([*new_overrides, *flags], config_name).outputs)),
            )
        )

    folder = decide_on_rank_zero("init_from", newest_run)
    return [f"init_from={quote_path(folder)}" if each == "init_from=last" else each for each in arguments]


def expand_sweep_resume(arguments: Sequence[str]) -> list[str]:
    """The command line with `sweep.resume=<folder>` replaced by what it stands for: the overrides of that sweep, those
    given now, and its folder.

    Raises:
        UserError: it is no sweep's folder, or what is given now would list other jobs.
    """
    flags, task = split_flags(arguments)
    sweep, new_overrides = _split_off("sweep.resume", task)
    if sweep is None:
        return [*new_overrides, *flags]
    folder = Path(sweep.strip("'\"")).expanduser().absolute()
    record = folder / "multirun.yaml"
    if not record.is_file():
        raise UserError(f"sweep.resume={sweep}: no sweep's folder, there is no {record}")
    try:
        loaded = OmegaConf.load(record)
        before = [*loaded.hydra.overrides.hydra, *config_folders(loaded, arguments), *loaded.hydra.overrides.task]
    except (OmegaConfBaseException, AttributeError, ValueError) as error:
        raise UserError(f"{record}: can't be read") from error
    merged = {key(argument): argument for argument in map(str, before)}
    if not any(is_sweep(merged[name]) for name in LENGTH & merged.keys()):
        _drop_length(merged, new_overrides)
    for argument in new_overrides:
        changed = merged.get(key(argument), argument)
        if is_sweep(argument) or is_sweep(changed):
            raise UserError(f"{argument}: sweep.resume= runs the sweep's own jobs, which were given as {changed}")
        merged[key(argument)] = argument
    for name in ("hydra.mode", "hydra.sweep.dir", "sweep.resume"):
        merged.pop(name, None)
    flags = ["-m", *(flag for flag in flags if flag not in MULTIRUN)]
    return [*merged.values(), f"sweep.resume={quote_path(folder)}", f"hydra.sweep.dir={quote_path(folder)}", *flags]


def _split_off(name: str, task: Sequence[str]) -> tuple[str | None, list[str]]:
    """The last value that a key is given, None where it is null, and the other overrides."""
    values = [argument.removeprefix(f"{name}=") for argument in task if argument.startswith(f"{name}=")]
    rest = [argument for argument in task if not argument.startswith(f"{name}=")]
    return (values[-1] if values and values[-1] not in ("null", "None", "") else None), rest


def _saved_overrides(checkpoint: Path, flags: Sequence[str]) -> list[str]:
    """Return the overrides of the run that a checkpoint belongs to, with the config folders that it was composed with.

    Raises:
        UserError: it is not in a run's folder.
    """
    record = paths.run_of(checkpoint) / ".hydra"
    if not (record / RECORD).exists():
        raise UserError(
            f"resume={checkpoint}: not in the checkpoints/ of a run folder, with .hydra/ beside: resume=<run folder>"
        )
    saved = [str(override) for override in OmegaConf.load(record / RECORD)]
    if (of_hydra := record / "hydra.yaml").exists():
        saved += config_folders(OmegaConf.load(of_hydra), flags)
    left_out = {"resume", *(("devices", "num_nodes") if external_workers() else ())}  # which the engine decides
    return [override for override in saved if key(override) not in left_out]


def _drop_length(merged: dict[str, str], new_overrides: Sequence[str]) -> None:
    """Removes the length of the run that goes on where another one is given: epochs for steps, or steps for epochs."""
    if LENGTH & {key(argument) for argument in new_overrides if argument.partition("=")[2] not in ("null", "")}:
        for name in LENGTH:
            merged.pop(name, None)


def _find_checkpoint(wanted: str, new_overrides: list[str], flags: list[str], config_name: str) -> Path:
    """The checkpoint that `resume=` means: `last` (of the newest run), a run folder, or a file."""
    if wanted == "last":
        config = _compose_single([*new_overrides, *flags], config_name)
        runs, runs_of = Path(value_checks.folder("outputs", config.outputs)) / str(config.name), "*"
        if NAMED.isdisjoint(key(argument).partition(".")[0] for argument in new_overrides):
            runs, runs_of = runs.parent, "*/*"
        wanted = str(newest_run_folder("resume", runs, runs_of))
    path = Path(wanted.strip("'\"")).expanduser().resolve()
    if path.is_dir():
        if not paths.last(path).exists() and (runs_below := _runs_in(path, "*") or _runs_in(path, "*/*")):
            raise UserError(
                f"resume={wanted}: a folder of runs, not a run: "
                f"{shell_override('resume', runs_below[-1])} is the newest"
            )
        path = paths.last(path)
    if not path.exists():
        raise UserError(f"resume={wanted}: there is no {path}")
    return path


def newest_run_folder(config_key: str, runs: Path, runs_of: str = "*/*") -> Path:
    """The run that was saved last, of the folders in `runs` that match `runs_of`.

    Args:
        config_key: the key that is `last`, for the message.

    Raises:
        UserError: none has a checkpoint.
    """
    folders = _runs_in(runs, runs_of)
    if not folders:
        raise UserError(f"{config_key}=last: no run in {runs} has a checkpoint")
    return ([folder for folder in folders if slurm.worked_on(folder)] or folders)[-1]  # others may have saved since


def _runs_in(folder: Path, pattern: str) -> list[Path]:
    """The runs with a checkpoint that match a pattern in a folder; the one that was saved last is the last."""
    checkpoints = folder.glob(str(paths.last(Path(pattern))))
    return list(map(paths.run_of, sorted(checkpoints, key=lambda path: path.stat().st_mtime)))


def _compose_single(arguments: Sequence[str], config_name: str) -> DictConfig:
    """The config of a command line, without the keys that it sweeps over."""
    from hydra import compose, initialize_config_dir

    command_line = parse_arguments(arguments)
    single = [argument for argument in command_line.overrides if not is_sweep(argument)]
    if command_line.config_dir:
        single += search_path_override([os.path.abspath(command_line.config_dir)])
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(config_name, overrides=single)


# --- in the folder ---


def record_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the files in a run's `.hydra/`, by name: the config that Hydra has composed now, its own, and
    the overrides.

    Args:
        config: what was composed, resolved, as plain containers.
    """
    hydra = HydraConfig.get()
    content = {"config.yaml": config, "hydra.yaml": {"hydra": hydra}, RECORD: hydra.overrides.task}
    return {name: OmegaConf.to_yaml(each) for name, each in content.items()}


def write_record(folder: Path, record: Mapping[str, str]) -> None:
    """Write the files of a run's `.hydra/`."""
    for name, text in record.items():
        write(folder / ".hydra" / name, text.encode())


def last_checkpoint_id(folder: Path) -> tuple[int, int] | None:
    """Which file a run's last checkpoint is, and when it was written; None where there is none."""
    last = paths.last(folder)
    return (last.stat().st_ino, last.stat().st_mtime_ns) if last.exists() else None
