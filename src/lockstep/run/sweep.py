"""A sweep as the command sees it: how `sweep.resume=` goes on with one, and how one ends that failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.arithmetic.layout import Refusal
from lockstep.run import resume
from lockstep.run.resume import key, quoted, sweeps

RESUME = "sweep.resume="


class SweepFailed(Exception):
    """Jobs of a sweep failed; the others ended well."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} job{'s' * (count > 1)} of the sweep failed")


def arguments(given: Sequence[str]) -> list[str]:
    """The command line with `sweep.resume=<folder>` replaced by what it stands for: the overrides of that sweep, those
    given now, and its folder.

    Raises:
        Refusal: it is no sweep's folder, or what is given now would list other jobs.
    """
    flags, task = resume.separated(given)
    wanted = [argument.removeprefix(RESUME) for argument in task if argument.startswith(RESUME)]
    now = [argument for argument in task if not argument.startswith(RESUME)]
    if not wanted or wanted[-1] in ("null", ""):
        return [*now, *flags]
    folder = Path(wanted[-1].strip("'\"")).expanduser().absolute()
    record = folder / "multirun.yaml"
    if not record.is_file():
        raise Refusal(f"{RESUME}{wanted[-1]}: no sweep's folder, there is no {record}")
    try:
        loaded = OmegaConf.load(record)
        before = [*loaded.hydra.overrides.hydra, *resume.config_folders(loaded, given), *loaded.hydra.overrides.task]
    except (OmegaConfBaseException, AttributeError, ValueError) as error:
        raise Refusal(f"{record}: can't be read") from error
    kept = {key(argument): argument for argument in map(str, before)}
    for argument in now:
        changed = kept.get(key(argument), argument)
        if sweeps(argument) or sweeps(changed):
            raise Refusal(f"{argument}: {RESUME} runs the sweep's own jobs, which were given as {changed}")
        kept[key(argument)] = argument
    for name in ("hydra.mode", "hydra.sweep.dir", "sweep.resume"):
        kept.pop(name, None)
    flags = ["-m", *(flag for flag in flags if flag not in resume.MULTIRUN)]
    return [*kept.values(), f"{RESUME}{quoted(folder)}", f"hydra.sweep.dir={quoted(folder)}", *flags]
