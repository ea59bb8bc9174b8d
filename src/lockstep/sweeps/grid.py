"""A sweep: of the jobs that Hydra's sweeper has listed, those that are not complete are checked and run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.arithmetic.layout import Refusal, counted
from lockstep.launch.environment import environment
from lockstep.launch.machine import gpu_count
from lockstep.launch.meeting import decide
from lockstep.run.arguments import key
from lockstep.run.checks import checker
from lockstep.run.cli import SweepFailed
from lockstep.run.config import check
from lockstep.run.schema import Sweep
from lockstep.run.summary import summary_of
from lockstep.sweeps import jobs
from lockstep.sweeps.jobs import Job, Slot
from lockstep.sweeps.progress import Progress


def launch(
    config: DictConfig,
    context: HydraContext,
    task: TaskFunction,
    listed: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """Runs the jobs of a sweep that are not complete yet. One that has a checkpoint goes on from it.

    Args:
        listed: overrides of each job.
        first: number of the first of them.

    Raises:
        Refusal: a job can't be run as given; none has begun.
        SweepFailed: a job failed; the others were run.
    """
    setup_globals()
    sweep: Sweep = checker(Sweep)("sweep", OmegaConf.to_container(config.sweep, resolve=True))
    folder = Path(config.hydra.sweep.dir).absolute()
    common = set.intersection(*map(set, listed)) if len(listed) > 1 else set()
    every = []
    for number, overrides in enumerate(listed, first):
        of_the_run = [override for override in overrides if key(override).partition(".")[0] != "sweep"]
        label = " ".join(override for override in overrides if override not in common) or "as given"
        every.append(Job(number, folder / str(number), of_the_run, label))
    inside = jobs.in_place(config.num_nodes)
    places = _places(sweep.jobs, config, inside)
    progress = Progress(len(every), sweep.metric, sweep.mode, len(places))
    missing = []
    for job in every:
        summary = summary_of(job.folder)
        if summary.get("status") == "completed":
            progress.saw(job.number, summary)
        else:
            missing.append(job)
    if config.hydra.job.config_name == "train":
        check_jobs(config, context, missing)

    def start(job: Job) -> None:
        """Runs one job as Hydra's launchers do: composed, in its folder, with what it was given on record."""
        if not (job.folder / "checkpoints" / "last.ckpt").exists():
            for drawn in ("tensorboard", "csv"):  # curves of a beginning that is made again
                shutil.rmtree(job.folder / drawn, ignore_errors=True)
        composed = context.config_loader.load_sweep_config(config, job.overrides)
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = job.number
            composed.hydra.sweep.dir = str(folder)  # also where the jobs' names differ
            composed.hydra.sweep.subdir = job.folder.name
        done = run_job(task, composed, "hydra.sweep.dir", "hydra.sweep.subdir", hydra_context=context)
        if done.status is JobStatus.FAILED:
            raise cast(Exception, done._return_value)  # `return_value` would print before it raises

    def told(job: Job) -> dict[str, Any]:
        what = f"end of {job.number} in life {environment().restarts}"
        return dict(decide(what, lambda: summary_of(job.folder), config.num_nodes, config.rdzv_endpoint))

    try:
        jobs.run_jobs(missing, start, progress.ended, places, told if inside else None)
    finally:
        if progress.done < progress.total or progress.failed:
            program, shown = os.path.relpath(sys.argv[0]), os.path.relpath(folder)
            print(f"to run what is missing: python {program} sweep.resume={shown}", file=sys.stderr)
    if progress.failed:
        raise SweepFailed(f"{counted(progress.failed, 'job')} of the sweep failed")
    return [JobReturn(status=JobStatus.COMPLETED) for _ in every]


def check_jobs(config: DictConfig, context: HydraContext, listed: Iterable[Job]) -> None:
    """Refuses what a job would refuse when it comes to it, hours later perhaps.

    Raises:
        Refusal: naming the job.
    """
    for job in listed:
        composed = context.config_loader.load_sweep_config(config, job.overrides)
        with open_dict(composed):
            del composed["hydra"]
        try:
            plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            check(plain)
        except Refusal as refusal:
            raise Refusal(f"{refusal} (job {job.number}: {job.label})") from None


def _places(count: int, config: DictConfig, inside: bool) -> list[Slot]:
    """The devices of each job that runs at once.

    Raises:
        Refusal: too few devices, or jobs that can only run one by one.
    """
    if count == 1:
        return [Slot()]
    if inside:
        raise Refusal(f"sweep.jobs={count}: needs fork, on one machine, without torchrun; else jobs run one by one")
    gpus = gpu_count() if config.get("accelerator", "cpu") != "cpu" else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",")[:gpus] if named and gpus else [str(number) for number in range(gpus)]
    return jobs.slots(count, visible, sorted(os.sched_getaffinity(0)))
