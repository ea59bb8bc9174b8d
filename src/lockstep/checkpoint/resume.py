"""`resume=` finds a run's folder and puts the run's own overrides before those given now.

The workers then continue from the last.ckpt in that folder (start.py). `sweep.resume=` does the same for the jobs of a
sweep.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.checkpoint import paths
from lockstep.config import value_checks
from lockstep.config.arguments import LIST_GROUPS, Arguments, config_dirs_of, is_sweep, key
from lockstep.config.hydra_quirks import VERSION_BASE
from lockstep.config.pages import group_file, options, primary, quote_path, search_path_override, with_one_search_path
from lockstep.errors import UserError
from lockstep.files import write
from lockstep.launch import slurm
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.process_group import decide_on_rank_zero, gather_objects
from lockstep.text import shell_override

MULTIRUN_FLAGS = {"-m", "--multirun"}
LENGTH = {"max_epochs", "max_steps"}  # the keys that limit a run's length
CONFIG, OVERRIDES = "config.yaml", "overrides.yaml"  # in .hydra/
NAME_KEYS = {"name", "model", "data", "experiment"}  # the keys that determine a run's name


def resolve(arguments: Arguments) -> Arguments:
    """Return the arguments without `last` and with what a resumed run or sweep was started with.

    Where `resume=` continues a run, they have its overrides and config folders, then the overrides given now, then the
    run's folder and its checkpoint. `sweep.resume=` does the same for the jobs of a sweep.

    Raises:
        UserError: there is nothing to resume, the program is not train.py, or the overrides given now would change the
            list of a sweep's jobs.
    """
    return _resolve_sweep(_resolve_run(arguments))


def _resolve_run(arguments: Arguments) -> Arguments:
    """Resolve `resume=`, or `init_from=last`."""
    run, _ = arguments.value("resume"), arguments.value("init_from")  # neither may be empty
    new_overrides = arguments.without("resume")
    if run is None:
        return resolve_start(arguments)
    if any(key(override) == "init_from" for override in new_overrides):
        raise UserError(f"resume={run} continues a run, and init_from= begins a new one: leave one of them out")
    if MULTIRUN_FLAGS & set(arguments.flags):
        raise UserError(f"resume={run} continues one run, and -m starts several: leave one of them out")
    if arguments.program != "train":
        raise UserError(f"resume={run}: only train.py resumes a run: evaluate, predict and export take checkpoint=")

    def find() -> tuple[float, str, list[str]]:
        checkpoint = _find_checkpoint(run, replace(arguments, overrides=tuple(new_overrides)))
        return checkpoint.stat().st_mtime, str(checkpoint), _saved_overrides(checkpoint, arguments)

    _, checkpoint, saved = _newest_of_ranks(find)
    folder = paths.run_of(Path(checkpoint))
    if not folder.exists():  # another machine has it; this one has a folder of the same name in its own `outputs`
        folder = Path("${outputs}", paths.place_in_outputs(folder))
    merged = {key(override): override for override in saved}
    _drop_length(merged, new_overrides)
    _drop_options(merged, new_overrides)
    merged |= {key(override): override for override in new_overrides}
    merged |= {"resume": f"resume={quote_path(checkpoint)}", "hydra.run.dir": f"hydra.run.dir={quote_path(folder)}"}
    return replace(arguments, overrides=tuple(merged.values()))


def _drop_options(saved: dict[str, str], new_overrides: Sequence[str]) -> None:
    """Remove the saved options that newly chosen pages lack: `strategy.reshard=true` if `strategy=ddp` is given."""
    for group, chosen in {key(each): each.partition("=")[2] for each in new_overrides}.items():
        names = {each: each.split(".")[1] for each in saved if each.startswith(f"{group}.")}
        lacking: set[str] = set()
        if group in LIST_GROUPS:  # `extras=none` drops `extras.x.y=1`
            lacking = set(options(group)) - {name.strip() for name in chosen.strip("[]").split(",")}
        elif group == "strategy" and chosen in options(group):
            lacking = set(names.values()) - group_file(group, chosen).keys()
        for option in [option for option, name in names.items() if name in lacking]:
            del saved[option]


def _newest_of_ranks(find: Callable[[], tuple[float, str, list[str]]]) -> tuple[float, str, list[str]]:
    """Call `find` on all ranks and return the result with the newest checkpoint.

    Machines may have different copies of the checkpoints, and rank zero's machine may have none.

    Args:
        find: returns the time, path and overrides of a checkpoint.

    Raises:
        UserError: no rank finds a checkpoint; this is rank zero's error.
    """
    try:
        result: Any = find()
    except UserError as refusal:
        result = str(refusal)
    results = gather_objects(result)  # of each rank: what `find` returned, or the message of its error
    checkpoints = [each for each in results if not isinstance(each, str)]
    if not checkpoints:
        raise UserError(results[0])
    newest: tuple[float, str, list[str]] = max(checkpoints, key=lambda each: each[0])
    return newest


def resolve_start(arguments: Arguments) -> Arguments:
    """Replace `init_from=last` by the newest run's folder, before this command's own run exists.

    Raises:
        UserError: there is none, or the command may be started again, when its own run is the newest.
    """
    if "init_from=last" not in arguments.overrides:
        return arguments

    def newest_run() -> str:
        config = _compose_single(replace(arguments, overrides=tuple(arguments.without("resume"))))
        newest = newest_run_folder("init_from", config.outputs)
        if environment().slurm_job or environment().rdzv_name:
            again = "a job that is started again would find its own run"
            raise UserError(f"init_from=last: {again}: give the folder, {shell_override('init_from', newest)}")
        return str(newest)

    start = f"init_from={quote_path(decide_on_rank_zero('init_from', newest_run))}"
    return replace(
        arguments, overrides=tuple(start if each == "init_from=last" else each for each in arguments.overrides)
    )


def _resolve_sweep(arguments: Arguments) -> Arguments:
    """Resolve `sweep.resume=`."""
    sweep = arguments.value("sweep.resume")
    new_overrides = arguments.without("sweep.resume")
    if sweep is None:
        return replace(arguments, overrides=tuple(new_overrides))
    folder = Path(sweep.strip("'\"")).expanduser().absolute()
    recorded = decide_on_rank_zero(f"sweep.resume={sweep}", partial(_overrides_of_sweep, sweep, folder, arguments))
    merged = {key(argument): argument for argument in recorded}
    if not any(is_sweep(merged[name]) for name in LENGTH & merged.keys()):
        _drop_length(merged, new_overrides)
    for argument in new_overrides:
        in_sweep = merged.get(key(argument), argument)
        if is_sweep(argument) or is_sweep(in_sweep):
            raise UserError(
                f"{argument}: sweep.resume= runs the jobs that the sweep lists ({in_sweep}) and can't change them: "
                f"leave {key(argument)} out"
            )
        merged[key(argument)] = argument
    for name in ("hydra.mode", "hydra.sweep.dir", "sweep.resume"):
        merged.pop(name, None)
    folders = (f"sweep.resume={quote_path(folder)}", f"hydra.sweep.dir={quote_path(folder)}")
    flags = ("-m", *(flag for flag in arguments.flags if flag not in MULTIRUN_FLAGS))
    return replace(arguments, overrides=(*merged.values(), *folders), flags=flags)


def _overrides_of_sweep(sweep: str, folder: Path, arguments: Arguments) -> list[str]:
    """Return the overrides of a sweep, from its folder.

    Args:
        sweep: the folder as it was typed, for the message.
    """
    record = folder / "multirun.yaml"
    if not record.is_file():
        raise UserError(
            f"sweep.resume={sweep}: not a sweep's folder, because it has no {record.name}: give "
            "outputs/<name>/sweeps/<timestamp>"
        )
    try:
        loaded = OmegaConf.load(record)
        overrides = loaded.hydra.overrides
        recorded = [*overrides.hydra, *_config_dir_override(loaded, arguments), *overrides.task]
    except (OmegaConfBaseException, AttributeError, ValueError) as error:
        raise UserError(f"{record}: not the record of a sweep: it must be the file that Hydra has written") from error
    return list(map(str, recorded))


def _config_dir_override(record: Any, arguments: Arguments) -> list[str]:
    """Return a list with the override that adds the `--config-dir` of an earlier run.

    It is empty if the run had none, or the arguments have one.
    """
    folders = [] if arguments.config_dir else config_dirs_of(record)
    return [search_path_override(folders)] if folders else []


def _saved_overrides(checkpoint: Path, arguments: Arguments) -> list[str]:
    """Return the overrides and config folders of the run that a checkpoint belongs to.

    Raises:
        UserError: the checkpoint is not in a run's folder.
    """
    run = paths.run_of(checkpoint)
    hydra_folder = run / ".hydra"
    if checkpoint.parent != paths.folder(run) or not (hydra_folder / OVERRIDES).exists():
        raise UserError(
            f"resume={checkpoint}: not in the checkpoints/ of a run folder, which has a folder .hydra: give "
            "resume=<run folder>"
        )
    saved = [str(override) for override in OmegaConf.load(hydra_folder / OVERRIDES)]
    if (hydra_config := hydra_folder / "hydra.yaml").exists():
        saved += _config_dir_override(OmegaConf.load(hydra_config), arguments)
    # `_resolve_run` adds a new `resume`; an engine (torchrun, SLURM, MPI) sets devices and num_nodes
    left_out = {"resume", *(("devices", "num_nodes") if external_workers() else ())}
    return [override for override in saved if key(override) not in left_out]


def _drop_length(merged: dict[str, str], new_overrides: Sequence[str]) -> None:
    """Remove the saved `max_epochs` and `max_steps` from `merged` if a new override sets one of them."""
    if LENGTH & {key(argument) for argument in new_overrides if argument.partition("=")[2] not in ("null", "")}:
        for name in LENGTH:
            merged.pop(name, None)


def _find_checkpoint(wanted: str, others: Arguments) -> Path:
    """Return the checkpoint that `resume=` names: `last` (of the newest run), a run folder, or a file.

    Args:
        wanted: the value of `resume`.
        others: the other arguments.
    """
    if wanted == "last":
        config = _compose_single(others)
        any_name = NAME_KEYS.isdisjoint(key(argument).partition(".")[0] for argument in others.overrides)
        wanted = str(newest_run_folder("resume", config.outputs, None if any_name else str(config.name)))
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


def newest_run_folder(config_key: str, outputs: Any, name: str | None = None) -> Path:
    """Return the folder of the run that saved a checkpoint last.

    Under SLURM, a restarted job prefers runs that it has worked on.

    Args:
        config_key: the key whose value is `last`, for the message.
        outputs: the config's `outputs`.
        name: the name of the runs; None: any.

    Raises:
        UserError: no run has a checkpoint, or `outputs` is no folder name.
    """
    parent = Path(value_checks.folder("outputs", outputs), name or "")
    folders = _runs_in(parent, "*" if name else "*/*")
    if not folders:
        raise UserError(f"{config_key}=last: no run in {parent} has a checkpoint")
    return ([folder for folder in folders if slurm.worked_on(folder)] or folders)[-1]


def _runs_in(folder: Path, pattern: str) -> list[Path]:
    """Return the runs with a checkpoint that match a pattern in a folder, ordered by the time of the checkpoint."""
    checkpoints = folder.glob(str(paths.last(Path(pattern))))
    return list(map(paths.run_of, sorted(checkpoints, key=lambda path: path.stat().st_mtime)))


def _compose_single(arguments: Arguments) -> DictConfig:
    """Compose the config of a command without the overrides that sweep over values."""
    from hydra import compose, initialize_config_dir

    single = [override for override in arguments.overrides if not is_sweep(override)]
    first = [os.path.abspath(arguments.config_dir)] if arguments.config_dir else []
    page = primary(arguments.program, first=first)
    with initialize_config_dir(str(page.folder), **VERSION_BASE):
        return compose(page.name, overrides=with_one_search_path([*single, *page.overrides]))


# --- files in a run's folder ---


def hydra_files_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the files in a run's `.hydra/`, by name: the config, Hydra's own config, and the overrides.

    Args:
        config: the composed and resolved config, as plain containers.
    """
    hydra = HydraConfig.get()
    content = {CONFIG: config, "hydra.yaml": {"hydra": hydra}, OVERRIDES: hydra.overrides.task}
    return {name: OmegaConf.to_yaml(each) for name, each in content.items()}


def write_hydra_files(folder: Path, hydra_files: Mapping[str, str]) -> None:
    """Write the files of a run's `.hydra/`."""
    for name, text in hydra_files.items():
        write(folder / ".hydra" / name, text.encode())


def last_checkpoint_id(folder: Path) -> tuple[int, int] | None:
    """Return the inode and the time of a run's last checkpoint, which identify its content; None without one."""
    last = paths.last(folder)
    return (last.stat().st_ino, last.stat().st_mtime_ns) if last.exists() else None
