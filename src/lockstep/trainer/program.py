"""The run of a program that makes its own `lockstep.Trainer`: its options, its data, its checkpoints and its folder."""

import atexit
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn.parameter import is_lazy

from lockstep.arithmetic.layout import Layout, resolve
from lockstep.callbacks import Checkpoint, DummyBatchOnEmptyRank, EvaluationSeed, Preemption, ReplicaConsistencyCheck
from lockstep.callbacks.monitors import MonitorCheck
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.checkpoint.callback import ResumeState
from lockstep.checkpoint.fits import COUNTED_BY, check_fits, check_record, compared_weights
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.checkpoint.plain import not_plain
from lockstep.checkpoint.record import make_record
from lockstep.checkpoint.run_checks import ParameterNameCheck
from lockstep.config import rules
from lockstep.data.datasets import content_of, digest_of, fingerprint
from lockstep.data.samplers import SamplerCheck
from lockstep.data.step_data import StepData
from lockstep.data.user_data import user_splits
from lockstep.errors import UserError
from lockstep.launch import portable
from lockstep.launch.environment import external_workers, refuse_unknown_rank
from lockstep.launch.failures import print_refusals_as_lines
from lockstep.launch.logs import hide_harmless_warnings
from lockstep.launch.process_group import broadcast_from_rank_zero, gather_objects, ranks_writing_in
from lockstep.launch.rendezvous import group_timeout, join_external, leave_group
from lockstep.lightning.hooks import overrides_method, setup_was_called
from lockstep.lightning.private_names import last_checkpoints, timeout_of
from lockstep.strategies import RunSettings
from lockstep.text import join_names
from lockstep.trainer.data import (
    batch_size_of,
    first_batches,
    in_order,
    over_all_devices,
)
from lockstep.trainer.options import (
    PRECISIONS,
    check_arguments,
    checked_options,
    chosen_devices,
    chosen_seed,
    chosen_strategy,
    name_of,
    one_line_errors,
    refuse_more_than_one,
    set_up_process,
    whole_number_of,
)
from lockstep.trainer.parts import (
    OneOptimizerCheck,
    callbacks_of,
    rank_of_replica,
    refuse_callback,
    refuse_compiled,
    refuse_hooks,
    refuse_other_package,
)
from lockstep.trainer.run import GivenData, Run
from lockstep.trainer.run_folder import RunFolder, command, local_path, root_folder

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

ANEW = "without ckpt_path a new run begins"


