"""Search for good hyperparameters with Optuna. Every trial is a run of src/train.py:

    lockstep search trials=20 model=mnist_cnn 'lr=tag(log,interval(0.001,0.3))' batch_size=32,64,128

The search space is written in Hydra's syntax for sweeps: interval, range, choice, or several values. All other
arguments go to every trial. The search has keys of its own: trials=20, metric= (by default that of a sweep, which is
the model's `monitor`, or val/acc), mode= (max or min; by default it follows from the metric), and folder=. With the
folder of an earlier search, the same command continues that search; several such commands at once share the work. The
folder has one run folder and one <number>.log per trial, Optuna's study.db, and experiment/best.yaml.

A trial runs the code of src/train.py in a fork of this process, as the jobs of a sweep do
(lockstep/commands/sweeps.py).
"""

import contextlib
import fcntl
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

try:
    import optuna
    from sqlalchemy.pool import NullPool
except ImportError:
    print("error: Optuna is not installed: pip install optuna", file=sys.stderr)
    sys.exit(2)


from lockstep import compose, exit_on_signal
from lockstep.commands import cli, project_programs
from lockstep.commands.sweeps import Progress, Slot, SweepJob, chooses_samples, run_jobs
from lockstep.config.metrics import best_value, known_of_model, resolve_mode
from lockstep.config.pages import is_group, quote_path
from lockstep.errors import UserError
from lockstep.files import replacing
from lockstep.launch.process_lifetime import disable_garbage_collector, exit_process
from lockstep.launch.signals import Interrupted
from lockstep.project import project, use_project_of
from lockstep.report.summary import write_conclusion

