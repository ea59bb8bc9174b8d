"""A run as the parent sees it: workers are launched, and a summary is left behind whatever happens to them."""

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.agent import launch
from lockstep.launch.endings import WorkerFailed, outcome_of
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.guest import Guest, KeeperLost
from lockstep.launch.keeper import Keeper
from lockstep.launch.machine import computes_bf16, hide_gpu
from lockstep.launch.meeting import meet, meeting_of
from lockstep.launch.signals import Interrupted
from lockstep.launch.worker import VICTIM_SECONDS, is_peer_failure
from lockstep.run.arguments import given
from lockstep.run.config import Config, check
from lockstep.run.provenance import card, must_be_alike
from lockstep.run.resume import saved
from lockstep.run.summary import conclude, progress, summarise, summary_of


def train(raw: dict[str, Any], folder: Path) -> Any:
    """One run in its folder: check, open the data, launch the workers, which fit and test. Returns the summary."""
    config = check(raw, given=given())

    from lockstep.callbacks import checkpoint_io
    from lockstep.run import weights
    from lockstep.run.opening import open_data
    from lockstep.run.training import train as work

    if config.resume:  # on the machine that keeps the run
        checkpoint_io.load(config.resume)  # a damaged one is refused; workers would take an older one
    elif config.init_from and config.layout.num_nodes == 1 and saved(folder) is None:
        weights.read("init_from", config.init_from)
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
    if external_workers() > 1:
        must_be_alike(card(config, splits))
    meeting = meeting_of(config.layout.num_nodes, config.rdzv_endpoint) or Keeper()
    if isinstance(meeting, Guest):
        return _follow(meeting, work, config, splits, folder)
    before, begun = summary_of(folder), saved(folder)
    try:
        from lockstep.run.accumulation import fitted

        config = fitted(config, splits, folder)
        if external_workers():
            result = launch(work, config, splits, folder, layout=config.layout)
        else:
            result = _lead(meeting, work, config, splits, folder)
    except BaseException as error:
        meeting.end(outcome_of(error))
        if not isinstance(error, Refusal) or saved(folder) != begun:  # one refused at once leaves the summary alone
            _conclude(config, splits, folder, before, error)
        raise
    meeting.end(outcome_of(None))
    return result


def _lead(meeting: Keeper, work: Callable[..., Any], config: Config, splits: Any, folder: Path) -> Any:
    """Lets the workers of all machines live until one life is through: `max_restarts` times again as they were, then,
    under `elastic`, with fewer: without the machines that were lost, or with one worker fewer on each, at once without
    a device that has computed wrong. `pieces` stay, so every layout takes the same steps."""
    asked, now, restarts, left = config.layout, config, 0, config.max_restarts
    mine = card(config, splits) if asked.num_nodes > 1 else {}
    while True:
        wanted = replace(now.layout, num_nodes=asked.num_nodes)
        fewer = config.elastic and restarts > 0
        place = meeting.begin(mine, wanted, restarts, config.machine_timeout, fewer)
        now = laid_out(config, place.machines, now.layout.devices)
        raised: BaseException | None = None
        try:
            part, silence = (meeting, place), config.hang_timeout
            result = launch(work, now, splits, folder, layout=now.layout, hang_timeout=silence, part=part)
        except (WorkerFailed, Refusal, Interrupted) as error:
            raised = error
        own = outcome_of(raised)
        outcome = meeting.settle(own)
        if own.kind == outcome.kind == "interrupted" and meeting.returning():
            continue
        raised = raised if outcome == own else outcome.raised()
        if raised is None:
            return result
        if not isinstance(raised, WorkerFailed):
            raise raised
        restarts += 1
        wrong, can_go_on = raised.without, saved(folder) is not None
        if wrong and can_go_on:
            from lockstep.run.continuation import go_back

            go_back(folder, raised)
        known = not wrong or (len(wrong) == asked.num_nodes == 1)  # which one to go on without
        can_shrink = config.elastic and can_go_on and known
        if can_shrink and meeting.lost():
            print(f"{raised}; going on without it", file=sys.stderr)
        elif left and not (wrong and can_shrink):
            left -= 1
            print(f"{raised}; starting again, {left} of {config.max_restarts} times are left", file=sys.stderr)
        elif can_shrink and now.layout.devices > 1:
            now = laid_out(config, now.layout.num_nodes, now.layout.devices - 1)
            hide_gpu(wrong[0] if wrong else raised.local_rank)
            going_on = f"going on with {now.layout.devices} of {asked.devices} workers"
            print(f"{raised}; {going_on}{' on each machine' * (asked.num_nodes > 1)}", file=sys.stderr)
        else:
            raise raised


def _follow(meeting: Guest, work: Callable[..., Any], config: Config, splits: Any, folder: Path) -> None:
    """Does, on a machine that does not keep the run, what the one that does says. Returns when the run is completed, or
    raises what ended it."""
    mine = card(config, splits)
    workers, failed = config.layout.devices, -1  # of this machine's, which one
    while True:
        try:
            place = meeting.begin(mine, config.machine_timeout)
        except KeeperLost as lost:
            if not (config.max_restarts or config.elastic):
                raise WorkerFailed(str(lost)) from None
            print(f"{lost}; it may come back", file=sys.stderr)
            meeting = cast(Guest, meet(cast(str, config.rdzv_endpoint), again=True))
            continue
        if place is None:
            print(f"completed; the run is on machine {meeting.keeper}", file=sys.stderr)
            return
        if place.workers < workers:
            hide_gpu(failed)
        now, raised, workers = laid_out(config, place.machines, place.workers), None, place.workers
        try:
            part, silence = (meeting, place), config.hang_timeout
            launch(work, now, splits, folder, layout=now.layout, hang_timeout=silence, part=part)
        except (WorkerFailed, Refusal, Interrupted) as error:
            raised = error
        failed = getattr(raised, "local_rank", -1)
        meeting.settle(outcome_of(raised))


def laid_out(config: Config, machines: int, devices: int) -> Config:
    """The config on so many machines, with so many workers each."""
    asked = config.layout
    shares = asked.shares if (asked.num_nodes, asked.devices) == (machines, devices) else ()  # one for each asked for
    return replace(config, layout=replace(asked, num_nodes=machines, devices=devices, shares=shares))


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
