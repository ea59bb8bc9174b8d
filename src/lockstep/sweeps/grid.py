"""A sweep: of the jobs that Hydra's sweeper has listed, those that are not complete are checked and run."""

import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.arithmetic.layout import Refusal, counted, duration
from lockstep.launch.environment import environment
from lockstep.launch.machine import cores, gpu_count
from lockstep.launch.meeting import decide
from lockstep.run.arguments import key
from lockstep.run.checks import checker
from lockstep.run.cli import SweepFailed
from lockstep.run.config import check
from lockstep.run.schema import Sweep
from lockstep.run.summary import summary_of
from lockstep.sweeps import jobs
from lockstep.sweeps.jobs import Job, Slot


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
    if not missing and environment().rank == 0:
        best = f" | best {progress.best[0]:.4g}: {folder / str(progress.best[1])}" if progress.best else ""
        print(f"the sweep is complete, {progress.done} of {progress.total}{best}", file=sys.stderr)
    if config.hydra.job.config_name == "train":
        check_jobs(config, context, missing)
        give_same_threads(config, context, every, places)

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
    """Refuses, naming the job, what that would refuse when it comes to it, hours later perhaps."""
    for job in listed:
        try:
            check(_composed(config, context, job))
        except Refusal as refusal:
            raise Refusal(f"{refusal} (job {job.number}: {job.label})") from None


def give_same_threads(config: DictConfig, context: HydraContext, every: Sequence[Job], places: Sequence[Slot]) -> None:
    """Where `threads` is not given and the jobs' layouts would have different numbers of CPU threads, adds the smallest
    of them to the overrides of each job. Sums over another number of threads are rounded differently, and a comparison
    of layouts would show that instead."""
    share = min((len(place.cores) for place in places if place.cores), default=cores()) / cores()  # of a job
    found: dict[int, int | None] = {}
    for job in every:  # those that are complete, too: a resumed sweep goes on as it began
        with suppress(Refusal):
            checked = check(_composed(config, context, job))
            found[job.number] = None if checked.threads else max(1, int(checked.worker_threads * share))
    numbers = {threads for threads in found.values() if threads is not None}
    for job in every:
        if len(numbers) > 1 and found.get(job.number) is not None:
            job.overrides.append(f"threads={min(numbers)}")


def _composed(config: DictConfig, context: HydraContext, job: Job) -> Any:
    """A job's config as plain containers."""
    composed = context.config_loader.load_sweep_config(config, job.overrides)
    with open_dict(composed):
        del composed["hydra"]
    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)


def _places(count: int, config: DictConfig, inside: bool) -> list[Slot]:
    """The devices of each job that runs at once. A Refusal where jobs can only run one by one, or devices are few."""
    if count == 1:
        return [Slot()]
    if inside:
        raise Refusal(f"sweep.jobs={count}: needs fork, on one machine, without torchrun; else jobs run one by one")
    gpus = gpu_count() if config.get("accelerator", "cpu") != "cpu" else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",")[:gpus] if named and gpus else [str(number) for number in range(gpus)]
    return jobs.slots(count, visible, sorted(os.sched_getaffinity(0)))


# --- a line at each job's end ---


@dataclass
class Progress:
    """What a sweep tells while it runs."""

    total: int  # jobs of the whole sweep
    metric: str  # name in a summary's `metrics` by which the best is chosen
    mode: str  # max or min
    at_once: int = 1  # jobs that run at the same time
    done: int = 0  # jobs that are over, of an earlier start too
    failed: int = 0  # those of this start that did not end well
    best: tuple[float, int] | None = None  # value, job number
    seconds: list[float] = field(default_factory=list)  # that each job of this start took

    def saw(self, number: int, summary: dict[str, Any]) -> float | None:
        """Takes down that a job is over, and returns its result; only a completed run can be the best."""
        self.done += 1
        value = (summary.get("metrics") or {}).get(self.metric)
        if value is not None and summary.get("status") == "completed":
            sign = 1 if self.mode == "max" else -1
            if self.best is None or sign * value > sign * self.best[0]:
                self.best = (value, number)
        return value

    def ended(self, job: Job, summary: dict[str, Any]) -> None:
        """Says how a job of this start went."""
        status, took = summary.get("status"), time.monotonic() - job.started
        value = self.saw(job.number, summary)
        self.failed += status != "completed"
        self.seconds.append(took)
        parts = [f"[{self.done} of {self.total}] job {job.number} {status} in {duration(took)}: {job.label}"]
        if value is not None:
            parts.append(f"{self.metric} {value:.4g}")
        elif status == "completed" and "metrics" in summary:
            logged = ", ".join(name for name in summary["metrics"] if name.startswith("val/"))
            parts.append(f"no {self.metric} to choose by; validation logged: {logged or 'nothing'}")
        if self.best:
            parts.append(f"best {self.best[0]:.4g} (job {self.best[1]})")
        if left := self.total - self.done:
            mean = sum(self.seconds) / len(self.seconds)
            parts.append(f"about {duration(mean * max(1, left / self.at_once))} left")
        if environment().rank:
            return
        print(" | ".join(parts), file=sys.stderr, flush=True)
        if status != "completed":
            print(f"job {job.number} {status}: {summary.get('error')}", file=sys.stderr, flush=True)
