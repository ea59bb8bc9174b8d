"""Run a program's job under Hydra: print errors in one line, and exit with a code that shows how the run ended.

`src/train.py`, `src/evaluate.py`, `src/predict.py` and the programs in `scripts/` use this module.
"""

import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lockstep import command_started_at
from lockstep.checkpoint import paths, resume
from lockstep.config import arguments, portable, value_checks
from lockstep.config.arguments import check_arguments
from lockstep.config.hydra_versions import VERSION_BASE, register_resolver
from lockstep.config.value_checks import ROOT, run_name
from lockstep.errors import UserError
from lockstep.launch import slurm
from lockstep.launch.environment import PARENT, STARTED, environment, export, external_workers, refuse_unknown_rank
from lockstep.launch.failures import is_printed_by_another_rank, user_code_location
from lockstep.launch.process_group import decide_on_rank_zero, ranks_writing_in, remove_decisions
from lockstep.launch.process_lifetime import disable_garbage_collector, exit_process
from lockstep.launch.rendezvous import join_external
from lockstep.launch.signals import ENDING, Interrupted, set_parent_death_signal
from lockstep.run import lock
from lockstep.run.machine_check import MACHINE_KEYS
from lockstep.run.summary import summary_of, write_conclusion
from lockstep.text import shell_override

Job = Callable[[dict[str, Any], Path], Any]
# errors that a user can mend, with the exit code REFUSED
BAD_INPUT = (UserError, HydraException, OmegaConfBaseException, yaml.MarkedYAMLError, OSError)
REFUSED, FAILED = 2, 1  # exit codes
# names of the files and folders that Lockstep writes into a run's folder before its first checkpoint
RUN_FILES = {".hydra", "multirun.yaml", "train.log", "provenance.json", "git.diff", "summary.json"}
RUN_FILES |= {"tensorboard", "csv", "wandb", "loggers.json", lock.NAME}


class SweepFailed(Exception):
    """Some jobs of a sweep failed, and the others completed. `lockstep.run.sweeps` raises it."""


def command(job: Job, config_name: str, config_folder: Path = arguments.CONF) -> NoReturn:
    """Run `job(config, run folder)` under Hydra, once or for every job of a sweep, and exit.

    Exit codes: 0 completed, 1 failed (a run, or any job of a sweep), 2 bad input, 130 interrupted from the keyboard,
    143 terminated.

    Args:
        job: the program's work. It gets the composed config.
        config_name: the program's config, such as `train`.
        config_folder: the folder in which `--help` finds the config's yaml file, to print its text. Hydra does not get
            this argument. For a folder other than conf/, the caller must also add it to `hydra.searchpath`.
    """
    if parent := os.environ.pop(PARENT, None):
        set_parent_death_signal(int(parent))
    # SIGUSR1 asks for a checkpoint. Until workers run, there is nothing to save.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    import_path = filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])  # for jobs of a Hydra launcher
    export(**{STARTED: str(command_started_at), "PYTHONPATH": os.pathsep.join(import_path)})
    disable_garbage_collector()
    code, last_line = run_command(job, config_name, config_folder)
    if code == 0:  # otherwise torchrun may restart the worker, which then reads what rank zero has decided
        remove_decisions()
    for number in ENDING:  # nothing may interrupt the exit
        signal.signal(number, signal.SIG_IGN)
    if last_line and not is_printed_by_another_rank(last_line):
        with suppress(OSError):  # the terminal may be closed
            print(last_line, file=sys.stderr, flush=True)
    exit_process(code)


