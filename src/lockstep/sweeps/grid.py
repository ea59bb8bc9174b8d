"""A sweep over listed values: Hydra's own sweeper lists the jobs, and what is missing of them is run here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.machine import gpu_count
from lockstep.run.checks import checker
from lockstep.run.config import check
from lockstep.run.resume import key
from lockstep.run.schema import Sweep
from lockstep.run.summary import summary_of
from lockstep.run.sweep import SweepFailed
from lockstep.sweeps import jobs
from lockstep.sweeps.jobs import Job, Slot
from lockstep.sweeps.progress import Progress


def of_the_run(overrides: Iterable[str]) -> list[str]:
    """A job's overrides without those that speak to the sweep."""
    return [item for item in overrides if key(item) != "sweep" and not key(item).startswith("sweep.")]


def launch(
    config: DictConfig,
    context: HydraContext,
    task: TaskFunction,
    listed: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """Runs the jobs of a grid that are not complete yet. One that has a checkpoint goes on from it.

    Args:
        listed: overrides of each job.
        first: number of the first of them.

    Raises:
        Refusal: a job can't be run as given; none has begun.
    """
    setup_globals()
    sweep: Sweep = checker(Sweep)("sweep", OmegaConf.to_container(config.sweep, resolve=True))
    folder = Path(config.hydra.sweep.dir).absolute()
    common = set.intersection(*map(set, listed)) if len(listed) > 1 else set()
    every = [
        Job(number, folder / str(number), of_the_run(overrides), " ".join(o for o in overrides if o not in common))
        for number, overrides in enumerate(listed, first)
    ]
    places, inside = devices(sweep.jobs, config)
    progress = Progress(len(every), sweep.metric, sweep.mode, len(places))
    missing = []
    for job in every:
        summary = summary_of(job.folder)
        if summary.get("status") == "completed":
            progress.saw(job.number, summary)
            progress.done += 1
        else:
            missing.append(job)
    if config.hydra.job.config_name == "train":
        check_jobs(config, context, missing)
    run, failed = Runner(config, context, task), list[Job]()

    def ended(job: Job, summary: dict[str, Any]) -> None:
        progress.ended(job, summary)
        if summary.get("status") != "completed":
            failed.append(job)

    try:
        jobs.run_jobs(iter(missing), run, ended, places, inside)
    finally:
        if progress.done < progress.total or failed:
            hint(folder)
    if failed:
        raise SweepFailed(len(failed))
    return [JobReturn(status=JobStatus.COMPLETED) for _ in every]


def check_jobs(config: DictConfig, context: HydraContext, listed: Iterable[Job]) -> None:
    """Refuses what a job would refuse when its turn comes, hours later perhaps.

    Raises:
        Refusal: naming the job.
    """
    for job, error in refusals(config, context, listed):
        if isinstance(error, Refusal):
            raise Refusal(f"{error} (job {job.number}: {job.label})") from None
        if error:
            raise error


def refusals(
    config: DictConfig, context: HydraContext, listed: Iterable[Job]
) -> Iterator[tuple[Job, Exception | None]]:
    """Jobs, and what is wrong with the config of each.

    Hydra composes a config in 80 ms, and has done so for each job of a grid already, to see that it can. Jobs set the
    same keys: where only plain values differ, they are put into the config of the job before, in a tenth of that.
    """
    parser, loader = OverridesParser.create(config_loader=context.config_loader), context.config_loader
    composed: dict[tuple[str, ...], DictConfig] = {}
    for job in listed:
        overrides = parser.parse_overrides(job.overrides)
        values = {
            override.key_or_group: override.value()
            for override in overrides
            if override.type is OverrideType.CHANGE
            and not isinstance(override.value(), list | dict)
            and not loader.get_group_options(override.key_or_group)
        }
        others = tuple(str(override.input_line) for override in overrides if override.key_or_group not in values)
        try:
            if others not in composed:
                composed[others] = loader.load_sweep_config(config, job.overrides)
                with open_dict(composed[others]):
                    del composed[others]["hydra"]
            for name, value in values.items():
                OmegaConf.update(composed[others], name, value)
            check(OmegaConf.to_container(composed[others], resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
            yield job, None
        except (Refusal, HydraException, OmegaConfBaseException) as error:
            yield job, error


class Runner:
    """Runs one job as Hydra's launchers do: composed, in its folder, with what it was given on record."""

    def __init__(self, config: DictConfig, context: HydraContext, task: TaskFunction) -> None:
        self.config, self.context, self.task = config, context, task

    def __call__(self, job: Job) -> None:
        composed = self.context.config_loader.load_sweep_config(self.config, jobs.prepare(job))
        with open_dict(composed):
            composed.hydra.mode = RunMode.MULTIRUN  # which a search says in a file that its jobs are not composed with
            composed.hydra.job.id = composed.hydra.job.num = job.number
            composed.hydra.sweep.dir = str(job.folder.parent)  # also where the jobs' names differ
            composed.hydra.sweep.subdir = job.folder.name
        result = run_job(
            hydra_context=self.context,
            task_function=self.task,
            config=composed,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if result.status is JobStatus.FAILED:
            raise result._return_value  # `return_value` would print before it raises


def devices(count: int, config: DictConfig) -> tuple[list[Slot], bool]:
    """The devices of each job that runs at once, and whether jobs run in this process.

    Raises:
        Refusal: too few devices, or jobs that can only run one by one.
    """
    inside = jobs.in_place(config.num_nodes)
    if inside and count > 1:
        raise Refusal(f"sweep.jobs={count}: needs fork, on one machine, without torchrun; else jobs run one by one")
    gpus = gpu_count() if config.get("accelerator", "cpu") != "cpu" and count > 1 else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",")[:gpus] if named and gpus else [str(number) for number in range(gpus)]
    return jobs.slots(count, visible, sorted(os.sched_getaffinity(0)) if count > 1 else []), inside


def hint(folder: Path) -> None:
    """Says how a sweep that is not complete goes on."""
    program, shown = os.path.relpath(sys.argv[0]), os.path.relpath(folder)
    print(f"to run what is missing: python {program} sweep.resume={shown}", file=sys.stderr)
