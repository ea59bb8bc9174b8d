"""Run a program under Hydra: print errors in one line, and exit with a code that shows how the run ended.

`src/train.py`, `src/evaluate.py`, `src/predict.py` and some of `lockstep/programs/` use this module.
"""

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from lockstep import command_started_at
from lockstep.checkpoint import paths, resume
from lockstep.config import pages
from lockstep.config.arguments import (
    exact_of,
    help_page,
    no_key_message,
    no_name_message,
    no_option_message,
    read_arguments,
    unreadable_override_message,
)
from lockstep.config.check import as_plain
from lockstep.config.hydra_quirks import run_hydra
from lockstep.errors import SweepFailed, UserError
from lockstep.job.run_folder import FolderBusy, lock_folder, register_folder, remove_refused_folder
from lockstep.launch import slurm
from lockstep.launch.environment import PARENT, STARTED, environment, export, external_workers, refuse_unknown_rank
from lockstep.launch.failures import is_printed_by_another_rank, is_raised_by_all_ranks, place_of, user_code_location
from lockstep.launch.portable import choose_kernels
from lockstep.launch.process_group import ranks_writing_in, remove_decisions
from lockstep.launch.process_lifetime import disable_garbage_collector, exit_process
from lockstep.launch.rendezvous import join_external
from lockstep.launch.signals import ENDING, Interrupted, set_parent_death_signal
from lockstep.project import project, use_project_of
from lockstep.report.summary import summary_of, write_conclusion
from lockstep.text import shell_override

Program = Callable[[dict[str, Any], Path], Any]  # it gets the composed config and the folder of its run
# errors that a user can mend, with the exit code REFUSED
BAD_INPUT = (UserError, HydraException, OmegaConfBaseException, yaml.MarkedYAMLError, OSError)
REFUSED, FAILED = 2, 1  # exit codes


class RunFailed(BaseException):
    """A run raised an error, which is the cause of this one.

    It is no `Exception`, since Hydra would print one in another form. So Hydra's own callbacks do not see how the run
    ended.
    """


def command(program: Program, config_name: str, file: str | None = None, config_folder: Path | None = None) -> NoReturn:
    """Run `program(config, run folder)` under Hydra, once or for every job of a sweep, and exit.

    Exit codes: 0 completed, 1 failed (a run, or any job of a sweep), 2 bad input, 130 interrupted from the keyboard,
    143 terminated.

    Args:
        program: the program's work, such as `train`.
        config_name: the program's config, such as `train`.
        file: the program's own file, `__file__`. The project is the folder above it that has `conf/train.yaml`. None:
            see `project`.
        config_folder: a further folder with pages, in which the program's is looked for first. The caller must also
            add it to Hydra's search path.
    """
    if parent := os.environ.pop(PARENT, None):
        set_parent_death_signal(int(parent))
    # SIGUSR1 asks for a checkpoint. Until workers run, there is nothing to save.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    use_project_of(file or project().root)
    import_path = filter(None, [str(project().source), os.environ.get("PYTHONPATH")])  # for jobs of a Hydra launcher
    export(**{STARTED: str(command_started_at), "PYTHONPATH": os.pathsep.join(import_path)})
    disable_garbage_collector()
    code, last_line = run_command(program, config_name, sys.argv[1:], config_folder)
    if code == 0:  # otherwise torchrun may restart the worker, which then reads what rank zero has decided
        remove_decisions()
    for number in ENDING:  # nothing may interrupt the exit
        signal.signal(number, signal.SIG_IGN)
    if last_line and not is_printed_by_another_rank(last_line):
        print(last_line, file=sys.stderr, flush=True)
    exit_process(code)


