"""Search for good hyperparameters with Optuna. Every trial is a run of src/train.py:

    lockstep search trials=20 model=mnist_cnn 'lr=tag(log,interval(0.001,0.3))' batch_size=32,64,128

The search space is written in Hydra's syntax for sweeps: interval, range, choice, or several values. All other
arguments go to every trial. Which trial is the best is decided as in a sweep: by sweep.metric, which is the model's
`monitor` or val/acc, and sweep.mode. The search has two keys of its own: trials=20 and folder=. With the folder of an
earlier search, the same command continues that search. The folder has Optuna's study.db and one run folder per trial,
with output.log in it. The last line is the command that runs the best trial again.
"""

import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

from lockstep.errors import UserError

try:
    import optuna
    from sqlalchemy.pool import NullPool
except ImportError:
    raise UserError("Optuna is not installed: pip install optuna") from None

from lockstep import compose, exit_on_signal
from lockstep.commands import cli, project_programs
from lockstep.commands.sweeps import Progress, Slot, SweepJob, best_of, chooses_samples, run_jobs, sweep_settings
from lockstep.config import value_checks
from lockstep.config.pages import quote_path
from lockstep.config.schema import Sweep
from lockstep.job.run_folder import lock_folder
from lockstep.launch.signals import Interrupted
from lockstep.project import project, use_project_of
from lockstep.report.summary import summary_of, write_conclusion

MAX_REFUSED = 3  # the search ends if this many trials are refused and none completed: the others will be refused too
optuna.logging.set_verbosity(optuna.logging.WARNING)


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


def run_trial(job: SweepJob, flags: list[str]) -> dict[str, Any]:
    """Run a trial as a job of a sweep, or resume it if its folder exists.

    Args:
        flags: arguments that begin with a dash.

    Returns:
        the summary. `refused` is true if the trial did not start.

    Raises:
        Interrupted: the search got SIGTERM or SIGINT. The trial has saved a checkpoint and ended.
    """

    def start(job: SweepJob) -> None:
        arguments = [*job.overrides, f"hydra.run.dir={quote_path(job.folder)}", *flags]
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
    run_jobs([job], start, lambda _, summary: summaries.append(summary), [Slot()], to_file=True)
    return summaries[0]


def main(arguments: list[str]) -> int:
    """Run the search. Return its exit code.

    Raises:
        UserError: the arguments are bad, or no trial can be run.
        Interrupted: a signal ended the search.
    """
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    exit_on_signal.restore()
    use_project_of(project().root)
    try:
        return search(arguments)
    except (UserError, HydraException) as error:
        raise UserError(" ".join(str(error).split())) from error


def search(arguments: list[str]) -> int:
    """Run the study. Return the exit code: 0, or 1 if no trial completed."""
    settings = {"trials": "20", "folder": ""}
    settings |= {key: value for key, _, value in (each.partition("=") for each in arguments) if key in settings}
    if not settings["trials"].isdecimal():
        raise UserError(f"trials={settings['trials']}: must be a whole number")
    flags = [each for each in arguments if each.startswith("-")]
    remaining = [each for each in arguments if each not in flags and each.partition("=")[0] not in settings]
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
    config = OmegaConf.create(dict(compose(*(str(each.input_line) for each in fixed))))
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = (
        Path(settings["folder"] or Path(value_checks.folder("outputs", config.outputs), "searches", stamp))
        .expanduser()
        .absolute()
    )
    with lock_folder(folder):
        return run_study(folder, sweep_settings(config), space, fixed, int(settings["trials"]), flags)


def run_study(
    folder: Path, sweep: Sweep, space: Mapping[str, Any], fixed: list[Override], total: int, flags: list[str]
) -> int:
    """Run the trials that the study in a folder lacks, and print how to run the best one. Return the exit code.

    Args:
        sweep: names the metric and its mode.
        space: Optuna's distribution of each key.
        fixed: the overrides that all trials share.
        total: the number of trials of the whole study.
        flags: arguments that begin with a dash.
    """
    # Close each connection after use: SQLite does not allow an open one across a fork.
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}", engine_kwargs={"poolclass": NullPool})
    direction: Any = "maximize" if sweep.mode == "max" else "minimize"
    study = optuna.create_study(study_name="search", storage=storage, direction=direction, load_if_exists=True)
    if (searched := study.direction.name.lower()) != direction:
        raise UserError(f"folder={folder}: its search has to {searched}, not {direction}: give another folder")
    of_trials = [str(each.input_line) for each in fixed if each.key_or_group.partition(".")[0] != "sweep"]
    progress = Progress(total, sweep.metric, str(sweep.mode), folder)
    for each in study.trials:
        if each.state.is_finished():
            progress.add(each.number, summary_of(folder / str(each.number)))
    refused = 0
    while progress.done < total:
        study.sampler = optuna.samplers.TPESampler(seed=progress.done)
        interrupted = next((each for each in study.trials if not each.state.is_finished()), None)
        trial: Any = interrupted or study.ask(dict(space))
        values = [f"{key}={value}" for key, value in trial.params.items()]
        job = SweepJob(
            trial.number, folder / str(trial.number), [*of_trials, *values], " ".join(values), time.monotonic()
        )
        try:
            summary = run_trial(job, flags)
        except Interrupted:
            print(f"to continue: run the same command with folder={os.path.relpath(folder)}", file=sys.stderr)
            raise
        value = (summary.get("metrics") or {}).get(sweep.metric)
        valid = summary["status"] == "completed" and value is not None and math.isfinite(value)
        study.tell(trial.number, value if valid else None, state=None if valid else optuna.trial.TrialState.FAIL)
        progress.report(job, summary)
        refused += summary.get("refused", False)
        if refused == MAX_REFUSED and not progress.scored:
            raise UserError(f"the first {MAX_REFUSED} trials were refused: {summary['error']}")
    if not progress.scored:
        print(f"error: no trial completed: see {os.path.relpath(folder)}/<number>/output.log", file=sys.stderr)
        return 1
    params = study.trials[best_of(progress.scored, sweep.metric, str(sweep.mode))].params
    best = [f"{key}={value}" for key, value in params.items()]
    print(f"to run the best again: python src/train.py {shlex.join([*flags, *of_trials, *best])}")
    return 0
