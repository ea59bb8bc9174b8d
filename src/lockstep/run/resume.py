"""`resume=`: a run goes on in its own folder, with its own config; what the command line says wins.

A SLURM job that was queued again resumes by itself, a run or a sweep.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser  # as in lockstep.run.cli
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.atomic import replacing
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.group import agree
from lockstep.run import checks, slurm
from lockstep.run.checks import ROOT
from lockstep.run.config import Config, check_nodes

MULTIRUN = {"-m", "--multirun"}
NAMED = {"name", "model", "data", "experiment"}  # what a run's name is made of


def overrides(arguments: Sequence[str], config_name: str) -> list[str]:
    """The command line with `resume=` replaced by what it stands for: the overrides of the run that goes on, the
    config folders that it was composed with, what is given now, the run's own folder and its checkpoint.

    Args:
        arguments: `sys.argv[1:]`.

    Raises:
        Refusal: there is nothing to resume, or the program is another one than train.py.
    """
    flags, task = separated(arguments)
    wanted = [argument.removeprefix("resume=") for argument in task if argument.startswith("resume=")]
    if not wanted and slurm.restarted() and config_name == "train":
        runs = _runs(arguments, config_name)
        if sweep := slurm.earlier_sweep(runs, task):
            return [f"sweep.resume={sweep}", *flags]
        run = slurm.earlier_run(runs, task) if MULTIRUN.isdisjoint(flags) else None
        wanted = [str(run)] if run else []
    if not wanted or wanted[-1] in ("null", "None", ""):
        return list(arguments)
    if config_name != "train":
        raise Refusal(
            f"resume={wanted[-1]}: only train.py goes on with a run; evaluate, predict and export take checkpoint="
        )
    given = [argument for argument in task if not argument.startswith("resume=")]
    checkpoint = _find(wanted[-1], given, flags, config_name)
    folder = checkpoint.parent.parent
    if not (folder / ".hydra" / "overrides.yaml").exists():
        raise Refusal(f"resume={wanted[-1]}: {folder} is no run folder, it has no .hydra/overrides.yaml")
    own = [f"resume={quoted(checkpoint)}", f"hydra.run.dir={quoted(folder)}", "hydra.output_subdir=null"]
    return [*_together(folder, given, arguments), *own, *flags]


def _together(folder: Path, given: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The overrides of the run in a folder, and those that are given now, which win."""
    saved = folder / ".hydra" / "overrides.yaml"
    before = [str(override) for override in OmegaConf.load(saved)] if saved.exists() else []
    if (of_hydra := saved.with_name("hydra.yaml")).exists():
        before += config_folders(OmegaConf.load(of_hydra), arguments)
    kept = {key(override): override for override in before if key(override) != "resume"}
    kept |= {key(argument): argument for argument in given}
    return list(kept.values())


def separated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line's flags, with their values, and its overrides. Together again, flags stand last: a value of theirs
    may be left out, and argparse takes overrides in one row only."""
    overrides = _parsed(arguments).overrides
    return [argument for argument in arguments if argument not in overrides], overrides


def config_folders(record: Any, arguments: Sequence[str]) -> list[str]:
    """Where what `record` tells of was composed with `--config-dir`, and the command line has none: the override that
    stands for it."""
    if _parsed(arguments).config_dir:
        return []
    sources = OmegaConf.select(record, "hydra.runtime.config_sources", default=[])
    return _searched(source.path for source in sources if source.provider.endswith("command-line"))


def composed_of(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """A command line's overrides, and the folders that they choose from."""
    parsed = _parsed(arguments)
    return parsed.overrides, [ROOT / "conf", *([Path(parsed.config_dir)] if parsed.config_dir else [])]


def _parsed(arguments: Sequence[str]) -> Any:
    return get_args_parser().parse_known_intermixed_args(arguments)[0]


def _searched(folders: Iterable[str]) -> list[str]:
    paths = ",".join(quoted(f"file://{folder}") for folder in folders)
    return [f"hydra.searchpath=[{paths}]"] if paths else []


@contextmanager
def recorded(cfg: DictConfig, folder: Path, refusals: tuple[type[Exception], ...]) -> Iterator[None]:
    """While a run goes on, `.hydra` in its folder holds what it goes on with, for the next time; if that is refused,
    what was there before. Hydra itself would leave the refused values, or half a file when it is killed. Of workers
    that exist already, and of several machines, the first one writes."""
    own = uuid.uuid4().hex
    if external_workers():
        writes = environment().rank == 0
    else:
        writes = agree(f"record of {folder}", own, cfg.num_nodes, cfg.rdzv_endpoint) == own
    if not writes:
        yield
        return
    new = {"config.yaml": cfg, "overrides.yaml": HydraConfig.get().overrides.task}
    files = {folder / ".hydra" / name: OmegaConf.to_yaml(content).encode() for name, content in new.items()}
    before = {path: path.read_bytes() for path in files if path.exists()}
    _write(files)
    try:
        yield
    except refusals:
        _write(before)
        raise