def run_command(
    program: Program, config_name: str, arguments: Sequence[str], config_folder: Path | None = None
) -> tuple[int, str]:
    """Run the program with some arguments, as `command` does. Return the exit code and a line to print."""
    shows_tracebacks = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them and exiting
    register_folder()  # a function of OmegaConf, used in conf/hydra/default.yaml
    slurm_job_of_command = environment().slurm_job

    def run(cfg: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            run_job_of_sweep(program, cfg, folder, slurm_job_of_command, shows_tracebacks)
        else:
            run_single(program, cfg, folder, can_resume=config_name == "train")

    try:
        set_signal_handlers()
        if {"--help", "-h"} & set(arguments):
            print(help_page(read_arguments(arguments, config_name), config_folder))
            return 0, ""
        refuse_unknown_rank()
        choose_kernels(exact_of(arguments))
        join_external()
        primary = pages.primary(config_name, [config_folder] if config_folder else [])
        resolved = resume.resolve(read_arguments(arguments, config_name))
        overrides = pages.with_one_search_path([*resolved.overrides, *primary.overrides])
        run_hydra(run, [*overrides, *resolved.flags], primary.folder, primary.name)
        return 0, ""
    except (Interrupted, KeyboardInterrupt) as interrupted:
        code = getattr(interrupted, "code", 130)
        requeue_line = slurm.requeue() if code == 143 else None
        how_to_continue = requeue_line or "\n".join(getattr(interrupted, "__notes__", ()))
        return code, "\n".join(filter(None, [str(interrupted) or "interrupted by SIGINT", how_to_continue]))
    except SweepFailed as failed:
        return FAILED, f"error: {failed}"
    except RunFailed as failed:
        error = failed.__cause__ or failed
        code = REFUSED if isinstance(error, BAD_INPUT) else FAILED
    # an error from before the first job (of a call above, of Hydra or of `sweeps.check_jobs`), or FolderBusy of a
    # sweep's job
    except Exception as refused:
        error, code = refused, REFUSED
    if shows_tracebacks:
        print_traceback(error)
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("to continue")]
    return code, "\n".join([f"error: {error_line(error, arguments)}", *notes])


def print_traceback(error: BaseException) -> None:
    """Print where an error was raised: the worker's stack if one has sent it; the parent's explains nothing."""
    of_worker = [note for note in getattr(error, "__notes__", []) if note.startswith("Traceback")]
    print(*(of_worker or traceback.format_exception(error)), sep="", end="", file=sys.stderr)


def set_signal_handlers() -> None:
    """Replace the handlers of `lockstep.exit_on_signal`, which are for the time of the imports."""

    def has_import_handler(signum: int) -> bool:
        return getattr(signal.getsignal(signum), "__module__", "") == "lockstep.exit_on_signal"

    if has_import_handler(signal.SIGINT):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # raises KeyboardInterrupt
    # SIGTERM keeps its handler until workers run, except in a worker that another process has started. It may wait in
    # C++ for a rank that never comes. No handler of Python runs there.
    if has_import_handler(signal.SIGTERM) and external_workers():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_single(program: Program, cfg: DictConfig, folder: Path, can_resume: bool) -> None:
    """Run the program for a command that is no sweep.

    Raises:
        RunFailed: The program raised an error. The folder is removed if the input was refused.
        Interrupted: A signal ended the run.
    """
    writes_in_folder = environment().rank in ranks_writing_in(folder)

    def add_note(error: BaseException, text: str) -> None:
        if can_resume and environment().rank == 0 and paths.last(folder).exists():
            error.add_note(f"{text}: {shell_override('resume', folder)}")

    try:
        run_in_folder(program, cfg, folder, writes_in_folder)
    except Interrupted as interrupted:
        add_note(interrupted, "to continue")
        raise
    except Exception as error:
        if not isinstance(error, BAD_INPUT):
            add_note(error, "to continue from its last checkpoint")
        elif writes_in_folder and not isinstance(error, FolderBusy):  # a busy folder belongs to another run
            remove_refused_folder(folder)
        raise RunFailed from error