DEFAULTS = {"trials": "20", "metric": "", "mode": "", "folder": ""}
# Keys that best.yaml leaves out.
NOT_IN_BEST = {"outputs", "name", "resume", "hydra", "sweep", "logger", "debug", "data_dir"}
MAX_REFUSED = 3  # the search ends if this many trials are refused and none completed: the others will be refused too
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Search:
    """A study in a folder, which several processes may work on.

    The process that runs a trial holds the trial's lock. If nobody holds the lock of an unfinished trial, the trial was
    interrupted, and the next process that asks for a trial continues it.

    Args:
        mode: max or min.
        space: Optuna's distribution of each key.
        trials: the number of trials of the whole search.
    """

    def __init__(self, folder: Path, mode: str, space: Mapping[str, Any], trials: int) -> None:
        self.folder, self.mode, self.space, self.trials = folder, mode, dict(space), trials
        folder.mkdir(parents=True, exist_ok=True)
        # Close each connection after use: SQLite does not allow an open one across a fork.
        engine_options = {"connect_args": {"timeout": 60}, "poolclass": NullPool}
        with self.study_lock():
            self.study = optuna.create_study(
                study_name="search",
                storage=optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}", engine_kwargs=engine_options),
                direction="maximize" if mode == "max" else "minimize",
                load_if_exists=True,
            )
        searched = "max" if self.study.direction is optuna.study.StudyDirection.MAXIMIZE else "min"
        if searched != mode:
            raise UserError(f"folder={folder}: its search has mode={searched}, not {mode}: give another folder")

    def next_trial(self) -> tuple[Any, IO[bytes]] | None:
        """Return an interrupted or a new trial, and its lock. Return None if all trials are finished or running."""
        with self.study_lock():
            trials = self.study.get_trials(deepcopy=False)
            for trial in trials:
                if not trial.state.is_finished() and (lock := self.lock(trial.number)):
                    return trial, lock
            if len(trials) >= self.trials:
                return None
            self.study.sampler = optuna.samplers.TPESampler(seed=len(trials))
            new_trial = self.study.ask(self.space)
            lock = self.lock(new_trial.number)
            assert lock is not None, "no other process can hold the lock of a new trial"
            return new_trial, lock

    def record(self, number: int, value: float | None, status: str) -> None:
        """Record a trial's result. The trial fails if `value` is None or not finite, or if it did not complete."""
        valid = status == "completed" and value is not None and math.isfinite(value)
        # Without this lock, `next_trial` in another process could list the trial as unfinished, find its lock free once
        # the caller has closed it, and run the trial again.
        with self.study_lock():
            self.study.tell(number, value if valid else None, state=None if valid else optuna.trial.TrialState.FAIL)

    def finished_trials(self) -> list[Any]:
        """Return the trials that completed or failed."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.is_finished()]

    def lock(self, number: int) -> IO[bytes] | None:
        """Lock a trial until the returned file is closed. Return None if another process holds its lock."""
        file = open(self.folder / f"{number}.lock", "wb")  # noqa: SIM115  `main` closes it after the trial
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a forked process does not inherit the lock
        except BlockingIOError:
            file.close()
            return None
        return file

    @contextlib.contextmanager
    def study_lock(self) -> Iterator[None]:
        """Hold the lock of the study, so that no other process reads or changes it."""
        with open(self.folder / "study.lock", "wb") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield


def distribution(override: Override) -> Any:
    """Return the Optuna distribution for a Hydra sweep. A range ends before its stop, as in a sweep.

    Raises:
        UserError: Optuna refuses the values.
    """
    distributions: Any = optuna.distributions
    value = override.value()
    try:
        if isinstance(value, IntervalSweep):
            low, high, log = value.start, value.end, "log" in value.tags
            if "int" in value.tags or isinstance(low, int):
                return distributions.IntDistribution(int(low or 0), int(high or 0), log=log)
            return distributions.FloatDistribution(low, high, log=log)
        values = [_number_or_text(text) for text in override.sweep_string_iterator()]
        if isinstance(value, RangeSweep) and not value.shuffle:
            whole = all(isinstance(number, int) for number in values)
            distribution_class = distributions.IntDistribution if whole else distributions.FloatDistribution
            return distribution_class(min(values), max(values), step=abs(value.step))
        return distributions.CategoricalDistribution(values)
    except ValueError as error:
        raise UserError(f"{override.input_line}: {error}") from error


def _number_or_text(text: str) -> Any:
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    return text


def write_best(search: Search, metric: str, fixed: list[Override]) -> None:
    """Write the best trial's overrides as a file for conf/experiment/.

    Args:
        metric: name of the metric, for a comment in the file.
        fixed: the overrides that all trials share.
    """
    best = search.study.best_trial
    chosen = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in best.params.items()])
    experiments: list[Any] = []
    groups: list[Any] = []
    values = OmegaConf.create({})
    for override in (*fixed, *chosen):
        key, value = override.key_or_group, override.value()
        if key.partition(".")[0] in NOT_IN_BEST or override.is_delete():
            continue
        if key == "experiment":
            experiments += value if isinstance(value, list) else [value]
        elif is_group(key):
            groups.append({f"override /{key}": value})
        else:
            OmegaConf.update(values, key, value)
    with replacing(search.folder / "experiment" / "best.yaml") as file:
        score = f"{metric} {best.value:.4g} ({best_value(search.mode)})"
        header = f"# @package _global_\n# trial {best.number}, the best of {search.trials}: {score}\n"
        content = OmegaConf.create({"defaults": [*experiments, *groups, "_self_"]})
        file.write((header + OmegaConf.to_yaml(content) + (OmegaConf.to_yaml(values) if values else "")).encode())


def run_trial(job: SweepJob, flags: list[str], log: Path) -> dict[str, Any]:
    """Run a trial in a fork, or resume it if its folder exists.

    Args:
        flags: arguments that begin with a dash.
        log: the file for the trial's output.

    Returns:
        the summary. `refused` is true if the trial did not start.

    Raises:
        Interrupted: the search got SIGTERM or SIGINT. The trial has saved a checkpoint and ended.
    """

    def start(job: SweepJob) -> None:
        arguments = [*job.overrides, f"hydra.run.dir={quote_path(job.folder)}", *flags]
        with _redirect_output(log):
            code, message = cli.run_command(partial(project_programs.train, None), "train", arguments)
            if message:
                print(message, file=sys.stderr)
        if code > 128:
            raise Interrupted(code - 128)
        if code:
            job.folder.mkdir(exist_ok=True)
            error = message.partition("\n")[0].removeprefix("error: ")
            write_conclusion(job.folder, "failed", error, {"refused": code == cli.REFUSED})

    summaries: list[dict[str, Any]] = []
    run_jobs([job], start, lambda _, summary: summaries.append(summary), [Slot()])
    return summaries[0]


@contextlib.contextmanager
def _redirect_output(log: Path) -> Iterator[None]:
    """Append to a file all that this process and its children print."""
    originals = [os.dup(stream) for stream in (1, 2)]
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, original in zip((1, 2), originals, strict=True):
            os.dup2(original, stream)
            os.close(original)


def main(arguments: list[str]) -> NoReturn:
    """Run the search without Python's teardown at its end."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        sys.exit(0)
    exit_on_signal.restore()
    use_project_of(project().root)
    disable_garbage_collector()
    try:
        code = search(arguments)
    except (UserError, HydraException) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        code = 2
    except Interrupted as interrupted:
        code = interrupted.code
    exit_process(code)