def _write(files: Mapping[Path, bytes]) -> None:
    for path, content in files.items():
        with replacing(path) as file:
            file.write(content)


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


def _find(wanted: str, given: list[str], flags: list[str], config_name: str) -> Path:
    """The checkpoint that `resume=` means: `last` (of the newest run), a run folder, or a file."""
    if wanted == "last":
        runs, runs_of = _runs([*given, *flags], config_name), "*"
        if NAMED.isdisjoint(key(argument).partition(".")[0] for argument in given):
            runs, runs_of = runs.parent, "*/*"
        found = newest("resume", runs, runs_of)
        # where machines meet may be what that run was told
        config = _composed([*_together(found, given, [*given, *flags]), *flags], config_name)
        check_nodes(config.num_nodes, config.rdzv_endpoint, config.strategy.name)
        wanted = agree("resumed", str(found), config.num_nodes, config.rdzv_endpoint)
    path = Path(wanted.strip("'\"")).expanduser().resolve()
    if path.is_dir():
        path = path / "checkpoints" / "last.ckpt"
    if not path.exists():
        raise Refusal(f"resume={wanted}: there is no {path}")
    return path


def newest(asked: str, runs: Path, runs_of: str = "*/*") -> Path:
    """The run that was saved last, of the folders in `runs` that match `runs_of`.

    Args:
        asked: the key that is `last`, for the message.

    Raises:
        Refusal: none has a checkpoint.
    """
    found = sorted(runs.glob(f"{runs_of}/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise Refusal(f"{asked}=last: no run in {runs} has a checkpoint")
    folders = [path.parent.parent for path in found]
    if slurm.restarted():  # others may have saved since
        folders = [folder for folder in folders if slurm.ours(folder)] or folders
    return folders[-1]


def _runs(given: Sequence[str], config_name: str) -> Path:
    """The folder of all runs of the name that a command line gives."""
    config = _composed(given, config_name)
    return Path(checks.folder("outputs", config.outputs)) / str(config.name)


def _composed(arguments: Sequence[str], config_name: str) -> DictConfig:
    """The config of a command line, without the keys that it sweeps over."""
    from hydra import compose, initialize_config_dir

    parsed = _parsed(arguments)
    single = [argument for argument in parsed.overrides if not sweeps(argument)]
    if parsed.config_dir:
        single += _searched([os.path.abspath(parsed.config_dir)])
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(config_name, overrides=single)


def must_fit(path: str, checkpoint: Mapping[str, Any], weights: Mapping[str, Any], config: Config, steps: int) -> None:
    """Compares a checkpoint with what is to go on from it, to make `steps` optimizer steps in all.

    Raises:
        Refusal: it holds the weights of another network, the state of another optimizer, a place in an epoch of other
            steps, or more steps.
    """
    sizes = [{name: list(value.shape) for name, value in side.items()} for side in (checkpoint["state_dict"], weights)]
    for name in sorted(sizes[0].keys() | sizes[1].keys()):
        there, here = (side.get(name, "missing") for side in sizes)
        if there != here:
            raise Refusal(f"{path}: made by another network: {name} is {there} there, and {here} in this model")
    before = checkpoint.get("lockstep", {}).get("config", {})
    made, now = before.get("model", {}).get("_target_"), config.model.get("_target_")
    if made is not None and made != now:
        raise Refusal(f"model._target_={now}: {path} was made by {made}")
    optimizer, chosen = (
        one.get("_target_", one.get("name")) for one in (before.get("optimizer", {}), config.optimizer)
    )
    batch_size = before.get("batch_size", config.batch_size)
    if optimizer is not None and optimizer != chosen:
        raise Refusal(f"optimizer={chosen}: {path} holds the state of {optimizer}")
    if batch_size != config.batch_size:
        raise Refusal(f"batch_size={config.batch_size}: {path} stands in an epoch of steps of {batch_size} samples")
    if checkpoint["global_step"] > steps:
        asked = f"max_steps={steps}" if steps == config.max_steps else f"max_epochs={config.max_epochs}"
        raise Refusal(f"{asked}: {path} stands after step {checkpoint['global_step']}, beyond the {steps} asked for")


def differences(before: dict[str, Any], now: dict[str, Any], above: str = "") -> list[str]:
    """What changed between two plain configs, as `key: old -> new`; of a group that another one has replaced, its name
    and what both have."""
    found = []
    replaced = before.get("name") != now.get("name")
    for key in sorted(set(before) & set(now) if above and replaced else set(before) | set(now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{above}{key}.")
        elif old != new:
            found.append(f"{above}{key}: {old} -> {new}")
    return found
