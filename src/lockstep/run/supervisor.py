"""A run as the parent sees it: workers are launched, and a summary is left behind whatever happens to them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.agent import WorkerFailed, launch
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.machine import computes_bf16
from lockstep.launch.signals import Interrupted, ask_to_end, pending_signals
from lockstep.launch.worker import is_peer_failure
from lockstep.loading.loaders import refuse_open_files
from lockstep.run.accumulation import fitted
from lockstep.run.balance import balanced
from lockstep.run.config import Config
from lockstep.run.record import progress, summarise
from lockstep.run.summary import summary_of, write_summary


def run_in_workers(work: Callable[..., Any], config: Config, splits: Any, folder: Path) -> Any:
    """Launches `work(config, splits, folder)` on the config's layout; returns rank zero's result.

    Raises:
        Refusal, WorkerFailed, Interrupted: as `launch`; summary.json then says what ended the run.
    """
    if external_workers() and (config.max_restarts or config.elastic):
        wish = f"max_restarts={config.max_restarts}" if config.max_restarts else "elastic=true"
        raise Refusal(f"{wish}: who started these workers starts them again, torchrun --max-restarts=3 say")
    refuse_open_files(splits, config.layout, config.num_workers)
    if config.precision.startswith("bf16") and not computes_bf16(config.layout.accelerator) and environment().rank == 0:
        print(
            f"precision={config.precision}: this processor has no bf16 instructions and emulates them, at up to seven "
            "times float32's time; precision=auto takes 32-true here",
            file=sys.stderr,
        )
    before = summary_of(folder)
    try:
        if config.strategy["balance"]:
            config = balanced(config, splits, folder)
        if config.accumulate_grad_batches == "auto":
            config = fitted(config, splits, folder)
        return _elastic(work, config, splits, folder) if config.elastic else _launch(work, config, splits, folder)
    except Refusal as refusal:
        if summary_of(folder) != before:  # by a rank that lost the one which can't read a file, say
            _conclude(config, splits, folder, before, refusal)
        raise
    except BaseException as error:
        _conclude(config, splits, folder, before, error)
        raise


def _launch(work: Callable[..., Any], config: Config, splits: Any, folder: Path, restarts: int = 0) -> Any:
    spanning = config.elastic and config.num_nodes > 1
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
    """Goes on with one worker fewer when one is lost for good (the agent's `max_restarts` are used up), and with all
    of them after `elastic_retry` seconds. `pieces` stay, so every layout takes the same steps."""
    devices, restarts, again = config.layout.devices, 0, False

    def retry(signum: int, frame: FrameType | None) -> None:
        nonlocal again
        again = True
        ask_to_end()

    signal.signal(signal.SIGALRM, retry)
    while True:
        if devices < config.layout.devices:
            signal.setitimer(signal.ITIMER_REAL, config.elastic_retry)
        try:
            shares = config.layout.shares if devices == config.layout.devices else ()
            now = replace(config, layout=replace(config.layout, devices=devices, shares=shares))
            return _launch(work, now, splits, folder, restarts)
        except WorkerFailed as error:
            if config.layout.strategy != "ddp" or devices == 1 or not (folder / "checkpoints" / "last.ckpt").exists():
                raise
            devices -= 1
            print(f"{error}; going on with {devices} of {config.layout.devices} workers", file=sys.stderr)
        except Interrupted:
            if not again:
                raise
            devices = config.layout.devices
            print(f"trying {devices} workers again", file=sys.stderr)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        restarts, again = restarts + 1, False
        pending_signals.clear()  # by an alarm that came too late


def _conclude(config: Config, splits: Any, folder: Path, before: dict[str, Any], error: BaseException) -> None:
    """Writes the summary that a killed worker could not write, or names the root cause in the one that it wrote;
    `before` is that of the run which this one goes on with."""
    if isinstance(error, KeyboardInterrupt):  # before the workers, or after them
        error = Interrupted(signal.SIGINT)
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    written, steps = summary_of(folder), getattr(error, "steps", 0)
    if external_workers() and is_peer_failure(error) and written != before and written.get("status") == "failed":
        return  # the one that was lost has told why
    if not written or (written == before and steps):
        written = summarise(config, folder, status, None) | progress(config, len(splits.train), steps)
    with suppress(OSError):  # a full disk, say: what ended the run is the error to be told
        write_summary(folder / "summary.json", written | {"status": status, "error": str(error)})
