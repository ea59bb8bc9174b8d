"""`lockstep.launch`: call a function in several worker processes of this machine."""

import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError, WorkerFailed
from lockstep.launch.environment import devices_of_engine, environment, external_workers, refuse_unknown_rank
from lockstep.launch.failures import is_lost_rank, print_refusals_as_lines, user_code_location
from lockstep.launch.forks import call_in_forks
from lockstep.launch.machine import choose_devices, cores_per_worker
from lockstep.launch.parent import launch as launch_workers
from lockstep.launch.parent import start_method
from lockstep.launch.process_group import gather_objects

TRIAL_SECONDS = 2.0  # how long a fork may take to compute in parallel


def launch(
    function: Callable[..., Any],
    *args: Any,
    devices: int | None = None,
    accelerator: str = "auto",
    hang_timeout: float = 300.0,
) -> Any:
    """Call `function(*args)` in a worker process for each device of this machine, and return rank zero's result.

    The function makes the module, the data and the `lockstep.Trainer`, whose devices are then those of the workers. In
    a worker that torchrun, SLURM or MPI has started, the function is called in this process.

    Args:
        function: the function. On Linux it may be any one. If this process has used a GPU, or is a notebook, the
            workers import it, so it must be in a file.
        args: its arguments.
        devices: the number of workers; None: one for each GPU, or one without a GPU; with an engine, its workers.
        accelerator: `cpu`, `gpu` or `auto`.
        hang_timeout: seconds that a collective waits for all workers to join; then the run ends.

    Returns:
        What the function returned on rank zero, which must be picklable.

    Raises:
        UserError: the workers can't be started, or one refused its input.
        WorkerFailed: a worker failed or died. Its traceback is printed.
        Interrupted: a signal ended the run, whose checkpoint is saved.
    """
    print_refusals_as_lines()
    if not callable(function):
        raise UserError(f"lockstep.launch got a {type(function).__name__}: call launch(function, *args, devices=4)")
    if devices is not None and (not isinstance(devices, int) or isinstance(devices, bool) or devices < 1):
        raise UserError(f"launch(devices={devices!r}): must be a whole number above 0")
    if accelerator not in ("auto", "cpu", "gpu"):
        raise UserError(f"launch(accelerator={accelerator!r}): must be auto, cpu or gpu")
    environment.cache_clear()  # the caller may have made a process group since
    refuse_unknown_rank()
    if environment().launcher == "lockstep":
        raise UserError("lockstep.launch was called in a worker: call it in the program that starts the workers")
    threads = None
    if workers := external_workers():
        started = devices_of_engine({} if devices is None else {"devices": devices})
        kind, _ = choose_devices(accelerator, 1)
        name = "ddp" if workers > 1 else "single"
        layout = Layout(name, kind, started["devices"], started["num_nodes"], workers, workers)
    else:
        kind, number = choose_devices(accelerator, devices or "auto")
        layout = Layout("ddp" if number > 1 else "single", kind, number, 1, number, number)
        threads = cores_per_worker(number)
        if start_method() == "spawn":
            _check_importable(function, args)
        elif threads > 1 and not _forks_compute_in_parallel():
            threads = 1
    return launch_workers(_call, function, args, threads, layout=layout, hang_timeout=hang_timeout)


def _call(function: Callable[..., Any], args: tuple[Any, ...], threads: int | None) -> Any:
    """Call the function in a worker. Print the traceback of an unexpected error.

    Args:
        threads: CPU threads of the worker; None: as they are.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
        tempfile.tempdir = environment().scratch or None  # the parent removes this folder at its end
        gather_objects(None)  # a function that ends at once would close connections that others are still opening
    try:
        return function(*args)
    except Exception as error:
        if threads is None or isinstance(error, UserError | WorkerFailed) or is_lost_rank(error):
            raise
        text = traceback.format_exc()
        print(text, end="", file=sys.stderr)
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"{type(error).__name__}: {first}" if first else type(error).__name__
        raise WorkerFailed(f"failed: {message} ({user_code_location(text)}traceback above)") from error


def _check_importable(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Check that workers that do not inherit this process's memory can get the function and its arguments."""
    try:
        pickle.dumps((function, args))
    except Exception as error:
        raise UserError(
            "launch: this process has used a GPU or is a notebook, so its workers start anew and must import the "
            f"function and unpickle its arguments: put it into a file, or launch before the GPU is used ({error})"
        ) from None
    if getattr(function, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise UserError("launch: workers can't import a function that is defined in a notebook: put it into a file")


def _forks_compute_in_parallel() -> bool:
    """Check whether a fork of this process can compute with several threads.

    It can't if this process has done so: OpenMP's threads are not forked, and the fork waits for them forever
    (`lockstep.launch.process_lifetime.in_new_thread`).
    """
    import torch

    def compute() -> None:
        torch.set_num_threads(2)
        torch.ones(1 << 17).exp()

    return call_in_forks(compute, seconds=TRIAL_SECONDS) == [None]
