"""What a worker does: builds, goes on from a checkpoint where there is one, fits, tests, and says how it went."""

import errno
import logging
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch.utils.data import Subset

from lockstep.arithmetic.exact import Damaged
from lockstep.arithmetic.layout import Layout, Refusal, counted
from lockstep.callbacks import DummyBatchOnEmptyRank, Heartbeat, Preemption, ReplicaConsistencyCheck, ResumeState
from lockstep.launch import logs
from lockstep.launch.endings import WorkerFailed
from lockstep.launch.environment import environment
from lockstep.launch.group import of_rank_zero
from lockstep.launch.signals import Interrupted
from lockstep.launch.worker import is_peer_failure
from lockstep.loading import Splits
from lockstep.run import fast, provenance, weights
from lockstep.run.build import make_callbacks, make_data, make_module, make_trainer
from lockstep.run.config import Config
from lockstep.run.continuation import checkpoint_in, must_fit, told
from lockstep.run.ledger import Ledger
from lockstep.run.lines import StartLines, at_chance, end_lines, start_lines
from lockstep.run.optimizers import settings, steps_per_epoch, total_steps
from lockstep.run.summary import RunRecord
from lockstep.step.finite import NonFinite
from lockstep.step.memory import limit_memory
from lockstep.step.networks import compile_networks
from lockstep.step.passes import overrides

LOG = logging.getLogger("lockstep")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def train(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Fits and tests in this worker; returns the run's summary. Every worker of the layout calls it."""
    started = time.perf_counter()
    rank = fast.set_up_worker(config, folder)
    check_sizes(config, len(splits.train))
    if config.debug.one_batch:
        splits = first_batch(splits, config.layout, config.seed)

    checkpoint, resumed = checkpoint_in(folder)
    first = resumed.get("global_step", 0)
    steps = total_steps(config, len(splits.train))
    module = make_module(replace(config, resume=checkpoint), splits)
    begins = [splits.about]
    if config.init_from and not checkpoint:
        begins.append(weights.begin("init_from", module, config.init_from, True))
    begins += told(config, splits, resumed)
    if config.audit and config.layout.num_devices == 1:
        begins.append("audit: the only device computes its own pieces again: a fault that lasts is not seen")
    data = make_data(config, splits, rank)
    samples = len(splits.train)
    callbacks: list[pl.Callback] = [DummyBatchOnEmptyRank(), Heartbeat(), ReplicaConsistencyCheck()]
    callbacks += make_callbacks(config, splits, folder, module)
    callbacks += [ResumeState(config.record, settings(config, samples), steps_per_epoch(config, samples))]
    chosen = fast.describe(module, config.compile is not None)
    first_lines = partial(start_lines, config, splits, module, folder, chosen)
    starts = StartLines(lambda lr: filter(None, [*first_lines(lr), *begins]))
    callbacks += [Preemption(folder), starts]
    if checkpoint:
        must_fit(checkpoint, resumed, module.state_dict(), config, steps)
    ledger = Ledger(folder, config, splits, resumed, module.state_dict()) if config.ledger and rank == 0 else None
    trainer = make_trainer(config, folder, callbacks, first, ledger)
    if config.compile:
        compile_networks(module, config.compile, config.layout.exact)
    if config.memory_budget is not None and config.layout.accelerator == "gpu":
        limit_memory(config.memory_budget, trainer.strategy)
    if rank == 0:
        provenance.record(config, splits.fingerprint, folder)
    run = RunRecord(config, splits, folder, trainer, started)
    run.metrics.update(resumed.get("lockstep", {}).get("metrics", {}))  # where nothing is left to train
    del resumed
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        if ledger is not None:  # nothing was left to train, maybe
            ledger.mend()
        run.fitted()
        if trainer.audit:
            run.metrics["audit/pieces"] = again = trainer.audit.pieces
            LOG.info(f"audit: {counted(again, 'piece')} computed again, all the same bits")
        if trainer.should_stop and trainer.global_step < steps and rank == 0:
            reason = next(filter(None, map(stopped_by, callbacks)), "a callback ended it")
            LOG.info("ended early, after step %d of %d: %s", trainer.global_step, steps, reason)
        if splits.test is not None and overrides(module, "test_step", pl.LightningModule):
            # an average would bring back, from the checkpoint, the weights that it was made of
            tests: Any = trainer
            tests.callbacks = [each for each in tests.callbacks if not isinstance(each, WeightAveraging)]
            trainer.test(module, datamodule=data, ckpt_path=_best(callbacks), verbose=False)
            run.tested()
    except Interrupted as interrupted:
        run.fitted()
        run.finish("interrupted", str(interrupted))
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            error.filename = str(folder)  # TensorBoard's, which name no file
        ours = not isinstance(error, OSError | NonFinite | Damaged | WorkerFailed) and not is_peer_failure(error)
        trained = trainer.global_step > first or environment().restarts
        if checkpoint and ours and not trained:  # the run stays what it was
            raise _cannot_go_on(checkpoint, error, rank) from error
        if not is_peer_failure(error):  # else the one that was lost tells why, or the parent
            with suppress(OSError):  # a full disk, say
                run.finish("failed", f"{type(error).__name__}: {error}")
        raise
    summary = run.finish("completed", None)
    if rank == 0:
        trained = trainer.global_step >= steps_per_epoch(config, samples)  # before, chance is what to expect
        chance = at_chance(run.metrics, splits, starts.lr) if trained else None
        for line in filter(None, [chance, *end_lines(config, folder, callbacks)]):
            LOG.info(line)
    return summary


def check_sizes(config: Config, samples: int) -> None:
    """Refuses steps that a training set of so many samples does not fill."""
    size, pieces = config.layout.batch_size, config.layout.pieces
    if size > samples:
        there = counted(samples, "sample")
        raise Refusal(f"batch_size={size}: a step has {there} at most, as many as the training set")
    if config.strategy.sync_batchnorm and 0 < (tail := samples % size) < pieces:
        why = f"an epoch's last step has {counted(tail, 'sample')} for {pieces} pieces, and ranks wait for one without"
        raise Refusal(f"strategy.sync_batchnorm=true: {why}; another batch_size, or fewer pieces")


def stopped_by(callback: Any) -> str | None:
    """Why a callback has ended the run, where it is Lightning's EarlyStopping."""
    if not isinstance(callback, EarlyStopping) or not callback.stopping_reason_message:
        return None
    if callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
        best = f"its best is {float(callback.best_score):.4f}"
        return f"{callback.monitor} has not improved in the last {callback.wait_count} validations, {best}"
    return callback.stopping_reason_message.removesuffix(" Signaling Trainer to stop.").rstrip(".")


def _cannot_go_on(checkpoint: str, error: Exception, rank: int) -> Refusal:
    if isinstance(error, Refusal):
        return error
    logging.root.error("the run can't go on", exc_info=error)
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return Refusal(f"{checkpoint}: can't go on from it: {said} (traceback in {logs.file_of(rank)})")


def first_batch(splits: Splits, layout: Layout, seed: int) -> Splits:
    """The run's first batch as the training set: every step then has these samples, whatever the position."""
    first = splits.order(layout, seed).step(0, 0)
    return replace(splits, train=Subset(splits.train, first), balanced=False)  # type: ignore[arg-type]


def _best(callbacks: list[pl.Callback]) -> str | None:
    """The best checkpoint, which only rank zero may have."""
    paths = [str(path) for callback in callbacks if (path := getattr(callback, "best_path", None))]
    return of_rank_zero(paths[0] if paths else None)
