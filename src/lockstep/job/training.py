"""Fit and test in a worker: build the parts, continue from a checkpoint if there is one, train, test, summarise."""

import errno
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from omegaconf import OmegaConf
from torch.utils.data import Subset

from lockstep.arithmetic.exact_sum import CorruptMessage
from lockstep.arithmetic.layout import Layout
from lockstep.callbacks import DummyBatchOnEmptyRank, EvaluationSeed, Preemption, ReplicaConsistencyCheck
from lockstep.callbacks.store_lease import store_leases
from lockstep.checkpoint.callback import ResumeState
from lockstep.checkpoint.fits import compared_weights
from lockstep.checkpoint.plain import not_plain
from lockstep.checkpoint.resume import CONFIG
from lockstep.checkpoint.run_checks import ParameterNameCheck
from lockstep.checkpoint.snapshots import Snapshots, load_snapshot
from lockstep.checkpoint.start import TakeOverFolder, check_checkpoint_fits, load_start, resume_messages
from lockstep.checkpoint.weights import LoadedWeights, load_weights, refuse_frozen_unloaded
from lockstep.config import rules
from lockstep.config.check import Config
from lockstep.config.extras import RunParts
from lockstep.config.run_length import run_length
from lockstep.data import Splits
from lockstep.data.labels import wrong_label
from lockstep.data.streams import room_note
from lockstep.errors import NonFinite, UserError, WorkerFailed
from lockstep.job import worker_setup
from lockstep.job.batch_norm_check import check_batch_norms, single_value_error
from lockstep.job.build import make_callbacks, make_module, make_trainer
from lockstep.job.ignored_arguments import argument_notes, refuse_loader_keys
from lockstep.job.job import Job
from lockstep.job.optimizers import as_built, settings
from lockstep.launch.environment import environment
from lockstep.launch.failures import is_lost_rank, place_of
from lockstep.launch.process_group import ranks_writing_in
from lockstep.launch.signals import Interrupted
from lockstep.launch.survivor import survivor
from lockstep.report import provenance
from lockstep.report.report_lines import CHANCE_STEPS, StartLines, chance_level_line, end_lines, images_lines
from lockstep.report.summary import RunRecord
from lockstep.step.compile import compile_networks
from lockstep.text import join_names
from lockstep.trainer.run import GivenData
from lockstep.trainer.trainer import Trainer

VIEW_TEXT = "view size is not compatible with input tensor"  # of torch
LOG = logging.getLogger("lockstep")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a quota or a file is at its limit