def run_job_of_sweep(
    program: Program, cfg: DictConfig, folder: Path, slurm_job_of_command: str | None, shows_tracebacks: bool
) -> None:
    """Run the program for one job of a sweep. If it fails, write the error into its summary, where the sweep reads it.

    Raises:
        FolderBusy: The folder belongs to another run.
        Interrupted: A signal ended the job.
    """
    if not external_workers() and summary_of(folder).get("status") == "completed":
        return  # an earlier start of the sweep completed this job
    export(**{STARTED: str(time.time())})
    writes_in_folder = environment().rank in ranks_writing_in(folder)
    try:
        run_in_folder(program, cfg, folder, writes_in_folder)
        if environment().rank == 0 and summary_of(folder).get("status") != "completed":
            write_conclusion(folder, "completed")  # the program wrote no summary
    except FolderBusy:
        raise
    except Interrupted as interrupted:
        # submitit's launcher runs each job of a sweep in a SLURM job of its own. The end of `run_command`, which
        # requeues, is outside of that SLURM job, so requeue it here.
        if environment().slurm_job != slurm_job_of_command:
            if requeued := slurm.requeue():
                print(requeued, file=sys.stderr, flush=True)
            sys.exit(interrupted.code)
        raise
    except Exception as error:
        line = error_line(error, HydraConfig.get().overrides.task)
        if external_workers() > 1 and not is_raised_by_all_ranks(error):
            sys.exit(f"error: {line}")  # the other ranks wait for this one, so it must end
        if environment().rank == 0:
            write_conclusion(folder, "failed", line)
            if shows_tracebacks:
                print_traceback(error)


def run_in_folder(program: Program, cfg: DictConfig, folder: Path, writes_in_folder: bool) -> None:
    """Run the program while the folder is locked.

    Args:
        writes_in_folder: whether this rank writes into its machine's copy of the folder: rank zero does, and so does
            the first rank of a machine that has another copy.
    """
    with lock_folder(folder, writes_in_folder):
        raw = as_plain(cfg)
        # The folder of a resumed run has `.hydra/` already. train.py replaces it after the first step.
        if writes_in_folder and not (folder / ".hydra").exists():
            resume.write_hydra_files(folder, resume.hydra_files_of(raw))
        program(raw, folder)


def error_line(error: BaseException, overrides: Sequence[str] = ()) -> str:
    """Return an error as one line. For an error of another library or of user code, add its type and its place.

    Args:
        error: the error.
        overrides: those of the command, from which a message takes the name of a chosen page.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, UserError):  # OmegaConf wraps the UserError of a resolver
        cause = cause.__cause__ or cause.__context__
    message = _message(cause or error, overrides)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(message.split()))


def _message(error: BaseException, overrides: Sequence[str]) -> str:
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and "/" in error.missing_cfg_file:
        return no_option_message(*error.missing_cfg_file.rsplit("/", 1))
    if isinstance(error, ConfigCompositionException) and (match := re.match(r"Could not override '([^']+)'", text)):
        return no_key_message(match[1], error.__cause__)
    if match := re.match(r"Interpolation key '(\w+)\.name' not found", text):
        return no_name_message(match[1], overrides)
    if isinstance(error, InterpolationKeyError) and (match := re.match(r"Interpolation key '([^']+)' not found", text)):
        return f"{error.full_key}: there is no key {match[1]}, whose value it takes: give a value, or leave it out"
    if isinstance(error, OverrideParseException):
        return unreadable_override_message(error.override)
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}:{mark.line + 1}: not valid YAML: {error.problem}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} must be given: {error.full_key}=..."
    if isinstance(error, OSError) and error.filename:
        place = user_code_location("".join(traceback.format_exception(error))).removesuffix("; ")
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        makes_folder = "run_job" in names and {*names[names.index("run_job") + 1 :]} <= {"mkdir", "makedirs"}
        outputs = next((each for each in reversed(overrides) if each.startswith("outputs=")), "outputs")
        key = f"{outputs}: " * makes_folder  # Hydra makes the run's folder
        return f"{key}{error.filename}: {error.strerror}" + f" ({place})" * bool(place)
    if text.startswith("Error merging override") and error.__cause__:
        return f"{text}: {error.__cause__}"
    if isinstance(error, BAD_INPUT) or type(error).__module__.startswith(("lockstep", "__main__")):
        return text or type(error).__name__
    return f"{type(error).__name__}{f': {text}' * bool(text)} ({place_of(error)})"