class ProgramRun(Run):
    """The run of a program that makes its own Trainer.

    It joins the workers of an engine, checks the options, and reads the loaders, modules and data modules that
    Lightning's methods get. Its arguments are those of `lockstep.Trainer`.

    Attributes:
        trainer: the Trainer; it sets this.
        layout: the layout; as long as the batch size is unknown, one that fits.
        strategy: the strategy.
        seed: the run's seed.
        precision: Lightning's name of the precision.
        root: `default_root_dir`.
        callbacks: all callbacks, with the user's.
        checkpoint_io: writes and reads checkpoints.
        options: the other options for Lightning's Trainer.
        batch_size: the argument.
        batches: the batches of the training loader in a step.

    Raises:
        UserError: an option does not fit, in one line.
    """

    trainer: "Trainer"
    prints_results = True

    def __init__(
        self,
        *,
        accelerator: Any,
        strategy: Any,
        devices: Any,
        num_nodes: int | None,
        batch_size: int | None,
        pieces: int | None,
        accumulate_grad_batches: int | None,
        exact: bool | str,
        seed: int | None,
        precision: Any,
        nonfinite: str,
        checkpoint_every: int | None,
        callbacks: list[pl.Callback] | pl.Callback | None,
        default_root_dir: str | os.PathLike[str] | None,
        checkpoint_io: AtomicCheckpointIO | None,
        options: dict[str, Any],
    ) -> None:
        print_refusals_as_lines()
        accelerator = name_of(accelerator, strategy)
        devices = whole_number_of(devices, accelerator)
        exact = bool(exact) if exact in (0, 1) else exact  # of a program's arguments, say
        check_arguments(
            devices=devices,
            num_nodes=num_nodes,
            batch_size=batch_size,
            pieces=pieces,
            accumulate_grad_batches=accumulate_grad_batches,
            checkpoint_every=checkpoint_every,
            seed=seed,
            exact=exact,
            nonfinite=nonfinite,
        )
        options = self.options = checked_options(options, exact)
        kind = self.strategy = chosen_strategy(strategy, bool(options.pop("sync_batchnorm", False)))
        self.batch_size = batch_size
        hide_harmless_warnings()
        self._join(timeout_of(strategy))
        seed = self.seed = chosen_seed(seed)
        chosen = chosen_devices(kind, devices, num_nodes, accelerator)
        refuse_more_than_one(strategy, chosen["devices"] * chosen["num_nodes"])
        self.batches = 1  # of the training loader, in a step
        if batch_size is None and accumulate_grad_batches:
            self.batches, accumulate_grad_batches = accumulate_grad_batches, None
            number = chosen["devices"] * chosen["num_nodes"]  # more devices than batches get more pieces
            pieces = pieces or (self.batches * -(-number // self.batches) if self.batches > 1 else None)
        self._layout_options = {
            **chosen,
            "pieces": pieces,
            "accumulate_grad_batches": accumulate_grad_batches,
            "exact": exact,
            "shares": kind.shares,
            "weights": kind.weights,
            "one_process": kind.one_process,
        }
        layout = self.layout = self._layout(batch_size)
        self.precision = PRECISIONS.get(precision, precision)
        rules.check_pairs(layout, str(self.precision), options, lambda name, value: f"{name}={value}")
        rules.refuse(kind.conflicts(RunSettings(layout, str(self.precision))))
        portable.set_up_worker(exact)
        set_up_process(layout)

        root = self.root = root_folder(default_root_dir)
        self._run_folder = RunFolder(root, seed, self._use_folder)
        self._ranks = ranks_writing_in(root)
        user_callbacks = list(callbacks_of(callbacks)) if callbacks is not None else []
        for callback in user_callbacks:
            refuse_callback("callbacks", callback)
        # With a ModelCheckpoint that saves the last one, `last` means its file.
        saves_last = any(isinstance(each, ModelCheckpoint) and each.save_last for each in user_callbacks)
        ours: list[pl.Callback] = []
        self._preemption = Preemption(root)
        if options.get("enable_checkpointing") is not False and not options.get("fast_dev_run"):
            ours = [] if saves_last else [Checkpoint(root, checkpoint_every, monitor=None)]
            ours += [self._run_folder, self._preemption]
        if options.get("num_sanity_val_steps") is None:
            named = {f"callbacks[{number}]": each for number, each in enumerate(user_callbacks)}
            ours.insert(0, MonitorCheck(named, "configure_optimizers: the monitor of its lr_scheduler"))
        self.checkpoint_io = checkpoint_io or AtomicCheckpointIO(
            ranks=self._ranks, timeout=group_timeout().total_seconds()
        )
        self._fitted: pl.LightningModule | None = None
        self._of_fit: list[pl.Callback] = []  # those of our callbacks that belong to a module
        self._datamodule: Any = None  # that of the last method, of the user
        self._steps: tuple[int, int] | None = None  # samples of the training set and of a step
        self.callbacks: list[pl.Callback] = [
            *(EvaluationSeed(), DummyBatchOnEmptyRank(), ReplicaConsistencyCheck(), OneOptimizerCheck()),
            *user_callbacks,
            *ours,
        ]

    def begin(self, trainer: "Trainer") -> None:
        """Take the Trainer, which has just been made."""
        self.trainer = trainer
        trainer.validates_last_step = False  # as Lightning's
        trainer.accumulate_grad_batches = self.batches  # for users: the loop takes a step for each of its batches
        self._validates_every = getattr(trainer, "val_check_interval", None)  # batches of the loader

    @contextmanager
    def around_fit(self, model: Any, given: GivenData, ckpt_path: Any) -> Iterator[tuple[GivenData, str | None]]:
        """Make the data of each process, and choose and check the checkpoint from which the fit continues."""
        trainer = self.trainer
        self._check_module(model)
        if self._fitted is not None and self._fitted is not model:
            raise UserError("trainer.fit gets another module than before: make a lockstep.Trainer for each of them")
        self._fitted = model
        data = self._prepared_data("fit", model, *given)
        path = self._checkpoint_path("fit", ckpt_path)
        self._run_folder.continued = (
            paths.run_of(Path(path)) if path and Path(path).name == paths.last(Path()).name else None
        )
        record = self._record(data)
        if path is not None:
            self._read(path, record, data, model)
        others = [each for each in trainer.callbacks if each not in self._of_fit]
        train, state = data.splits.split("train"), ResumeState(record, {}, data.order.steps_per_epoch)
        names, samplers = ParameterNameCheck(model), SamplerCheck(train)
        self._of_fit = [state, names, samplers]
        trainer.callbacks = [state, names, *others, samplers]  # a sampler sees what other callbacks have changed
        rank_zero_info(data.layout.describe())
        if data.splits.val is None:  # Lightning takes the method of our data module for a loader
            warnings.filterwarnings("ignore", message="You passed in a `val_dataloader`")
        if trainer.checkpoint_callbacks:
            self._note_left_out(model, data)
        if data.layout.exact and self._layout_options["pieces"] is None:
            pieces = data.layout.pieces
            rank_zero_info(
                f"exact=True without pieces: the same bits on layouts with the same number of pieces, here {pieces}: "
                "give Trainer(pieces=...) for other numbers of devices"
            )
        try:
            with _set_up_once(model, data), one_line_errors():
                yield GivenData(datamodule=data), path
        except ValueError as error:
            if rules.SINGLE_VALUE_TEXT in str(error):
                samples, last = data.order.samples_per_epoch, not train.drop_last
                raise rules.single_value_error(
                    data.layout, samples, lambda layout: rules.smallest_piece(layout, samples, last) > 1
                ) from error
            raise
        finally:
            self._preemption.release_signals()
            self._run_folder.release()

    @contextmanager
    def around_evaluation(
        self, stage: str, model: Any, given: GivenData, ckpt_path: Any
    ) -> Iterator[tuple[Any, GivenData, str | None]]:
        """Make the data of each process, and choose the checkpoint whose weights are used."""
        refuse_compiled(stage, model)
        module = self.trainer.lightning_module if model is None else model
        if module is None:
            raise UserError(f"trainer.{stage} needs a module: give one")
        data = self._prepared_data(stage, module, *given)
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        if model is None and ckpt_path is None and best:  # as Lightning does
            rank_zero_warn(f"trainer.{stage} got no module, so the best checkpoint of the fit is loaded: {best}")
            ckpt_path = "best"
        path = self._checkpoint_path(stage, ckpt_path)
        with _set_up_once(module, data), one_line_errors():
            yield module, GivenData(datamodule=data), path

    # --- parts ---

    def _read(self, path: str, record: dict[str, Any], data: StepData, model: pl.LightningModule) -> None:
        """Read the checkpoint from which a fit continues.

        Args:
            record: that of the new checkpoints.

        Raises:
            UserError: it does not fit.
        """
        trainer = self.trainer
        content = checkpoint_io.load(path, broadcast=True, whole=self.strategy.weights != "sharded")
        check_record(path, content, ANEW)
        limits = {f"max_steps={trainer.max_steps}": trainer.max_steps} if trainer.max_steps >= 0 else {}
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            limits[f"max_epochs={trainer.max_epochs}"] = trainer.max_epochs * data.order.steps_per_epoch
        exact = dict.fromkeys(record["trainer"], "exact=True, and ") if data.layout.exact else {}
        must_stay = exact | dict.fromkeys(COUNTED_BY, "")
        changes = check_fits(path, content, record["trainer"], compared_weights(model), limits, must_stay, ANEW)
        if changes:
            rank_zero_info(f"changed since the checkpoint: {', '.join(changes)}")
        self.checkpoint_io.loaded = content

    def _join(self, timeout: timedelta | None) -> None:
        """Join the process group of the workers that an engine has started. None: it has the usual timeout.

        Raises:
            UserError: there is a group already, with another timeout.
        """
        refuse_unknown_rank()
        if external_workers() > 1:
            had_group = torch.distributed.is_initialized()
            if had_group and timeout not in (None, group_timeout()):
                raise UserError(
                    f"Trainer(strategy=a DDPStrategy with timeout={timeout}) came after the start of the process "
                    "group: give the time there, as in lockstep.launch(function, hang_timeout=seconds)"
                )
            join_external(timeout)
            if not had_group:
                atexit.register(leave_group)

    def _use_folder(self, run: Path) -> None:
        """Let our callbacks write into a run's folder."""
        for each in self.trainer.callbacks:
            if isinstance(each, Checkpoint | Preemption):
                each.use_folder(run)

    def _layout(self, batch_size: int | None, trains: bool = True) -> Layout:
        """Return the layout for a batch size; None: one that fits, since the batch size is not known yet."""
        number = self._layout_options["devices"] * self._layout_options["num_nodes"]
        accumulate = self._layout_options["accumulate_grad_batches"] or 1
        size = batch_size or self._layout_options["pieces"] or number * accumulate
        return resolve(**self._layout_options, batch_size=size, equal_pieces=trains)

    def _check_module(self, module: Any) -> None:
        """Refuse a module that can't be trained in pieces."""
        refuse_compiled("fit", module)
        refuse_other_package("trainer.fit: the module", module)
        if not isinstance(module, pl.LightningModule):
            raise UserError(f"trainer.fit got a {type(module).__name__}: it must be a LightningModule")
        for name in ("training_step", "configure_optimizers"):
            if not callable(getattr(module, name)):
                raise UserError(f"{type(module).__name__}.{name} is {getattr(module, name)!r}: it must be a method")
        refuse_hooks(type(module).__name__, module)
        if overrides_method(module, "configure_model", pl.LightningModule):
            module.trainer = self.trainer
            module.configure_model()  # its layers must exist before their names are recorded
        for callback in callbacks_of(module.configure_callbacks()):
            refuse_callback(f"configure_callbacks of {type(module).__name__}", callback)
        if lazy := [name for name, each in (*module.named_parameters(), *module.named_buffers()) if is_lazy(each)]:
            raise UserError(f"{type(module).__name__}: the size of {lazy[0]} is unknown: give its lazy layer a size")
        if self.trainer.precision == "64-true":
            module.double()  # Lightning converts after it loads a checkpoint, which would be rounded to float32

    def _prepared_data(self, stage: str, module: Any, first: Any, val_loaders: Any, datamodule: Any) -> StepData:
        """Return this process's data for one of the Trainer's methods."""
        trainer = self.trainer
        # `setup` and loaders may read the state
        trainer.state.fn, trainer.state.stage = TrainerFn(stage), RunningStage("train" if stage == "fit" else stage)
        for each in (first, datamodule):
            refuse_other_package(f"trainer.{stage}: the data module", each)
        for each in trainer.callbacks:  # Lightning's Tuner adds one
            refuse_callback("callbacks", each)
        splits = user_splits(trainer, stage, self.seed, first, val_loaders, datamodule, module, self._datamodule)
        devices = self._layout_options["devices"] * self._layout_options["num_nodes"]
        about = self.batch_size, devices, splits.owner or module, trainer.quotients
        loaders = over_all_devices(dict(splits.loaders), *about)
        if "train" in loaders:
            if trainer.overfit_batches:
                ordered = {part: in_order(each) for part, each in loaders.items()}
                changed = [part for part, each in ordered.items() if each is not loaders[part] and loaders[part].loader]
                if changed:
                    names = join_names(changed)
                    rank_zero_warn(f"overfit_batches: samples of {names} come in the order of the data set")
                loaders = ordered
            limit = 1.0 if trainer.fast_dev_run else trainer.limit_train_batches
            loaders["train"] = first_batches(loaders["train"], limit, self.batches > 1)
        trained = self._steps[1] if self._steps and stage != "fit" else None
        size = trained or batch_size_of(loaders, self.batch_size, ("train", "val", "test"))
        if size is None:
            raise UserError(f"trainer.{stage}: the batch size is unknown: give Trainer(batch_size=...)")
        trains = stage == "fit" or trained is not None
        if stage == "fit":
            size *= self.batches
            if (stream := loaders["train"].stream) is not None:
                stream.remembers = size
            self._check_sizes(loaders["train"], size)
            self._validate_after_batches(loaders["train"])
            if not splits.names("val") and overrides_method(module, "validation_step", pl.LightningModule):
                rank_zero_warn(f"{type(module).__name__}.validation_step is not called: there is no val_dataloader")
        layout, splits = self._layout(size, trains), replace(splits, loaders=loaders)
        data = StepData(splits, layout, self.seed, rank_of_replica(layout), trains=trains)
        self._datamodule = data.owner
        return data

    def _check_sizes(self, train: Any, size: int) -> None:
        """Check that the training set fits the steps, and those of an earlier fit."""
        samples = len(train.dataset) if train.draws is None else train.draws.samples
        layout, batch = self._layout(size), size // self.batches
        whole = samples - samples % batch if train.drop_last and samples >= batch else samples
        if self.batches == 1 or batch > whole:
            rules.check_sizes(self.strategy, replace(layout, batch_size=batch), whole)
        else:  # the batches that an epoch has left make its last step
            self.strategy.check_samples(layout, whole)
        samples = samples if train.most is None else train.most
        if self.trainer.global_step and self._steps != (samples, size):
            raise UserError("trainer.fit got other data than before, and its steps are counted on: make a new Trainer")
        self._steps = samples, size

    def _validate_after_batches(self, train: Any) -> None:
        """Let the loop, which counts steps, validate after as many batches of the loader as with Lightning.

        Raises:
            UserError: a validation would come inside a step.
        """
        many, every = self.batches, self._validates_every
        if many == 1 or every is None:
            return
        batches = -(-train.samples // train.batch_size)
        interval = max(1, int(batches * every)) if isinstance(every, float) else every
        each_epoch = self.trainer.check_val_every_n_epoch is not None
        if each_epoch and interval >= batches:  # Lightning refuses a larger one
            self.trainer.val_check_interval = 1.0 if interval == batches else interval
        elif interval % many or not (each_epoch or batches % many == 0):
            of = "" if each_epoch else f", and an epoch of {batches} batches,"
            raise UserError(
                f"val_check_interval={every} with accumulate_grad_batches={many}: a validation after {interval} "
                f"batches{of} would come inside a step: use a multiple of {many} batches"
            )
        else:
            self.trainer.val_check_interval = interval // many

    def _checkpoint_path(self, stage: str, ckpt_path: Any) -> str | None:
        """Return the path of a checkpoint that a user has named, or None. All ranks must call it."""
        if ckpt_path in ("hpc", "registry"):
            raise UserError(f"ckpt_path={ckpt_path}: must be a path, 'last' or 'best'")
        if ckpt_path not in ("last", "best"):
            return None if ckpt_path is None else str(local_path(f"trainer.{stage}: ckpt_path", ckpt_path))
        if ckpt_path == "best":
            callback = self.trainer.checkpoint_callback  # as for Lightning, the first one
            best = getattr(callback, "best_model_path", "") or None
            if (path := broadcast_from_rank_zero(best)) is None:
                raise UserError(f"trainer.{stage}(ckpt_path='best'): no checkpoint has been saved: leave it out")
            return path
        last, foreign = self._find_last(stage == "fit")
        if last is not None:
            if stage == "fit" and self.trainer.is_global_zero:
                checkpoint_io.remove_unused_parts(last.parent)  # what a killed process has left
            return str(last)
        reason = "there is no checkpoint yet"
        if foreign is not None:
            reason = f"the checkpoints there are of another command or seed (to continue from one, give {foreign})"
        rank_zero_warn(f"trainer.{stage}(ckpt_path='last'): {reason}, so nothing is loaded")
        return None

    def _find_last(self, continues: bool) -> tuple[Path | None, Path | None]:
        """Return what `RunFolder.find_last` does, on all ranks; machines that lack the file get it."""
        from lockstep.checkpoint.start import share_newest

        trainer, rank, last, foreign = self.trainer, self.trainer.global_rank, None, None
        if rank in self._ranks:
            last, foreign = self._run_folder.find_last(trainer, map(Path, last_checkpoints(trainer)), continues)
        modified = last.stat().st_mtime_ns if last is not None else 0
        rows = gather_objects((modified, rank == 0, last, foreign))
        last, foreign = max(rows, key=lambda row: row[:2])[2:]
        if last is not None and len(self._ranks) > 1:
            share_newest(last, self._ranks)
        return last, foreign

    def _record(self, data: StepData) -> dict[str, Any]:
        """Return the entry `lockstep` of the checkpoints, as plain data."""
        trainer, train = self.trainer, data.splits.split("train")
        stream, dataset = train.stream, train.dataset
        content = content_of([dataset]) or (digest_of(dataset) if stream is None else stream.fingerprint())
        facts = {
            "samples": data.order.samples_per_epoch if stream is None or stream.has_end else None,
            "order": train.draws and train.draws.digest(0),
            "fingerprint": fingerprint(dataset),
            **({"content": content} if content else {}),
        }
        length = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
        started_by = broadcast_from_rank_zero(command())
        return make_record(train, data.layout, self.seed, trainer.precision, facts, command=started_by, config=length)

    def _note_left_out(self, *made: Any) -> None:
        """Say which hyperparameters checkpoints lack, without which Lightning would make another module or data."""
        for each in made:
            if names := not_plain(each.hparams):
                kind = type(each).__name__
                rank_zero_warn(
                    f"hyperparameters {join_names(names)} of {kind} are no plain data, so checkpoints leave them out: "
                    f"{kind}.load_from_checkpoint needs them as arguments"
                )


def _set_up_once(module: Any, data: StepData) -> AbstractContextManager[None]:
    """Return the context of one of Lightning's methods. If the module has returned loaders, it is set up already."""
    return setup_was_called(module) if data.splits.owner is module else nullcontext()
