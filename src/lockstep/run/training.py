"""What a worker does: builds, goes on from a checkpoint where there is one, fits, tests, and says how it went."""

from __future__ import annotations

import errno
import logging
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import Subset

from lockstep.arithmetic.layout import Refusal, counted
from lockstep.arithmetic.order import DataOrder
from lockstep.callbacks import (
    DummyBatchOnEmptyRank,
    FoundPieces,
    Heartbeat,
    Preemption,
    ReplicaConsistencyCheck,
    ResumeState,
    checkpoint_io,
)
from lockstep.callbacks.checkpoint_io import CheckpointError
from lockstep.callbacks.found_pieces import kept
from lockstep.launch import logs
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.signals import Interrupted
from lockstep.launch.worker import VICTIM_SECONDS, is_peer_failure
from lockstep.loading import Splits
from lockstep.run import fast, provenance
from lockstep.run.build import (
    OFFERED,
    compile_module,
    make_callbacks,
    make_data,
    make_module,
    make_trainer,
    total_steps,
)
from lockstep.run.config import Config
from lockstep.run.record import RunRecord, describe
from lockstep.run.resume import differences, must_fit
from lockstep.run.summary import summary_of
from lockstep.step.finite import NonFinite
from lockstep.step.hooks import overrides
from project.models import ImageClassifier

