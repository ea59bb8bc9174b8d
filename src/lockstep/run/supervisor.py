"""A run as the parent sees it: workers are launched, and a summary is left behind whatever happens to them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.agent import WorkerFailed, launch
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.interpreter import import_torchmetrics
from lockstep.launch.machine import computes_bf16
from lockstep.launch.signals import Interrupted
from lockstep.launch.worker import VICTIM_SECONDS, is_peer_failure
from lockstep.run.arguments import given
from lockstep.run.config import Config, check
from lockstep.run.summary import conclude, progress, summarise, summary_of


def train(raw: dict[str, Any], folder: Path) -> Any:
    """One run in its folder: check, open the data, launch the workers, which fit and test. Returns the summary."""
    config = check(raw, given=given())
    import_torchmetrics()

    from lockstep.callbacks import checkpoint_io
    from lockstep.run.opening import open_data
    from lockstep.run.training import train as work

    if config.resume:
        checkpoint_io.load(config.resume)  # a damaged one is refused; workers would take an older one
    splits = open_data(config.data, config.data_dir, config.seed)
    return run_in_workers(work, config, splits, folder)


def run_in_workers(work: Callable[..., Any], config: Config, splits: Any, folder: Path) -> Any:
    """Launches `work(config, splits, folder)` on the config's layout; returns rank zero's result.

    Raises:
        Refusal, WorkerFailed, Interrupted: as `launch`; summary.json then says what ended the run.
    """
    if external_workers() and (config.max_restarts or config.elastic):
        wish = f"max_restarts={config.max_restarts}" if config.max_restarts else "elastic=true"
        raise Refusal(f"{wish}: who started these workers starts them again, torchrun --max-restarts=3 say")
    if config.precision.startswith("bf16") and not computes_bf16(config.layout.accelerator) and environment().rank == 0:
        print(
            f"precision={config.precision}: this processor has no bf16 instructions and emulates them, at up to seven "
            "times float32's time; precision=auto takes 32-true here",
            file=sys.stderr,
        )
    before, saved = summary_of(folder), _saved(folder)
    try:
        from lockstep.run.accumulation import fitted

        config = fitted(config, splits, folder)
        return _elastic(work, config, splits, folder) if config.elastic else _launch(work, config, splits, folder)
    except BaseException as error:
        if not isinstance(error, Refusal) or _saved(folder) != saved:  # one refused at once leaves the summary alone
            _conclude(config, splits, folder, before, error)
        raise


def _saved(folder: Path) -> int | None:
    """When the run's last checkpoint was written, in nanoseconds; None where there is none."""
    last = folder / "checkpoints" / "last.ckpt"
    return last.stat().st_mtime_ns if last.exists() else None


def _launch(work: Callable[..., Any], config: Config, splits: Any, folder: Path, restarts: int = 0) -> Any:
    spanning = config.elastic and config.layout.num_nodes > 1
    return launch(
        work,
        config,
        splits,
        folder,
        layout=config.layout,
        rdzv_endpoint=config.rdzv_endpoint,
        min_nodes=1 if spanning else None,
        max_restarts=max(config.max_restarts, 100) if spanning else config.max_restarts,
        restarts=restarts,
        hang_timeout=config.hang_timeout,
    )


def _elastic(work: Callable[..., Any], config: Config, splits: Any, folder: Path) -> Any:
    """Goes on with one worker fewer when one is lost for good: when the agent's `max_restarts` are used up. `pieces`
    stay, so every layout takes the same steps."""
    now, restarts = config, 0
    while True:
        try:
            return _launch(work, now, splits, folder, restarts)
        except WorkerFailed as error:
            devices, restarts = now.layout.devices - 1, restarts + 1
            if not devices or not (folder / "checkpoints" / "last.ckpt").exists():
                raise
            now = replace(config, layout=replace(config.layout, devices=devices, shares=()))
            print(f"{error}; going on with {devices} of {config.layout.devices} workers", file=sys.stderr)


def _conclude(config: Config, splits: Any, folder: Path, before: dict[str, Any], error: BaseException) -> None:
    """Writes the summary of a run whose workers could not, or names the root cause in the one that they wrote; `before`
    is that of the run which this one goes on with."""
    if external_workers() and is_peer_failure(error):
        time.sleep(VICTIM_SECONDS)
        if (told := summary_of(folder)) != before and told.get("status") == "failed":
            return  # the one that was lost has told why
    if isinstance(error, KeyboardInterrupt):  # before the workers, or after them
        error = Interrupted(signal.SIGINT)
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    written, steps = summary_of(folder), getattr(error, "steps", 0)
    known: dict[str, Any] = {}
    if not written or (written == before and steps):
        known = summarise(config, folder, status, str(error)) | progress(config, len(splits.train), steps)
    conclude(folder, status, str(error), known)