def run_command(job: Job, config_name: str, config_folder: Path = arguments.CONF) -> tuple[int, str]:
    """Run the job with the arguments in `sys.argv`, as `command` does. Return the exit code and a line to print."""
    shows_tracebacks = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them and exiting
    register_folder()  # a function of OmegaConf, used in conf/hydra/default.yaml
    slurm_job_of_command = environment().slurm_job
    raised: list[Exception] = []  # the job's error; Hydra would print it in another form

    def can_continue(folder: Path) -> bool:
        return config_name == "train" and paths.last(folder).exists()

    def run_job(cfg: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
        if sweeping and not external_workers() and summary_of(folder).get("status") == "completed":
            return  # an earlier start of the sweep completed this job
        if sweeping:
            export(**{STARTED: str(time.time())})
        # One rank writes into each copy of the folder: rank zero, or the first rank of a machine that has another copy.
        writes_in_folder = environment().rank in ranks_writing_in(folder)
        try:
            with lock.lock_folder(folder, writes_in_folder):
                raw: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
                # The folder of a resumed run has `.hydra/` already. train.py replaces it after the first step.
                if writes_in_folder and not (folder / ".hydra").exists():
                    resume.write_hydra_files(folder, resume.hydra_files_of(raw))
                job(raw, folder)
            if sweeping and environment().rank == 0 and summary_of(folder).get("status") != "completed":
                write_conclusion(folder, "completed")  # the program wrote no summary
        except lock.FolderBusy as busy:  # the folder belongs to another run
            if sweeping:
                raise
            raised.append(busy)
        except Interrupted as interrupted:
            if can_continue(folder) and not sweeping and environment().rank == 0:
                interrupted.add_note(f"to continue: {shell_override('resume', folder)}")
            # submitit's launcher runs each job of a sweep in a SLURM job of its own. The end of `run_command`, which
            # requeues, is outside of that SLURM job, so requeue it here.
            if environment().slurm_job != slurm_job_of_command:
                if requeued := slurm.requeue():
                    print(requeued, file=sys.stderr, flush=True)
                sys.exit(interrupted.code)
            raise
        except Exception as error:
            if not sweeping:
                raised.append(error)
                if isinstance(error, BAD_INPUT) and writes_in_folder:
                    remove_refused_folder(folder)
                elif can_continue(folder) and environment().rank == 0:
                    error.add_note(f"to continue from its last checkpoint: {shell_override('resume', folder)}")
            # One of several workers that another process has started: end it, since the others would wait for it.
            elif external_workers() > 1 and not ends_all_ranks(error):
                sys.exit(f"error: {error_line(error)}")
            elif environment().rank == 0:  # the sweep reads the error from this summary, and its other jobs run
                write_conclusion(folder, "failed", error_line(error))
                if shows_tracebacks:
                    traceback.print_exception(error)

    # the exit code of an error that is not of BAD_INPUT: FAILED from a job, REFUSED from before the first job
    failure_code = FAILED
    try:
        # The imports are done, during which lockstep.exit_on_signal handles signals. From now on SIGINT raises
        # KeyboardInterrupt. SIGTERM keeps its handler until workers run, except in the case below.
        if has_import_handler(signal.SIGINT):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # A worker that another process has started may wait in C++ for a rank that never comes. No handler of Python
        # runs there.
        if has_import_handler(signal.SIGTERM) and external_workers():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if {"--help", "-h"} & set(sys.argv):
            page = arguments.help_page(config_name, check_arguments(sys.argv[1:]), config_folder)
            with suppress(BrokenPipeError):  # the output may be piped into head
                print(page, flush=True)
            return 0, ""
        refuse_unknown_rank()
        if portable.is_requested(sys.argv[1:]):
            portable.choose_kernels(portable.PORTABLE)
        join_external()
        sys.argv[1:] = resume.expand_sweep_resume(resume.expand_resume(check_arguments(sys.argv[1:]), config_name))
        hydra.main(**VERSION_BASE, config_path=str(ROOT / "conf"), config_name=config_name)(run_job)()
    except (Interrupted, KeyboardInterrupt) as interrupted:
        code = getattr(interrupted, "code", 130)
        requeue_line = slurm.requeue() if code == 143 else None
        how_to_continue = requeue_line or "\n".join(getattr(interrupted, "__notes__", ()))
        return code, "\n".join(filter(None, [str(interrupted) or "interrupted by SIGINT", how_to_continue]))
    except SweepFailed as failed:
        return FAILED, f"error: {failed}"
    # an error from before the first job (of a call above, of Hydra or of `sweeps.check_jobs`), or FolderBusy of a
    # sweep's job
    except Exception as refused:
        raised[:] = [refused]
        failure_code = REFUSED
    if not raised:
        return 0, ""
    (error,) = raised
    if shows_tracebacks:
        traceback.print_exception(error)
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("to continue")]
    code = REFUSED if isinstance(error, BAD_INPUT) else failure_code
    return code, "\n".join([f"error: {error_line(error)}", *notes])


def has_import_handler(signum: int) -> bool:
    """Check whether a signal's handler is that of `lockstep.exit_on_signal`."""
    return getattr(signal.getsignal(signum), "__module__", "") == "lockstep.exit_on_signal"


