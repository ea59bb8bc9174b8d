"""Check and run the jobs of a sweep.

Hydra's sweeper lists the jobs. All are checked before the first one begins. The default launcher then runs them,
several at a time, and gives each its GPUs and cores. Each job has its own process, so the others continue if one fails.
`hydra_plugins/lockstep_sweeps.py` registers sweeper and launcher.
"""

import math
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from lockstep.checkpoint import paths
from lockstep.config.arguments import key
from lockstep.config.check import as_plain, check
from lockstep.config.hydra_quirks import BasicSweeper
from lockstep.config.metrics import best_value, modes_with_model, resolve_mode
from lockstep.config.schema import CACHE_KEYS, Sweep
from lockstep.config.value_checks import checker
from lockstep.errors import SweepFailed, UserError
from lockstep.job.run_folder import FolderBusy
from lockstep.launch.environment import environment, export, external_workers
from lockstep.launch.machine import gpu_count
from lockstep.launch.parent import start_method
from lockstep.launch.process_group import broadcast_from_rank_zero
from lockstep.launch.process_lifetime import freeze_imports
from lockstep.launch.signals import (
    Interrupted,
    block_signals,
    forward_signals,
    ignores_hangup,
    set_parent_death_signal,
    unblock_signals,
)
from lockstep.report.summary import summary_of, write_conclusion
from lockstep.text import duration, plural, shell_override, short_path, signal_name

# Keys of `data` that do not decide which samples a run is scored on.
NOT_OF_THE_SAMPLES = frozenset(
    ["augment", "transforms", "mix", "mix_alpha", "sampling", "image_size", "channels", "batch_size", "num_workers"]
) | {*CACHE_KEYS}


@dataclass
class SweepJob:
    """One run of a sweep."""

    number: int
    folder: Path
    overrides: list[str]
    label: str = ""  # the overrides that not all jobs of the sweep have
    started: float = 0.0  # time.monotonic()

    @property
    def completed(self) -> bool:
        return summary_of(self.folder).get("status") == "completed"


def jobs_of(config: DictConfig, listed: Sequence[Sequence[str]], first: int = 0) -> list[SweepJob]:
    """Return the jobs of a sweep from the overrides that Hydra has listed; `first` is the first job's number."""
    common = set.intersection(*map(set, listed)) if len(listed) > 1 else set()
    jobs = []
    for number, overrides in enumerate(listed, first):
        of_the_run = [override for override in overrides if key(override).partition(".")[0] != "sweep"]
        label = " ".join(override for override in overrides if override not in common) or "as given"
        jobs.append(SweepJob(number, Path(config.hydra.sweep.dir).absolute() / str(number), of_the_run, label))
    return jobs


# --- before the first job, whichever launcher runs them ---