def search(arguments: list[str]) -> int:
    """Run the study. Return the exit code: 0, or 1 if no trial completed."""
    settings = DEFAULTS | {
        key: value for key, _, value in (each.partition("=") for each in arguments) if key in DEFAULTS
    }
    if not settings["trials"].isdecimal() or settings["mode"] not in ("", "max", "min"):
        raise UserError(
            f"trials={settings['trials']} mode={settings['mode']}: trials must be a whole number, and mode must be "
            "max or min"
        )
    flags = [each for each in arguments if each.startswith("-")]
    remaining = [each for each in arguments if each not in flags and each.partition("=")[0] not in DEFAULTS]
    parsed = OverridesParser.create().parse_overrides(remaining)
    fixed = [override for override in parsed if not override.is_sweep_override()]
    space = {each.get_key_element(): distribution(each) for each in parsed if each.is_sweep_override()}
    if not space:
        raise UserError("nothing to search: give a range, such as 'lr=tag(log,interval(0.001,0.3))'")
    for override in space:
        if chooses_samples(override):
            raise UserError(
                f"{override}: its values are scored on different samples, so none is the best: sweep it (-m)"
            )
    composed = compose(*(str(each.input_line) for each in fixed))
    sweep = composed["sweep"] if not settings["metric"] else {"mode": None}  # a sweep's mode is of a sweep's metric
    metric, mode = settings["metric"] or str(sweep["metric"]), settings["mode"] or sweep["mode"]
    settings |= {
        "metric": metric,
        "mode": resolve_mode("metric", metric, mode, "mode", known_of_model(composed["model"])),
    }
    outputs = next(
        (str(each.value()) for each in fixed if each.key_or_group == "outputs"), str(project().root / "outputs")
    )
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(settings["folder"] or Path(outputs, "searches", stamp)).expanduser().absolute()
    study = Search(folder, settings["mode"], space, int(settings["trials"]))
    progress = Progress(study.trials, settings["metric"], settings["mode"], folder)
    refused = 0
    while trial_and_lock := study.next_trial():
        trial, lock = trial_and_lock
        values = [f"{key}={value}" for key, value in trial.params.items()]
        overrides = [*(str(each.input_line) for each in fixed), *values]
        job = SweepJob(trial.number, folder / str(trial.number), overrides, " ".join(values), time.monotonic())
        try:
            summary = run_trial(job, flags, folder / f"{trial.number}.log")
        except Interrupted:
            print(f"to continue: run the same command with folder={os.path.relpath(folder)}", file=sys.stderr)
            raise
        study.record(trial.number, (summary.get("metrics") or {}).get(settings["metric"]), summary["status"])
        lock.close()
        for each in study.finished_trials():  # trials of other processes count for the best value too
            progress.add(each.number, {"status": "completed", "metrics": {settings["metric"]: each.value}})
        progress.done = len(study.finished_trials()) - 1  # `report` adds this trial
        progress.report(job, summary)
        refused += summary.get("refused", False)
        if refused == MAX_REFUSED and not progress.values:
            raise UserError(f"the first {MAX_REFUSED} trials were refused: {summary['error']}")
    if all(trial.value is None for trial in study.finished_trials()):
        print(f"error: no trial completed: see {os.path.relpath(folder)}/<number>.log", file=sys.stderr)
        return 1
    write_best(study, settings["metric"], fixed)
    print(f"to run the best again: python src/train.py --config-dir={os.path.relpath(folder)} experiment=best")
    return 0
