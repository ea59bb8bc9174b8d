"""Run a job as the parent process: launch the workers, restart them, and make sure that a summary is written."""

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint import paths
from lockstep.checkpoint.resume import last_checkpoint_id
from lockstep.config.check import Config
from lockstep.errors import LostRank, UserError, WorkerFailed
from lockstep.job.run_folder import lock_on_rank_zero
from lockstep.launch.environment import ends_survivors, environment, external_workers
from lockstep.launch.failures import VICTIM_SECONDS, is_raised_by_all_ranks
from lockstep.launch.machine import computes_bf16, hide_gpu
from lockstep.launch.parent import launch
from lockstep.launch.signals import Interrupted, call_earlier_handler
from lockstep.launch.survival import Survival
from lockstep.report.provenance import check_same_on_all_ranks
from lockstep.report.summary import summarise, summary_of, write_conclusion


def check_start_files(config: Config, folder: Path) -> None:
    """Check quickly the checkpoint or the initial weights from which a run starts. Workers check the whole file."""
    from lockstep.checkpoint.io import checked_source, fault
    from lockstep.checkpoint.weights import refuse_broken_weights

    if config.resume:
        if Path(config.resume).exists():  # it may be on another machine
            checked_source(Path(config.resume), check=partial(fault, checksums=False))
    elif config.init_from and config.layout.num_nodes == 1 and last_checkpoint_id(folder) is None:
        refuse_broken_weights("init_from", config.init_from)


def run_in_workers(work: Callable[..., Any], config: Config, splits: Any, folder: Path) -> Any:
    """Launch `work(config, splits, folder)` on the config's layout. Return rank zero's result.

    Raises:
        UserError, WorkerFailed, Interrupted: see `launch`. summary.json then has the error.
    """
    settings = [f"max_restarts={config.max_restarts}"] * bool(config.max_restarts)
    settings += ["elastic=true"] * config.elastic
    if external_workers() and settings:
        raise UserError(
            f"{settings[0]}: torchrun, SLURM or MPI restarts its own workers: use its option, as torchrun "
            "--max-restarts=3"
        )
    if config.survive and (reason := ends_survivors()):
        raise UserError(f"survive=true: {reason}")
    if config.precision.startswith("bf16") and not computes_bf16(config.layout.accelerator) and environment().rank == 0:
        print(
            f"precision={config.precision}: this processor emulates bf16, which takes up to seven times as long as "
            "float32: use precision=auto, which is 32-true here",
            file=sys.stderr,
        )
    if external_workers() > 1:
        check_same_on_all_ranks(config, splits)
    before, checkpoint_before = summary_of(folder), last_checkpoint_id(folder)
    try:
        return _run_with_restarts(work, config, splits, folder)
    except BaseException as error:
        # A run that was refused before it took a step keeps the summary of an earlier start.
        if not isinstance(error, UserError) or error.steps or last_checkpoint_id(folder) != checkpoint_before:
            _conclude(config, splits, folder, before, error)
        if isinstance(error, Interrupted):
            call_earlier_handler(error.signum)
        raise


def _run_with_restarts(work: Callable[..., Any], config: Config, splits: Any, folder: Path) -> Any:
    """Start the workers, and restart them when one was lost.

    They are restarted `max_restarts` times. After that, with `elastic=true`, they are restarted with one device fewer.
    `pieces` stays, so every layout takes the same steps.

    With `survive=true` the workers that are left go on, and the others are replaced `max_restarts` times. Only if none
    is left, all are restarted.
    """
    current, restarts, left = config, 0, config.max_restarts
    survival = Survival(partial(_arguments, config, splits, folder), left) if config.survive else None
    while True:
        try:
            how: dict[str, Any] = {"hang_timeout": config.hang_timeout, "restarts": restarts, "survival": survival}
            return launch(work, current, splits, folder, layout=current.layout, **how)
        except WorkerFailed as failed:
            if not failed.may_restart:
                raise
            restarts += 1
            left = survival.replacements if survival else left
            if left:
                left -= 1
                if survival:
                    survival.replacements = left
                print(f"{failed}; restarting, {left} of {config.max_restarts} restarts left", file=sys.stderr)
            elif config.elastic and current.layout.devices > 1 and last_checkpoint_id(folder) is not None:
                current = _on(config, current.layout.devices - 1)
                hide_gpu(failed.local_rank or 0)
                workers = f"{current.layout.devices} of {config.layout.devices} workers"
                print(f"{failed}; continuing with {workers}", file=sys.stderr)
            else:
                raise


def _on(config: Config, devices: int, num_nodes: int = 1) -> Config:
    """Return a config for another number of devices, with the same steps."""
    if (devices, num_nodes) == (config.layout.devices, config.layout.num_nodes):
        return config
    # shares are of the original ones
    return replace(config, layout=replace(config.layout, devices=devices, num_nodes=num_nodes, shares=()))


def _arguments(config: Config, splits: Any, folder: Path, workers: int) -> tuple[Config, Any, Path]:
    """Return the arguments of the work in a new group of workers. A function of the module, so that it is picklable.

    An engine's rank zero locks the folder, which another one may have done before.
    """
    if not environment().scratch:
        lock_on_rank_zero(folder)
    machines = environment().num_nodes
    return _on(config, workers // machines, machines), splits, folder


def _conclude(config: Config, splits: Any, folder: Path, before: dict[str, Any], error: BaseException) -> None:
    """Write the summary of a run whose workers have not, or put the root cause into the one that they wrote.

    Args:
        before: the summary that the folder had when this run started.
    """
    from lockstep.checkpoint.io import step_of

    rank = environment().rank
    if rank and (isinstance(error, Interrupted) or is_raised_by_all_ranks(error)):
        return  # rank zero writes it, and two ranks must not write one file at once
    if isinstance(error, LostRank) and external_workers():  # with a parent, no other process writes the summary
        time.sleep(VICTIM_SECONDS + rank / 4)  # so that the first remaining rank writes first
        if (written := summary_of(folder)) != before and written.get("status") == "failed":
            return  # the lost rank has written its error
    if isinstance(error, KeyboardInterrupt):  # it came while no worker ran
        error = Interrupted(signal.SIGINT)
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    written, steps = summary_of(folder), getattr(error, "steps", 0) or max(0, step_of(paths.last(folder)))
    known: dict[str, Any] = {}
    if not written or (written == before and steps):
        known = summarise(config, splits, folder, status, str(error), steps)
    write_conclusion(folder, status, str(error), known)
