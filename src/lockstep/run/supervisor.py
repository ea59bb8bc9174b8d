"""A run as the parent sees it: workers are launched, and a summary is left behind whatever happens to them."""

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint import paths
from lockstep.checkpoint.resume import last_checkpoint_id, record_of
from lockstep.config.arguments import overridden_keys
from lockstep.config.check import Config, check
from lockstep.errors import UserError
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.machine import computes_bf16, hide_gpu
from lockstep.launch.outcomes import WorkerFailed
from lockstep.launch.parent import launch
from lockstep.launch.signals import Interrupted, call_earlier_handler
from lockstep.launch.worker import VICTIM_SECONDS
from lockstep.run.provenance import check_same_on_all_ranks, machine_fingerprint
from lockstep.run.summary import progress_counts, summarise, summary_of, write_conclusion


def train(raw: dict[str, Any], folder: Path) -> Any:
    """One run in its folder: check, open the data, launch the workers, which fit and test. Returns the summary."""
    config = check(raw, overridden=overridden_keys())

    from lockstep.checkpoint.io import refuse_broken
    from lockstep.checkpoint.weights import refuse_broken_weights
    from lockstep.data.build import open_data
    from lockstep.run.training import fit_and_test as work

    # Before the data are opened; workers read all of the file, and check all of it.
    if config.resume:
        if Path(config.resume).exists():  # else another machine has it
            refuse_broken(Path(config.resume))
    elif config.init_from and config.layout.num_nodes == 1 and last_checkpoint_id(folder) is None:
        refuse_broken_weights("init_from", config.init_from)
    splits = open_data(config.data, config.data_dir, config.seed)
    return run_in_workers(partial(work, record=record_of(raw)), config, splits, folder)


def run_in_workers(work: Callable[..., Any], config: Config, splits: Any, folder: Path) -> Any:
    """Launches `work(config, splits, folder)` on the config's layout; returns rank zero's result.

    Raises:
        UserError, WorkerFailed, Interrupted: as `launch`; summary.json then says what ended the run.
    """
    if external_workers() and (config.max_restarts or config.elastic):
        wish = f"max_restarts={config.max_restarts}" if config.max_restarts else "elastic=true"
        raise UserError(f"{wish}: who started these workers starts them again, torchrun --max-restarts=3 say")
    if config.precision.startswith("bf16") and not computes_bf16(config.layout.accelerator) and environment().rank == 0:
        print(
            f"precision={config.precision}: this processor has no bf16 instructions and emulates them, at up to seven "
            "times float32's time; precision=auto takes 32-true here",
            file=sys.stderr,
        )
    if external_workers() > 1:
        check_same_on_all_ranks(machine_fingerprint(config, splits))
    before, begun = summary_of(folder), last_checkpoint_id(folder)
    try:
        return _run_with_restarts(work, config, splits, folder)
    except BaseException as error:
        # One refused at once leaves the summary alone.
        if not isinstance(error, UserError) or last_checkpoint_id(folder) != begun:
            _conclude(config, splits, folder, before, error)
        if isinstance(error, Interrupted):
            call_earlier_handler(error.signum)
        raise


def _run_with_restarts(work: Callable[..., Any], config: Config, splits: Any, folder: Path) -> Any:
    """Start the workers; after one was lost, `max_restarts` times again, then, under `elastic`, with one fewer, at once
    without a device that has computed wrong. `pieces` stay, so every layout takes the same steps."""
    now, left, restarts = config, config.max_restarts, 0
    while True:
        try:
            silence = config.hang_timeout
            return launch(work, now, splits, folder, layout=now.layout, hang_timeout=silence, restarts=restarts)
        except WorkerFailed as failed:
            restarts += 1
            continues = last_checkpoint_id(folder) is not None
            if failed.without and continues:
                from lockstep.checkpoint.start import restore_good_checkpoint

                restore_good_checkpoint(folder, failed)
            shrinks = config.elastic and continues and len(failed.without) <= 1 and now.layout.devices > 1
            if left and not (failed.without and shrinks):
                left -= 1
                print(f"{failed}; starting again, {left} of {config.max_restarts} times are left", file=sys.stderr)
            elif shrinks:
                now = _with_devices(config, now.layout.devices - 1)
                hide_gpu(failed.without[0] if failed.without else failed.local_rank)
                workers = f"{now.layout.devices} of {config.layout.devices} workers"
                print(f"{failed}; going on with {workers}", file=sys.stderr)
            else:
                raise


def _with_devices(config: Config, devices: int) -> Config:
    """The config on fewer devices; shares are those of the devices that were asked for."""
    return replace(config, layout=replace(config.layout, devices=devices, shares=()))


def _conclude(config: Config, splits: Any, folder: Path, before: dict[str, Any], error: BaseException) -> None:
    """Writes the summary of a run whose workers could not, or names the root cause in the one that they wrote; `before`
    is that of the run which this one goes on with."""
    rank = environment().rank
    if rank and isinstance(error, Interrupted):  # rank zero ends with it too, and two must not write one file at once
        return
    if isinstance(error, WorkerFailed) and error.victim:
        time.sleep(VICTIM_SECONDS + rank / 4)  # the first rank of those that are left
        if (written := summary_of(folder)) != before and written.get("status") == "failed":
            return  # the rank that was lost has written why
    if isinstance(error, KeyboardInterrupt):  # before the workers, or after them
        error = Interrupted(signal.SIGINT)
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    written, steps = summary_of(folder), getattr(error, "steps", 0) or _steps_saved(folder)
    known: dict[str, Any] = {}
    if not written or (written == before and steps):
        known = summarise(config, folder, status, str(error)) | progress_counts(config, len(splits.train), steps)
    write_conclusion(folder, status, str(error), known)


def _steps_saved(folder: Path) -> int:
    """Optimizer steps in a run's last checkpoint; 0: there is none that can be used."""
    from lockstep.checkpoint.io import step_of

    return max(0, step_of(paths.last(folder)))
