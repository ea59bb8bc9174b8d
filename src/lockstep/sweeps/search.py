"""A sweep whose jobs are drawn: Optuna says what to try next, and which trial to end early."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.utils import setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.atomic import replacing
from lockstep.launch.environment import external_workers
from lockstep.run.summary import summary_of
from lockstep.run.sweep import SweepFailed
from lockstep.sweeps import jobs, options
from lockstep.sweeps.grid import Runner, devices, hint, of_the_run, refusals
from lockstep.sweeps.jobs import Job
from lockstep.sweeps.progress import Progress
from lockstep.sweeps.results import write_results
from lockstep.sweeps.study import Study
from lockstep.sweeps.trial import Trial, optuna


def search(config: DictConfig, context: HydraContext, task: TaskFunction, given: Sequence[str]) -> None:
    """Draws and runs trials until the study has as many as it should, and leaves its results in the sweep's folder.

    Args:
        given: overrides; those with Hydra's `interval`, `range`, `choice` or several values are searched.

    Raises:
        Refusal: Optuna is missing, nothing is to be searched, no trial could be run, or the study can't be opened.
    """
    if external_workers() > 1 or config.num_nodes > 1:
        raise Refusal("sweep=optuna: each of several workers or machines would draw jobs of its own; start it on one")
    setup_globals()
    sweep = options.check("sweep", OmegaConf.to_container(config.sweep, resolve=True))
    parsed = {override.key_or_group: override for override in _parser(context).parse_overrides(list(given))}
    searched = [override for override in parsed.values() if override.is_sweep_override()]
    space = {override.get_key_element(): distribution(override) for override in searched}
    if not space:
        raise Refusal("sweep=optuna: nothing to search; give lr='tag(log,interval(0.001,0.3))', say")
    fixed = of_the_run(str(override.input_line) for override in parsed.values() if override not in searched)
    places, inside = devices(sweep["jobs"], config)
    if config.hydra.job.config_name == "train":
        check_fixed(config, context, fixed, space)
    folder = Path(config.hydra.sweep.dir).absolute()
    study = Study(folder, str(config.name), sweep, space)
    with study.alone(), replacing(folder / "multirun.yaml") as file:
        file.write(OmegaConf.to_yaml(config).encode())
    progress = Progress(sweep["trials"], sweep["metric"], sweep["mode"], len(places))
    for trial in study.finished():
        progress.saw(trial.user_attrs["job"], summary_of(Path(trial.user_attrs["folder"])))

    def drawn() -> Iterator[Job]:
        while found := study.draw():
            values = [f"{key}={value}" for key, value in found.params.items()]
            job = Job(found.job, folder / str(found.job), fixed + values, held=found)
            job.label = " ".join(f"{key}={_short(value)}" for key, value in found.params.items())
            told = Trial(study.url, study.name, found.trial.number, sweep["metric"], sweep["prune"])
            job.environment = told.environment() if sweep["prune"] != "none" else {}
            if _other(job):
                shutil.rmtree(job.folder)
            yield job

    def ended(job: Job, summary: dict[str, Any]) -> None:
        study.ended(job.held, summary)
        progress.done = len(study.finished()) - 1  # other processes' trials among them
        progress.ended(job, summary)

    try:
        jobs.run_jobs(drawn(), Runner(config, context, task), ended, places, inside)
    finally:
        if len(study.finished()) < sweep["trials"]:
            hint(folder)
    with study.alone():
        good = write_results(study, config, context)
    if not good:
        raise SweepFailed(len(study.finished()))


def check_fixed(config: DictConfig, context: HydraContext, fixed: Sequence[str], space: Mapping[str, Any]) -> None:
    """Refuses what no trial can mend: a config that is refused in the same words whatever is chosen, with the least
    and with the greatest of what is drawn from intervals. Words about a searched value name it, and so differ.

    Raises:
        Refusal, HydraException, OmegaConfBaseException: those words.
    """
    tried = (
        Job(0, Path(), [*fixed, *(f"{key}={value}" for key, value in zip(space, values, strict=True))])
        for end in ("low", "high")
        for values in product(*(getattr(drawn, "choices", [getattr(drawn, end, None)]) for drawn in space.values()))
    )
    first: Exception | None = None
    for _, error in refusals(config, context, tried):
        if error is None or str(error) != str(first or error):
            return
        first = error
    if first:
        raise first


def distribution(override: Override) -> Any:
    """Hydra's sweep as what Optuna draws from. A range ends before its stop, as in a grid.

    Raises:
        Refusal: the values can't be drawn.
    """
    distributions, value = optuna().distributions, override.value()
    try:
        if isinstance(value, IntervalSweep):
            low, high, log = value.start, value.end, "log" in value.tags
            if "int" in value.tags or isinstance(low, int):
                return distributions.IntDistribution(int(low), int(high), log=log)  # type: ignore[arg-type]
            return distributions.FloatDistribution(low, high, log=log)
        values = [_number(text) for text in override.sweep_string_iterator()]
        if isinstance(value, RangeSweep) and not value.shuffle:
            low, high, step = min(values), max(values), abs(value.step)
            whole = all(isinstance(number, int) for number in values)
            kind = distributions.IntDistribution if whole else distributions.FloatDistribution
            return kind(low, high, step=step)
        return distributions.CategoricalDistribution(values)
    except ValueError as error:
        raise Refusal(f"{override.input_line}: {error}") from error


def _parser(context: HydraContext) -> OverridesParser:
    return OverridesParser.create(config_loader=context.config_loader)


def _number(text: str) -> Any:
    """A value that is a number, as one: it is drawn and shown in order."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _other(job: Job) -> bool:
    """Whether the job's folder holds what was left of another trial."""
    record = job.folder / ".hydra" / "overrides.yaml"
    if not record.is_file():
        return job.folder.exists()
    kept = [str(item) for item in OmegaConf.load(record) if not str(item).startswith("resume=")]
    return kept != job.overrides
