"""Fit and test in a worker: build the parts, continue from a checkpoint if there is one, train, test, summarise."""

import errno
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils.data import Subset

from lockstep.arithmetic.exact_sum import CorruptMessage
from lockstep.arithmetic.layout import Layout
from lockstep.callbacks import DummyBatchOnEmptyRank, Preemption, ReplicaConsistencyCheck
from lockstep.callbacks.store_lease import store_leases
from lockstep.checkpoint import weights
from lockstep.checkpoint.io import Copies, not_plain
from lockstep.checkpoint.resume_state import ResumeState
from lockstep.checkpoint.start import (
    TakeOverFolder,
    check_checkpoint_fits,
    check_same_data,
    load_start,
    resume_messages,
)
from lockstep.config.check import Config
from lockstep.config.extras import RunParts
from lockstep.data import Splits
from lockstep.errors import UserError, WorkerFailed
from lockstep.launch import logs
from lockstep.launch.environment import environment
from lockstep.launch.failures import is_lost_rank
from lockstep.launch.process_group import broadcast_from_rank_zero, ranks_writing_in
from lockstep.launch.signals import Interrupted
from lockstep.run import provenance, worker_setup
from lockstep.run.batch_norm_check import SINGLE_VALUE_TEXT, check_batch_norms, single_value_error
from lockstep.run.build import make_callbacks, make_data, make_module, make_trainer
from lockstep.run.optimizers import settings
from lockstep.run.report_lines import StartLines, chance_level_line, end_lines, start_lines
from lockstep.run.run_length import run_length, steps_per_epoch, total_steps
from lockstep.run.summary import RunRecord
from lockstep.step.compile import compile_networks
from lockstep.step.finite import NonFinite
from lockstep.step.passes import overrides_method
from lockstep.text import join_names, plural

LOG = logging.getLogger("lockstep")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a quota or a file is at its limit