class TrainingJob(Job):
    """A run of training; see `Job`.

    Args:
        hydra_files: the texts of the files in `.hydra/`, by file name; empty: the folder gets none.

    Attributes:
        run: the record from which the summary is written; None before `make_trainer`.

    Raises:
        UserError: The input is bad, or the run can't continue from its checkpoint.
    """

    def __init__(self, config: Config, splits: Splits, folder: Path, hydra_files: Mapping[str, str]) -> None:
        self.started = time.perf_counter()
        worker_setup.set_up_worker(config, folder)
        refuse_loader_keys(config)
        rules.check_sizes(config.strategy, config.layout, len(splits.train))
        if config.debug.one_batch:
            splits = first_batch(splits, config.layout, config.seed)
        self.hydra_files = hydra_files
        self.ranks = ranks_writing_in(folder)  # rank zero, and the ranks that keep copies of its checkpoints
        # Lightning reads it once, and a strategy of one device sets none: this worker may have had another rank before.
        rank_zero_only.rank = environment().rank  # type: ignore[attr-defined]
        whole = config.layout.weights != "sharded" or bool(config.extras)  # an extra may read the tensors
        start = load_snapshot(folder) or load_start(folder, config.resume, hydra_files, self.ranks, whole=whole)
        path, self._loaded = start
        self.first_step = self._loaded.get("global_step", 0)
        # the call of `trainer.fit` that has saved the checkpoint
        self._first_fit = self._loaded.get("continuation", {}).get("fits", 1)
        self.length = run_length(config, len(splits.train))
        # `max_steps` may end the run: Lightning and the console get the number of epochs that it really has
        record = as_built(config.record, config)
        config = replace(config, resume=path, max_epochs=self.length.epochs, record=record)
        if CONFIG in self.hydra_files:
            composed: dict[str, Any] = yaml.safe_load(self.hydra_files[CONFIG])
            if (built := as_built(composed, config)) != composed:
                self.hydra_files = {**self.hydra_files, CONFIG: OmegaConf.to_yaml(built)}
        super().__init__(config, splits, folder, path)
        self.run: RunRecord | None = None
        self._fits = 0  # calls of `trainer.fit`

    def build_module(self) -> pl.LightningModule:
        """Build the module with its initial weights, and check that the checkpoint fits it."""
        config, splits = self.config, self.splits
        self._record = provenance.checkpoint_record(config, splits)
        module = make_module(config, splits)
        self._initial = LoadedWeights("", [])
        if config.init_from and not config.resume:
            self._initial = load_weights("init_from", module, config.init_from, broadcast=True)
        check_batch_norms(config, splits, module)
        if self.checkpoint:
            weights, steps = compared_weights(module), self.length.steps
            check_checkpoint_fits(self.checkpoint, self._loaded, weights, config, splits, self._record, steps)
        return module

    def build_trainer(self, module: pl.LightningModule) -> Trainer:
        """Build the trainer with all callbacks of a run, and write what the folder has from the beginning."""
        config, splits, folder, path = self.config, self.splits, self.folder, self.checkpoint
        chosen = make_callbacks(config, splits, folder, module)
        refuse_frozen_unloaded(f"init_from={config.init_from}", module, self._initial.not_loaded, chosen)

        worker = survivor()
        goes_on = worker is not None and worker.group.number > 0 and bool(self._loaded)  # the run's lines are printed
        notes = [splits.about, *images_lines(splits), self._initial.message]
        notes += _notes(config, splits, module, self._loaded)
        if goes_on:
            notes = resume_messages(config, splits, self._loaded)
        self._start_lines = StartLines(config, splits, folder, self._initial.not_loaded, notes, all_lines=not goes_on)
        self._resume_state = ResumeState(self._record, settings(config, len(splits.train)), self.length.steps_per_epoch)
        self._callbacks: list[pl.Callback] = [
            EvaluationSeed(),
            DummyBatchOnEmptyRank(),
            ReplicaConsistencyCheck(),
            *store_leases(),
            *chosen,
            self._resume_state,
            ParameterNameCheck(module),
            Preemption(folder),
            *([Snapshots(worker)] if worker else []),
            self._start_lines,
            # After the first step it writes `.hydra/` and makes `path` the last checkpoint of the run's folder.
            TakeOverFolder(folder, self.hydra_files, path, environment().rank in self.ranks),
        ]
        parts = RunParts(config, splits, folder, module, self._loaded, environment().rank)
        trainer = make_trainer(config, folder, self._callbacks, parts, self.ranks, run=self)
        if config.compile:
            compile_networks(module, bool(config.layout.exact), config.speed.cuda_graphs)
        if trainer.is_global_zero:
            provenance.write_provenance(config, splits, folder)
        self.run = RunRecord(config, splits, folder, trainer, self.started)
        if self._loaded:
            self.run.metrics.update(self._loaded["lockstep"]["metrics"])  # needed if nothing is left to train
        self._loaded = {}  # free the memory: the trainer's CheckpointIO has the checkpoint until it is restored
        return trainer

    def skips_fit(self) -> bool:
        """Count a call of `trainer.fit`. Return whether it has nothing to do, since a resumed run is in a later fit."""
        self._fits += 1
        self._resume_state.fits = self._fits
        return self._fits < self._first_fit

    @contextmanager
    def around_fit(self, model: Any, given: GivenData, ckpt_path: Any) -> Iterator[tuple[GivenData, str | None]]:
        """Record what `trainer.fit` has reached."""
        assert self.run is not None
        if ckpt_path != self.checkpoint and (self._fits == 1 or ckpt_path is not None):
            start = f"continues from {self.checkpoint}" if self.checkpoint else "begins anew"
            right = "pass ckpt_path=job.checkpoint" if self._fits == 1 else "leave it out in a later fit"
            raise UserError(f"train(job) passes ckpt_path={ckpt_path} to trainer.fit, but the run {start}: {right}")
        run, trainer = self.run, self.run.trainer
        try:
            yield given, self.checkpoint if self._fits == self._first_fit else None
        except Interrupted:
            run.record_weights()
            raise
        run.record_weights()
        for extra in self.config.extras.values():
            run.metrics.update(extra.metrics())
        if trainer.should_stop and trainer.global_step < self.length.steps and trainer.is_global_zero:
            reason = next(filter(None, map(stop_reason, self._callbacks)), "a callback stopped it")
            LOG.info("ended early, after step %d of %d: %s", trainer.global_step, self.length.steps, reason)

    @contextmanager
    def around_test(self, ckpt_path: Any) -> Iterator[None]:
        """Record the metrics of a `trainer.test`."""
        yield
        assert self.run is not None
        self.run.record_test()

    def finish(self) -> dict[str, Any]:
        """Write the summary of a run that has completed, and return it."""
        if self.run is None or not self._fits:
            raise UserError("train(job) has ended without trainer.fit: it must call it once at least")
        summary = self.run.finish("completed", None)
        trainer = self.run.trainer
        if trainer.is_global_zero:
            learned = trainer.global_step >= max(CHANCE_STEPS, self.length.steps_per_epoch)
            chance = chance_level_line(self.run.metrics, self.splits, self._start_lines.lr) if learned else None
            for line in filter(None, [chance, *end_lines(self.config, self.folder, self._callbacks)]):
                LOG.info(line)
        return summary