def check_jobs(config: DictConfig, context: HydraContext, arguments: Sequence[str]) -> list[str]:
    """Check all jobs of a sweep before the first one begins, since the last one may begin hours later.

    Returns:
        The sweep's overrides. If `threads` is not given and the jobs' layouts would have different numbers of CPU
        threads, the smallest number is added: the number of threads changes rounding, and a comparison of layouts
        would show this difference.

    Raises:
        UserError: A job's config is bad, or the folders or batches of jobs are not ours.
    """
    sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    if sweep["subdir"] != "${hydra.job.num}":
        raise UserError(f"hydra.sweep.subdir={sweep['subdir']}: a job's folder has its number as name: leave it out")
    if (batch := config.hydra.sweeper.max_batch_size) and "lockstep" in config.hydra.launcher._target_:
        raise UserError(f"hydra.sweeper.max_batch_size={batch}: give sweep.jobs=, the number of jobs at the same time")
    if not is_of_training(config):
        return list(arguments)
    sweep_settings(config)  # raises if its metric has no known mode
    overrides = OverridesParser.create(config_loader=context.config_loader).parse_overrides(list(arguments))
    listed = [job for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]
    at_once = max(1, int(OmegaConf.select(config, "sweep.jobs") or 1))
    threads: set[int] = set()  # CPU threads of a worker in each job; 0: the user gave `threads`
    for job in jobs_of(config, listed):
        try:
            raw = as_plain(context.config_loader.load_sweep_config(config, job.overrides))
            settings = check(raw, overridden=list(map(key, job.overrides)))
        except UserError as refusal:
            if job.completed:
                continue
            raise UserError(f"{refusal} (job {job.number}: {job.label})") from None
        threads.add(0 if settings.threads else max(1, settings.worker_threads // at_once))
    return [*arguments, *([f"threads={min(threads)}"] if len(threads) > 1 and 0 not in threads else [])]


def is_of_training(config: DictConfig) -> bool:
    """Return whether the jobs of a sweep train. Those of `lockstep parity`, which has train.yaml's keys, do not."""
    chosen = config.hydra.runtime.choices
    return bool(config.hydra.job.config_name == "train" and not chosen.get("program"))


def sweep_settings(config: DictConfig) -> Sweep:
    """Return the checked group `sweep`, with a `mode` of max or min.

    Raises:
        UserError: A key is bad, the mode contradicts the metric, or nothing says it.
    """
    sweep: Sweep = checker(Sweep)("sweep", OmegaConf.to_container(config.sweep, resolve=True))
    model: Any = OmegaConf.to_container(config.model, resolve=False) if config.get("model") else {}
    mode = resolve_mode("sweep.metric", sweep.metric, sweep.mode, "sweep.mode", modes_with_model(model))
    return replace(sweep, mode=cast(Any, mode))


@contextmanager
def report_jobs(folder: Path, config: DictConfig) -> Iterator[None]:
    """Let a launcher run jobs inside the `with` block. Print what they have scored, and how to run what is missing.

    Raises:
        SweepFailed: Some jobs did not complete.
    """

    def write(*lines: str) -> None:
        if environment().rank == 0:
            print(*lines, sep="\n", file=sys.stderr)

    program = sys.argv[0] if sys.argv[0].startswith("lockstep ") else f"python {short_path(sys.argv[0])}"
    to_continue = f"to run the remaining jobs: {program} {shell_override('sweep.resume', folder)}"
    failure, reason = None, ""
    try:
        yield
    except UserError:
        raise
    except SweepFailed as error:
        failure = error
    except Exception as error:
        reason = f": {(str(error).splitlines() or [type(error).__name__])[0]}"
    except BaseException:  # a signal
        write(to_continue)
        raise
    statuses = [summary_of(job.parent).get("status") for job in folder.glob("*/summary.json")]
    failed = sum(status != "completed" for status in statuses)
    if is_of_training(config) and folder.exists():
        sweep = sweep_settings(config)
        write(*result_lines(folder, sweep.metric, str(sweep.mode)))
    if failure or reason or failed:
        write(to_continue)
        raise failure or SweepFailed(f"{plural(failed, 'job')} of the sweep failed{reason}")


def result_lines(folder: Path, metric: str, mode: str) -> list[str]:
    """Return the lines at the end of a sweep.

    The best run is named if all were scored on the same samples, see `best_of`. Runs that differ in nothing but the
    fold, or the fold and the seed, have a mean instead.

    Args:
        folder: the folder of the sweep.
        metric: the metric that is compared.
        mode: max or min.
    """
    runs = sorted((path.parent for path in folder.glob("*/summary.json")), key=lambda run: (len(run.name), run.name))
    summaries = {run: summary_of(run) for run in runs}
    scored = {run: score for run in runs if (score := _score(summaries[run], metric)) is not None}
    lines, about = [], f"{metric} ({best_value(mode)})"
    if len(scored) > 1 and len({scored_samples(run) for run in scored}) == 1:
        best = best_of({run: summaries[run] for run in scored}, metric, mode)
        lines = [f"best {about}: {scored[best]:.4g} in {short_path(best)}"]
    elif len(scored) > 1 and (folds := _folds(list(scored))):
        values = list(scored.values())
        runs_of = plural(len(folds), "fold") + f", {len(values)} runs" * (len(values) != len(folds))
        lines = [f"{about} over {runs_of}: mean {fmean(values):.4g}, standard deviation {stdev(values):.4g}"]
    elif len(scored) > 1:
        lines = ["the runs were scored on different samples, so none of them is the best"]
    program = shlex.join(["lockstep", "compare", short_path(folder)])
    return [*lines, f"{plural(len(runs), 'run')} in {short_path(folder)} | to compare: {program}"]


def _score(summary: Mapping[str, Any], metric: str) -> float | None:
    """Return the metric of a completed run; None without one, or if it is not finite."""
    value = (summary.get("metrics") or {}).get(metric)
    return value if summary.get("status") == "completed" and value is not None and math.isfinite(value) else None


def best_of(summaries: Mapping[Any, Mapping[str, Any]], metric: str, mode: str) -> Any:
    """Return which of some runs with a score is the best; of equally good ones, that with the smallest val/loss.

    Args:
        summaries: the summary of each run.
        metric: the metric that is compared.
        mode: max or min.
    """

    def rank(run: Any) -> tuple[float, float]:
        score, loss = _score(summaries[run], metric), _score(summaries[run], "val/loss")
        assert score is not None
        return score if mode == "max" else -score, -math.inf if loss is None else -loss

    return max(summaries, key=rank)


def scored_samples(run: Path) -> str:
    """Return a text that is the same for runs that were scored on the same samples, from the run's config."""
    config = _recorded(run, "config.yaml") or {}
    data = {key: value for key, value in (config.get("data") or {}).items() if key not in NOT_OF_THE_SAMPLES}
    return repr(sorted({**data, "data_dir": config.get("data_dir")}.items()))


def chooses_samples(override_key: str) -> bool:
    """Check whether the values of a key are scored on different samples."""
    group, _, option = override_key.partition(".")
    return override_key in ("data", "data_dir") or (
        group == "data" and option.partition(".")[0] not in NOT_OF_THE_SAMPLES
    )


def _folds(runs: Sequence[Path]) -> set[str]:
    """Return the folds of runs that differ in nothing but the fold and the seed; empty for others."""
    overrides = [_recorded(run, "overrides.yaml") or [] for run in runs]
    others = {tuple(each for each in one if key(each) not in ("data.fold", "seed")) for one in overrides}
    folds = {each for one in overrides for each in one if key(each) == "data.fold"}
    return folds if len(others) == 1 else set()


def _recorded(run: Path, name: str) -> Any:
    try:
        return yaml.safe_load((run / ".hydra" / name).read_text())
    except (OSError, yaml.YAMLError):
        return None


# --- the default launcher ---


def launch(config: DictConfig, jobs: Sequence[SweepJob], run: Callable[[SweepJob], None]) -> None:
    """Run the jobs that are not complete, as devices become free. Print a line when a job ends.

    Args:
        run: runs a job; called in the job's own process.

    Raises:
        UserError: There are too few devices for this number of jobs at once.
        SweepFailed: Some jobs failed. The others have completed.
        Interrupted: A signal ended the sweep. Its jobs have saved and ended.
    """
    sweep = sweep_settings(config)
    slots = _slots(sweep.jobs, config)
    folder = Path(config.hydra.sweep.dir)
    progress = Progress(len(jobs), sweep.metric, str(sweep.mode), folder, len(slots))
    done = broadcast_from_rank_zero({job.number: summary_of(job.folder) for job in jobs if job.completed})
    remaining = [job for job in jobs if job.number not in done]
    for number, summary in done.items():
        progress.add(number, summary)
    if not remaining and environment().rank == 0:
        print(f"the sweep is complete, {progress.done} of {progress.total}", file=sys.stderr)

    def run_or_continue(job: SweepJob) -> None:
        if not paths.last(job.folder).exists():
            for drawn in ("tensorboard", "csv"):  # the job starts again, so old curves go
                shutil.rmtree(job.folder / drawn, ignore_errors=True)
        run(job)

    run_jobs(remaining, run_or_continue, progress.report, slots)
    if progress.failed:
        raise SweepFailed(f"{plural(progress.failed, 'job')} of the sweep failed")


@dataclass(frozen=True)
class Slot:
    """The GPUs and cores of the job that runs in this slot. Empty: the job may use all."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()


def _slots(count: int, config: DictConfig) -> list[Slot]:
    """Return a slot for each of `count` jobs that run at the same time."""
    if count == 1:
        return [Slot()]
    if in_this_process():
        where = "on this system and in workers of torchrun, SLURM or MPI"
        raise UserError(f"sweep.jobs={count}: jobs run one by one {where}: use sweep.jobs=1")
    gpus = gpu_count() if config.get("accelerator", "cpu") != "cpu" else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",")[:gpus] if named and gpus else [str(number) for number in range(gpus)]
    return slots(count, visible, sorted(os.sched_getaffinity(0)))


def slots(jobs: int, gpus: Sequence[str], cores: Sequence[int]) -> list[Slot]:
    """Divide the devices among `jobs` jobs that run at the same time. Each gets equally many neighbouring devices.

    The number of threads changes rounding and follows from the cores, so no slot has more cores than another.

    Raises:
        UserError: There are fewer GPUs than jobs; or, without GPUs, fewer cores.
    """
    kind, count = ("GPU", len(gpus)) if gpus else ("core", len(cores))
    if jobs > count:
        are = "is" if count == 1 else "are"
        few = f"each job needs its own {kind}, and there {are} {count}"
        raise UserError(f"sweep.jobs={jobs}: {few}: use sweep.jobs={count} or less")
    cut = [_equal_parts(gpus, jobs), _equal_parts(cores, jobs)]
    return [Slot(tuple(job_gpus), tuple(job_cores)) for job_gpus, job_cores in zip(*cut, strict=True)]


def _equal_parts(things: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    size = len(things) // parts  # 0: a job may use all
    return [things[size * part : size * (part + 1)] for part in range(parts)]


def in_this_process() -> bool:
    """Check whether jobs must run in this process, one by one: in an engine's workers, or without fork."""
    return bool(external_workers()) or start_method() != "fork"


def run_jobs(
    jobs: Sequence[SweepJob],
    run: Callable[[SweepJob], None],
    ended: Callable[[SweepJob, dict[str, Any]], None],
    slots: Sequence[Slot],
    to_file: bool = False,
) -> None:
    """Run jobs as slots become free.

    A job is a fork, since `run` is Hydra's own and has its state, and a parent of workers itself: `call_in_forks` would
    kill them with it, and a program of its own (`started`) would import everything again.

    Args:
        run: runs a job to its end; called in the job's own process.
        ended: called in this process when a job has ended, with the job's summary.
        slots: the devices of the jobs that run at the same time.
        to_file: whether a job's output goes to output.log in its folder; that of several jobs at once always does.

    Raises:
        Interrupted: A signal ended the sweep. The jobs have saved and ended.
    """
    if in_this_process():
        for job in jobs:
            job.started = time.monotonic()
            run(job)
            ended(job, broadcast_from_rank_zero(summary_of(job.folder)))
        return
    import lockstep.job.evaluation  # noqa: F401  import what a run needs once for all jobs

    freeze_imports()
    fork = multiprocessing.get_context("fork")
    running: dict[int, tuple[Any, SweepJob, Slot]] = {}  # by the sentinel of the process
    waiting, free = list(jobs), list(slots)
    with forward_signals() as received:
        while True:
            while free and waiting:
                with block_signals():
                    if received:
                        break
                    job, slot = waiting.pop(0), free.pop(0)
                    job.started = time.monotonic()
                    process = fork.Process(
                        target=_run_job, args=(run, job, slot, to_file or len(slots) > 1, os.getpid())
                    )
                    process.start()
                    running[process.sentinel] = process, job, slot
                    if received:  # the signal came before this process could forward it
                        process.terminate()
            if not running:
                break
            for sentinel in wait(list(running)):
                process, job, slot = running.pop(cast(int, sentinel))
                process.join()
                free.append(slot)
                ended(job, _result(job, process.exitcode))
        if received:
            raise Interrupted(received[0])


def _run_job(run: Callable[[SweepJob], None], job: SweepJob, slot: Slot, to_file: bool, parent: int) -> None:
    """Run a job. This is the first function of its process."""
    os.setpgid(0, 0)  # Ctrl-C reaches the sweep only, which forwards it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not ignores_hangup():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it asks for a checkpoint; until workers run there is none to save
    unblock_signals()
    set_parent_death_signal(parent)
    if slot.cores:
        os.sched_setaffinity(0, slot.cores)
    if slot.gpus:
        export(CUDA_VISIBLE_DEVICES=",".join(slot.gpus))
    try:
        if to_file:  # the lines of several jobs would mix on the console
            job.folder.mkdir(parents=True, exist_ok=True)
            with open(job.folder / "output.log", "ab") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
        run(job)
    except (Interrupted, KeyboardInterrupt) as interrupted:
        if summary_of(job.folder).get("status") != "interrupted":  # no worker has run yet
            write_conclusion(job.folder, "interrupted", str(interrupted) or "interrupted by SIGINT")
        sys.exit(getattr(interrupted, "code", 130))
    except FolderBusy as busy:  # the folder's summary belongs to another run
        print(f"error: {busy}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        write_conclusion(job.folder, "failed", f"{type(error).__name__}: {error}")
        sys.exit(1)


def _result(job: SweepJob, code: int) -> dict[str, Any]:
    """Return the job's summary. Write one if the job's process was killed."""
    if code == 0 and (summary := summary_of(job.folder)):
        return summary
    if code < 0:
        write_conclusion(job.folder, "failed", f"the job was killed by {signal_name(-code)}")
    return {"status": "failed", "error": f"exit code {code}, and no summary"} | summary_of(job.folder)


# --- a line at the end of each job ---


@dataclass
class Progress:
    """Prints the progress of a sweep."""

    total: int  # jobs of the whole sweep
    metric: str  # name in a summary's `metrics` by which the best is chosen
    mode: str  # max or min
    folder: Path  # of the job's folders
    at_once: int = 1  # jobs that run at the same time
    done: int = 0  # jobs that have ended, also before `sweep.resume=`
    failed: int = 0  # jobs that did not complete since this command began
    scored: dict[int, dict[str, Any]] = field(default_factory=dict)  # summaries of completed jobs with the metric
    seconds: list[float] = field(default_factory=list)  # duration of each job that ended since this command began

    def add(self, number: int, summary: dict[str, Any]) -> float | None:
        """Count a job that has ended, and return its metric. Only a completed run can be the best."""
        self.done += 1
        if _score(summary, self.metric) is not None:
            self.scored[number] = summary
        value: float | None = (summary.get("metrics") or {}).get(self.metric)
        return value

    @property
    def best(self) -> int | None:
        """The best job. None if fewer than two have a score, or if they were scored on different samples."""
        if len(self.scored) < 2 or len({scored_samples(self.folder / str(number)) for number in self.scored}) > 1:
            return None
        best: int = best_of(self.scored, self.metric, self.mode)
        return best

    def report(self, job: SweepJob, summary: dict[str, Any]) -> None:
        """Count a job that has just ended, and print its result and the time that is left."""
        status, took = summary.get("status"), time.monotonic() - job.started
        value = self.add(job.number, summary)
        self.failed += status != "completed"
        self.seconds.append(took)
        parts = [f"[{self.done} of {self.total}] job {job.number} {status} in {duration(took)}: {job.label}"]
        if value is not None:
            parts.append(f"{self.metric} {value:.4g}")
        elif status == "completed" and "metrics" in summary:
            logged = ", ".join(name for name in summary["metrics"] if name.startswith("val/"))
            parts.append(f"no {self.metric} to compare: validation logged {logged or 'nothing'}")
        if (best := self.best) is not None:
            score = self.scored[best]["metrics"][self.metric]
            parts.append(f"best {score:.4g} (job {best}, {best_value(self.mode)})")
        if left := self.total - self.done:
            mean = sum(self.seconds) / len(self.seconds)
            parts.append(f"about {duration(mean * max(1, left / self.at_once))} left")
        if environment().rank:
            return
        print(" | ".join(parts), file=sys.stderr, flush=True)
        if status != "completed":
            print(f"job {job.number} {status}: {summary.get('error')}", file=sys.stderr, flush=True)