def ends_all_ranks(error: Exception) -> bool:
    """Check whether all ranks raise this error, and not this rank only."""
    from lockstep.step.finite import NonFinite

    return isinstance(error, UserError | NonFinite)


def error_line(error: BaseException) -> str:
    """Return an error as one line. For an error of another library or of user code, add its type and its place."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, UserError):  # OmegaConf wraps the UserError of a resolver
        cause = cause.__cause__ or cause.__context__
    message = _message(cause or error)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(message.split()))


def _message(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and "/" in error.missing_cfg_file:
        return arguments.no_option_message(*error.missing_cfg_file.rsplit("/", 1))
    if isinstance(error, ConfigCompositionException) and (match := re.match(r"Could not override '([^']+)'", text)):
        return arguments.no_key_message(match[1], error.__cause__)
    if match := re.match(r"Interpolation key '(\w+)\.name' not found", text):
        return arguments.no_name_message(match[1], sys.argv[1:])
    if isinstance(error, OverrideParseException):
        return arguments.unreadable_override_message(error.override)
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}:{mark.line + 1}: not valid YAML: {error.problem}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} must be given: {error.full_key}=..."
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if text.startswith("Error merging override") and error.__cause__:
        return f"{text}: {error.__cause__}"
    if isinstance(error, BAD_INPUT) or type(error).__module__.partition(".")[0] in ("lockstep", "__main__"):
        return text or type(error).__name__
    location = user_code_location("".join(traceback.format_exception(error)))
    return f"{type(error).__name__}{f': {text}' * bool(text)} ({location}HYDRA_FULL_ERROR=1 shows the traceback)"


def remove_refused_folder(folder: Path) -> None:
    """Remove the folder of a refused run or sweep.

    The folder stays if the run has made a step, or if it holds a checkpoint or a file that Lockstep does not write.
    """
    holds_our_files_only = folder.is_dir() and all(
        path.name in RUN_FILES or re.fullmatch(r"rank_\d+\.log", path.name) for path in folder.iterdir()
    )
    if holds_our_files_only and not summary_of(folder).get("steps"):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the parent folder may hold other runs
            folder.parent.rmdir()
            if folder.parent.name == "sweeps":
                folder.parent.parent.rmdir()


def register_folder() -> None:
    """Register the OmegaConf resolver `folder`. conf/hydra/default.yaml uses it to name the folder of a new run."""
    register_resolver("folder", _folder)


def _folder(kind: str, outputs: Any, name: Any, overrides: Any) -> str:
    """Return the folder of a new run or sweep, the same on all ranks.

    Its name is the start time. In a SLURM job, or with torchrun's --rdzv-id, the name follows from the job or the id.
    A job that is started again then continues in the same folder.

    Args:
        kind: `runs` or `sweeps`.
        outputs: the key `outputs`.
        name: the key `name`.
        overrides: the arguments of the command line.
    """
    runs = Path(
        value_checks.folder("outputs", outputs), run_name("name", name), *(["sweeps"] if kind == "sweeps" else [])
    )

    def folder_name() -> str:
        job_folder = slurm.folder_of_job(runs, overrides) or _folder_of_rendezvous(runs, overrides)
        return job_folder.name if job_folder else datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")

    return str(runs / decide_on_rank_zero(kind, folder_name))


def _folder_of_rendezvous(runs: Path, overrides: Iterable[object]) -> Path | None:
    """Return the folder of the run that torchrun's `--rdzv-id=<name>` names.

    Without a name, the folder of a run is known only as long as one of its torchrun agents runs, see
    `decide_on_rank_zero`. With a name, machines continue the run even if torchrun was started again on all of them.
    Return None if there is no name, or if the run is completed.
    """
    name = environment().run_id
    if environment().launcher != "torchrun" or name in ("", "none") or re.fullmatch(r"[\da-f-]{36}", name):
        return None  # without --rdzv-id torchrun gives the name "none", and with --standalone a random one
    # The overrides that are the same on all machines.
    shared_overrides = [each for each in map(str, overrides) if each.lstrip("+").partition("=")[0] not in MACHINE_KEYS]
    folder = runs / f"{re.sub('[^0-9A-Za-z_.-]', '_', name)}_{slurm.hash_of_command(shared_overrides)}"
    return None if summary_of(folder).get("status") == "completed" else folder