def fit_and_test(
    config: Config,
    splits: Splits,
    folder: Path,
    hydra_files: Mapping[str, str] | None = None,
    train: Callable[[Job], Any] | None = None,
) -> dict[str, Any]:
    """Call `train(job)` in this worker, and return the run's summary. Every worker of the layout must call it.

    Args:
        hydra_files: the texts of the files in `.hydra/`, by file name; None: the folder gets none.
        train: the function; None: that of the project's `src/train.py`.

    Raises:
        UserError: The input is bad, or the run can't continue from its checkpoint.
        Interrupted: A signal ended the run. Its checkpoint is saved.
    """
    job = TrainingJob(config, splits, folder, hydra_files or {})
    try:
        job.call(train)
        return job.finish()
    except Interrupted as interrupted:
        if job.run is not None:
            job.run.finish("interrupted", str(interrupted))
        raise
    except Exception as error:
        if job.run is None:
            raise
        if job.run.trainer.global_step > job.first_step:  # for the parent, if rank zero writes no summary
            error.steps = job.run.trainer.global_step  # type: ignore[attr-defined]
        if refusal := _conclude_failure(job.run, error, job.first_step):
            refusal.steps = getattr(error, "steps", 0)
            raise refusal from error
        raise


def _notes(config: Config, splits: Splits, module: pl.LightningModule, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return lines for the log at a run's start: what differs from an ordinary run."""
    notes = [*argument_notes(config), *resume_messages(config, splits, checkpoint)]
    notes.append(room_note(splits, config.layout))
    notes += config.strategy.notes(resumes=bool(checkpoint))
    for extra in config.extras.values():
        notes += extra.notes(config, resumes=bool(checkpoint))
    if names := not_plain(module.hparams):
        notes.append(f"hyperparameters {join_names(names)}: they are no plain data, so checkpoints leave them out")
    return notes


def _conclude_failure(run: RunRecord, error: Exception, first_step: int) -> UserError | None:
    """Write the summary of a run that has failed. Return the refusal to raise instead of the error, if there is one.

    Args:
        first_step: the step after which this start of the run continued; 0 for a new run.
    """
    config, steps = run.config, run.trainer.global_step
    if isinstance(error, OSError) and error.errno in DISK_FULL and error.filename is None:
        error.filename = str(run.folder)  # errors of TensorBoard name no file
    # causes that have nothing to do with the checkpoint
    other_cause = isinstance(error, OSError | NonFinite | CorruptMessage | WorkerFailed) or is_lost_rank(error)
    has_trained = steps > first_step or environment().restarts
    if config.resume and not other_cause and not has_trained:  # this start has changed nothing, so the summary stays
        if isinstance(error, UserError):
            return None
        logging.root.error("the run can't continue", exc_info=error)
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        return UserError(f"{config.resume}: can't continue from it: {cause} ({place_of(error)})")
    if not is_lost_rank(error):  # otherwise the lost rank or the parent writes the cause
        with suppress(OSError):  # the disk may be full
            run.finish("failed", f"{type(error).__name__}: {error}")
    if rules.SINGLE_VALUE_TEXT in str(error):  # BatchNorm got one value per channel
        return single_value_error(config, len(run.splits.train))
    if not has_trained and (wrong := _wrong_label(config, run.splits)):
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        return UserError(f"{wrong} ({cause}, {place_of(error)})")
    if VIEW_TEXT in str(error) and config.speed.memory_format != "contiguous":
        right = "use .reshape or .flatten there, or give speed.memory_format=contiguous"
        return UserError(f"{place_of(error)}: .view does not take images that lie as channels_last: {right}")
    return None


def _wrong_label(config: Config, splits: Splits) -> str:
    """Return what is wrong with the labels of a user's own data, for which the model was made; empty if nothing is."""
    if str(config.data.get("_target_")).startswith(("lockstep.", "lockstep_")):
        return ""
    with suppress(Exception):  # the data fail themselves
        return wrong_label(splits)
    return ""


def stop_reason(callback: Any) -> str | None:
    """Return why a callback has stopped the run, if the callback is Lightning's EarlyStopping."""
    if not isinstance(callback, EarlyStopping) or not callback.stopping_reason_message:
        return None
    if callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
        best = f"its best is {float(callback.best_score):.4f}"
        return f"{callback.monitor} has not improved in the last {callback.wait_count} validations, {best}"
    return callback.stopping_reason_message.removesuffix(" Signaling Trainer to stop.").rstrip(".")


def first_batch(splits: Splits, layout: Layout, seed: int) -> Splits:
    """Return splits whose training set is the run's first batch, so that every step has these samples."""
    first = splits.order(layout, seed).step(0, 0)
    train: Any = Subset(splits.train, first)  # type: ignore[arg-type]
    return replace(splits, train=train, labels=None, weights=None, window=None)