def fit_and_test(
    config: Config, splits: Splits, folder: Path, hydra_files: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Fit and test in this worker, and return the run's summary. Every worker of the layout must call it.

    Args:
        hydra_files: the texts of the files in `.hydra/`, by file name.

    Raises:
        UserError: The input is bad, or the run can't continue from its checkpoint.
        Interrupted: A signal ended the run. Its checkpoint is saved.
    """
    started = time.perf_counter()
    rank = worker_setup.set_up_worker(config, folder)
    check_sizes(config, len(splits.train))
    if config.debug.one_batch:
        splits = first_batch(splits, config.layout, config.seed)

    ranks = ranks_writing_in(folder)  # rank zero, and the ranks that keep copies of its checkpoints
    loaded = load_start(folder, config.resume, hydra_files, ranks)
    path, checkpoint = loaded or (None, {})  # the checkpoint's path and content
    first_step = checkpoint.get("global_step", 0)
    steps = total_steps(config, len(splits.train))
    module = make_module(replace(config, resume=path), splits)
    messages: list[str] = [splits.about]
    not_loaded: Sequence[str] = ()  # names of the tensors that `init_from` has not set
    if config.init_from and not path:
        loaded_weights = weights.load_weights("init_from", module, config.init_from, broadcast=True)
        messages.append(loaded_weights.message)
        freeze = config.model.get("freeze") or ("*" if config.model.get("train_only") else ())
        unfrozen = unfrozen_later(config)
        weights.refuse_frozen_unloaded(
            f"init_from={config.init_from}", module, loaded_weights.not_loaded, freeze, unfrozen
        )
        not_loaded = loaded_weights.not_loaded
    check_batch_norms(config, splits, module)
    messages += resume_messages(config, splits, checkpoint)
    messages += config.strategy.notes(resumes=bool(checkpoint))
    for extra in config.extras.values():
        messages += extra.notes(config, resumes=bool(checkpoint))
    if names := not_plain(module.hparams):
        messages.append(f"hyperparameters {join_names(names)}: they are no plain data, so checkpoints leave them out")
    data = make_data(config, splits, rank)
    samples = len(splits.train)
    # `max_steps` may end the run: Lightning and the console get the number of epochs that it really has
    config = replace(config, max_epochs=run_length(config, samples).epochs)
    callbacks: list[pl.Callback] = [DummyBatchOnEmptyRank(), ReplicaConsistencyCheck(), *store_leases()]
    callbacks += make_callbacks(config, splits, folder, module)
    callbacks += [ResumeState(config.record, settings(config, samples), steps_per_epoch(config, samples))]
    speed_settings = worker_setup.describe_speed_settings(module, config.compile)
    describe_run = partial(start_lines, config, splits, module, not_loaded, folder, speed_settings)
    # The callback calls this function when the optimizer exists, because the lines name its learning rate.
    start_callback = StartLines(lambda lr: filter(None, [*describe_run(lr), *messages]))
    # After the first step it writes `.hydra/` and makes `path` the last checkpoint of the run's folder.
    take_over = TakeOverFolder(folder, hydra_files, path, environment().rank in ranks)
    callbacks += [Preemption(folder), start_callback, take_over]
    if path:
        check_same_data(path, checkpoint.get("lockstep", {}), config, splits)
        check_checkpoint_fits(path, checkpoint, module.state_dict(), config, steps)
    copies = Copies(ranks, config.hang_timeout) if len(ranks) > 1 else None
    parts = RunParts(config, splits, folder, module, checkpoint, rank)
    trainer = make_trainer(config, folder, callbacks, loaded, copies, parts)
    if config.compile:
        compile_networks(module, bool(config.layout.exact))
    if rank == 0:
        provenance.write_provenance(config, splits.fingerprint, folder)
    run = RunRecord(config, splits, folder, trainer, started)
    run.metrics.update(checkpoint.get("lockstep", {}).get("metrics", {}))  # needed if nothing is left to train
    del loaded, checkpoint, parts  # free the memory: the trainer's CheckpointIO has the checkpoint until it is restored
    try:
        trainer.fit(module, datamodule=data, ckpt_path=path)
        run.record_weights()
        for extra in config.extras.values():
            run.metrics.update(extra.metrics())
        if trainer.should_stop and trainer.global_step < steps and rank == 0:
            reason = next(filter(None, map(stop_reason, callbacks)), "a callback stopped it")
            LOG.info("ended early, after step %d of %d: %s", trainer.global_step, steps, reason)
        if splits.test is not None and overrides_method(module, "test_step", pl.LightningModule):
            untyped: Any = trainer  # the same object as Any, so that mypy lets the next lines set its attributes
            untyped.profiler = PassThroughProfiler()  # Lightning's profilers fail if their schedule recorded nothing
            # WeightAveraging would load from the checkpoint the weights that are not averaged.
            untyped.callbacks = [each for each in untyped.callbacks if not isinstance(each, WeightAveraging)]
            trainer.test(module, datamodule=data, ckpt_path=_best_path(callbacks), verbose=False)
            run.record_test()
    except Interrupted as interrupted:
        run.record_weights()
        run.finish("interrupted", str(interrupted))
        raise
    except Exception as error:
        error.steps = trainer.global_step  # type: ignore[attr-defined]  # for the parent, if rank zero writes no summary
        if isinstance(error, OSError) and error.errno in DISK_FULL and error.filename is None:
            error.filename = str(folder)  # errors of TensorBoard name no file
        # causes that have nothing to do with the checkpoint
        other_cause = isinstance(error, OSError | NonFinite | CorruptMessage | WorkerFailed) or is_lost_rank(error)
        trained = trainer.global_step > first_step or environment().restarts
        if path and not other_cause and not trained:  # this start has changed nothing, so the summary stays
            raise _cannot_continue(path, error, rank) from error
        if not is_lost_rank(error):  # otherwise the lost rank or the parent writes the cause
            with suppress(OSError):  # the disk may be full
                run.finish("failed", f"{type(error).__name__}: {error}")
        if SINGLE_VALUE_TEXT in str(error):  # BatchNorm got one value per channel
            raise single_value_error(config, samples) from error
        raise
    summary = run.finish("completed", None)
    if rank == 0:
        one_epoch = trainer.global_step >= steps_per_epoch(config, samples)  # before that, chance level is normal
        chance = chance_level_line(run.metrics, splits, start_callback.lr) if one_epoch else None
        for line in filter(None, [chance, *end_lines(config, folder, callbacks)]):
            LOG.info(line)
    return summary


def unfrozen_later(config: Config) -> list[str]:
    """Return the patterns of the parameter names that `callbacks.unfreeze` trains from some epoch on."""
    options = config.callbacks.get("unfreeze")
    if not options:
        return []
    epochs = options.get("epoch")
    return [str(pattern) for pattern in epochs] if isinstance(epochs, dict) else ["*"]


def check_sizes(config: Config, samples: int) -> None:
    """Check that a training set of `samples` samples fills a step.

    Raises:
        UserError: The batch size is larger, or the strategy needs more samples.
    """
    size = config.layout.batch_size
    if size > samples:
        most = f"the {plural(samples, 'sample')} of the training set"
        raise UserError(f"batch_size={size} is more than {most}: use batch_size={samples} or less")
    config.strategy.check_samples(config.layout, samples)


def stop_reason(callback: Any) -> str | None:
    """Return why a callback has stopped the run, if the callback is Lightning's EarlyStopping."""
    if not isinstance(callback, EarlyStopping) or not callback.stopping_reason_message:
        return None
    if callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
        best = f"its best is {float(callback.best_score):.4f}"
        return f"{callback.monitor} has not improved in the last {callback.wait_count} validations, {best}"
    return callback.stopping_reason_message.removesuffix(" Signaling Trainer to stop.").rstrip(".")


def _cannot_continue(checkpoint: str, error: Exception, rank: int) -> UserError:
    """Return the error of a run that can't continue from its checkpoint. The log gets the traceback."""
    if isinstance(error, UserError):
        return error
    logging.root.error("the run can't continue", exc_info=error)
    cause = f"{type(error).__name__}: {error}".splitlines()[0]
    return UserError(f"{checkpoint}: can't continue from it: {cause} (traceback in {logs.log_file_name(rank)})")


def first_batch(splits: Splits, layout: Layout, seed: int) -> Splits:
    """Return splits whose training set is the run's first batch, so that every step has these samples."""
    first = splits.order(layout, seed).step(0, 0)
    return replace(splits, train=Subset(splits.train, first), balanced=False)  # type: ignore[arg-type]


def _best_path(callbacks: list[pl.Callback]) -> str | None:
    """Return the best checkpoint's path, the same on all ranks: rank zero's, since the others may not see the file."""
    paths = [str(path) for callback in callbacks if (path := getattr(callback, "best_path", None))]
    return broadcast_from_rank_zero(paths[0] if paths else None)