LOG = logging.getLogger("lockstep")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def train(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Fits and tests in this worker; returns the run's summary. Every worker of the layout calls it."""
    started = time.perf_counter()
    rank = environment().rank
    config = as_launched(config)
    logs.configure(folder, rank)
    if config.batch_size > len(splits.train):
        there = counted(len(splits.train), "sample")
        raise Refusal(f"batch_size={config.batch_size}: a step has {there} at most, as many as the training set")
    fast.set_up(config.layout, config.threads, config.allocator)
    if config.debug["one_batch"]:
        splits = replace(splits, train=first_batch(config, splits.train))
    checkpoint = _checkpoint_to_resume(config, folder)
    module = make_module(replace(config, resume=checkpoint), splits)
    resumed = checkpoint_io.load(checkpoint) if checkpoint else {}
    config = replace(config, layout=kept(config, resumed) or config.layout)
    data = make_data(config, splits, rank)
    callbacks = [
        DummyBatchOnEmptyRank(),
        Heartbeat(),
        ReplicaConsistencyCheck(),
        *make_callbacks(config, splits, folder, module),
    ]
    callbacks += [ResumeState(config.raw, folder), Preemption(folder)]
    if config.accumulate_grad_batches == "auto":
        callbacks.append(FoundPieces(data))
    if checkpoint:
        must_fit(checkpoint, resumed, module.state_dict(), config, total_steps(config, len(splits.train)))
        _optimizer_stays(module, resumed, config)
    trainer = make_trainer(config, folder, callbacks, resumed.get("global_step", 0))
    compile_module(config, module, trainer)
    if rank == 0:
        provenance.record(config, splits.fingerprint, folder)
        LOG.info(describe(config, splits, total_steps(config, len(splits.train)), folder, fast.describe(module)))
        for message in _resumption(config, splits, resumed):
            LOG.info(message)
    run = RunRecord(config, splits, folder, trainer, started)
    run.metrics.update(resumed.get("lockstep", {}).get("metrics", {}))  # where nothing is left to train
    first = resumed.get("global_step", 0)
    del resumed
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        run.fitted()
        best = _best(callbacks)
        if splits.test is not None and overrides(module, "test_step", pl.LightningModule):
            trainer.test(module, datamodule=data, ckpt_path=best, verbose=False)
            run.tested()
    except Interrupted as interrupted:
        run.fitted()
        run.finish("interrupted", str(interrupted))
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            error.filename = str(folder)  # TensorBoard's, which name no file
        ours = (
            isinstance(error, Exception) and not isinstance(error, OSError | NonFinite) and not is_peer_failure(error)
        )
        stands = trainer.global_step <= first and not environment().restarts
        if checkpoint and stands and ours:  # the run stays what it was
            if isinstance(error, Refusal):
                raise
            logging.root.error("the run can't go on", exc_info=error)
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise Refusal(f"{checkpoint}: can't go on from it: {said} (traceback in {logs.file_of(rank)})") from error
        victim = external_workers() and is_peer_failure(error)
        if victim:
            time.sleep(VICTIM_SECONDS)
        if not (victim and summary_of(folder).get("status") == "failed"):  # the one that was lost has told why
            with suppress(OSError):  # a full disk, say
                run.finish("failed", f"{type(error).__name__}: {error}")
        raise
    return run.finish("completed", None)


def as_launched(config: Config) -> Config:
    """The config with the number of machines that take part; under `elastic` these may be fewer than asked for."""
    if not config.elastic or config.layout.strategy != "ddp":
        return config
    nodes = environment().nodes or config.layout.num_nodes
    return replace(config, layout=replace(config.layout, num_nodes=nodes))


def first_batch(config: Config, train: Any) -> Any:
    """The run's first batch as a training set of its own: every step then has these samples, whatever the position."""
    order = DataOrder(len(train), config.batch_size, config.layout.pieces, config.seed)
    return Subset(train, order.step(0, 0))  # type: ignore[arg-type]


def _checkpoint_to_resume(config: Config, folder: Path) -> str | None:
    """What `resume` names; but a group that was restarted goes on from what it has saved since."""
    for name in ("last.ckpt", "best.ckpt") if environment().restarts else ():
        path = folder / "checkpoints" / name
        if not path.exists():
            continue
        try:
            checkpoint_io.load(path)
            return str(path)
        except CheckpointError as error:
            LOG.warning("%s; trying what is older", error)
    return config.resume


def _optimizer_stays(module: pl.LightningModule, resumed: dict[str, Any], config: Config) -> None:
    """Refusal: the config changes an optimizer that the module takes from the checkpoint as it is."""
    base = ImageClassifier if isinstance(module, ImageClassifier) else pl.LightningModule
    own = type(module)
    if own.on_load_checkpoint is not base.on_load_checkpoint:  # it may see to it
        return
    if base is ImageClassifier and own.configure_optimizers is base.configure_optimizers:
        return
    before = resumed.get("lockstep", {}).get("config", {})
    kept = {key: before[key] for key in OFFERED if key in before}
    if changed := differences(kept, {key: config.raw.get(key) for key in kept}):
        raise Refusal(
            f"{', '.join(changed)}: a run that goes on takes the optimizer that {own.__name__} makes itself from the "
            "checkpoint, so this would change nothing; leave it out"
        )


def _resumption(config: Config, splits: Splits, resumed: dict[str, Any]) -> list[str]:
    """What a user should know about the run that goes on."""
    if not resumed:
        return []
    recorded = resumed.get("lockstep", {})
    messages = [f"resumes after step {resumed['global_step']}"]
    before = recorded.get("config", {})
    if "precision" in recorded:  # of a checkpoint of an older version, the config says it
        before = {**before, "precision": recorded["precision"]}
    changed = differences(before, {**config.raw, "precision": config.precision})
    if changed := [change for change in changed if not change.startswith("resume:")]:
        messages.append("changed since the checkpoint: " + ", ".join(changed))
    if config.layout.strategy == "ddp" and config.strategy["compression"] == "powersgd":
        messages.append(
            "strategy.compression=powersgd begins anew: what it has left out so far is in no checkpoint, so the run "
            "does not end with the bits of one that was never interrupted"
        )
    if recorded.get("fingerprint") != splits.fingerprint:
        messages.append("the data set is not the one that the checkpoint was trained on")
    return messages


def _best(callbacks: list[pl.Callback]) -> str | None:
    paths = [path for callback in callbacks if (path := getattr(callback, "best_path", None))]
    return str(paths[0]) if paths else None
