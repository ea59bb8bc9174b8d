"""`lockstep.Trainer`: Lightning's Trainer with Lockstep's step, for any Lightning project."""

import atexit
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from lockstep.arithmetic.layout import Layout, resolve
from lockstep.callbacks import Checkpoint, DummyBatchOnEmptyRank, EvaluationSeed, Preemption, ReplicaConsistencyCheck
from lockstep.callbacks.monitors import MonitorCheck
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.checkpoint.callback import ResumeState
from lockstep.checkpoint.fits import COUNTED_BY, check_fits, check_record, compared_weights
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.checkpoint.record import make_record
from lockstep.checkpoint.run_checks import ParameterNameCheck
from lockstep.config import rules
from lockstep.data.datasets import content_of, fingerprint
from lockstep.data.digest import digest_of
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
from lockstep.lightning.trainer import StepTrainer
from lockstep.step.gradients import GradientSum
from lockstep.step.hook import StepHook
from lockstep.strategies import Strategy
from lockstep.text import join_names
from lockstep.trainer.data import (
    batch_size_of,
    first_batches,
    in_order,
    over_all_devices,
    watched,
)
from lockstep.trainer.options import (
    PRECISIONS,
    check_arguments,
    check_pairs,
    check_weights_only,
    checked_options,
    chosen_devices,
    chosen_seed,
    chosen_strategy,
    name_of,
    one_line_errors,
    refuse_beside_layout,
    refuse_more_than_one,
    set_up_process,
    whole_number_of,
    with_options_of_lightning,
)
from lockstep.trainer.parts import (
    OneOptimizerCheck,
    callbacks_of,
    device_options,
    rank_of_replica,
    refuse_callback,
    refuse_compiled,
    refuse_hooks,
    refuse_other_package,
    step_checks,
)
from lockstep.trainer.run import Run
from lockstep.trainer.run_folder import RunFolder, command, local_path, root_folder

ANEW = "without ckpt_path a new run begins"


class Trainer(StepTrainer):
    """Lightning's Trainer, whose optimizer step is `batch_size` samples, cut into `pieces` pieces, on any layout.

    Args:
        strategy: `auto` (one device alone, several as with ddp), `ddp`, `dp`, `fsdp`, or one of
            `lockstep.strategies`.
        devices: devices of one machine; None: those for which torchrun, SLURM, MPI or `lockstep.launch` has started
            workers, else one.
        num_nodes: machines; None: those of the engine.
        accelerator: `cpu`, `gpu` or `auto`.
        batch_size: samples of one optimizer step, over all devices, machines and accumulated micro-batches; None: the
            batch size of the training loader.
        pieces: equal parts of a step; None: `devices x num_nodes x accumulate_grad_batches`.
        accumulate_grad_batches: with `batch_size`, the pieces that a device computes one after the other. Without it,
            as in Lightning on one device: a step has so many batches of the training loader, and as many pieces, on
            any number of devices. None: as `pieces` needs, or 1.
        exact: whether all layouts with the same `batch_size` and `pieces` give the same bits; `portable`: on x86-64
            processors of different kinds, too.
        seed: decides the order of the samples and the random numbers of each piece; None: that of Lightning's
            `seed_everything`, else 0. The module's initial weights are those that it brings.
        precision: as of Lightning.
        nonfinite: what a gradient that is not finite does: `stop`, or `skip` the step.
        checkpoint_every: optimizer steps between two writes of `last.ckpt`; None: at each epoch's end only.
        callbacks: as of Lightning.
        default_root_dir: as of Lightning. Each run has its own folder in it, see `lockstep.trainer.run_folder`.
        hooks: hooks of each step, in place of those of `step_checks`.
        gradients: the sum of a step's gradients, in place of the strategy's.
        checkpoint_io: writes and reads checkpoints.
        layout: of a config, which has checked all options and set up the process: the layout, in place of the sizes,
            the devices and `exact`. The Trainer then adds no callbacks, and leaves checkpoints to those that it gets.
        run: with a layout: what stands around `fit` and `test`. None: nothing.
        options: other options of Lightning's Trainer.

    Attributes:
        run: what stands around `fit` and `test` of a config's Trainer; None without a config.

    Raises:
        UserError: an option does not fit, in one line.
    """

    batch_size: int | None
    callbacks: list[pl.Callback]
    fast_dev_run: int | bool
    overfit_batches: int | float

    @with_options_of_lightning
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy | LightningStrategy = "auto",
        devices: int | str | list[int] | None = None,
        num_nodes: int | None = None,
        batch_size: int | None = None,
        pieces: int | None = None,
        accumulate_grad_batches: int | None = None,
        exact: bool | str = False,
        seed: int | None = None,
        precision: Any = None,
        nonfinite: str = "stop",
        checkpoint_every: int | None = None,
        callbacks: list[pl.Callback] | pl.Callback | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        hooks: Sequence[StepHook] | None = None,
        gradients: GradientSum | None = None,
        checkpoint_io: AtomicCheckpointIO | None = None,
        layout: Layout | None = None,
        run: Run | None = None,
        **options: Any,
    ) -> None:
        self._quotients: list[tuple[Any, Any]] = []  # what was divided by a number of devices, with the results
        self.run = None if layout is None else run or Run()
        if layout is not None:
            if not isinstance(strategy, Strategy) or seed is None or checkpoint_io is None:
                right = "strategy=one of lockstep.strategies, seed and checkpoint_io"
                raise UserError(f"Trainer(layout=...) lacks what a config gives beside it: give {right}")
            refuse_beside_layout(
                accelerator=None if accelerator == "auto" else accelerator,
                devices=devices,
                num_nodes=num_nodes,
                batch_size=batch_size,
                pieces=pieces,
                accumulate_grad_batches=accumulate_grad_batches,
                exact=exact or None,
                checkpoint_every=checkpoint_every,
            )
            self.seed, self.batch_size, self._checkpoint_io = seed, layout.batch_size, checkpoint_io
            super().__init__(
                gradients or strategy.build(layout),  # it contains the strategy
                step_checks(layout, nonfinite) if hooks is None else hooks,
                seed,
                precision=precision,
                callbacks=callbacks,
                plugins=[checkpoint_io],
                default_root_dir=default_root_dir,
                **(device_options(layout) | options),
            )
            return
        print_refusals_as_lines()
        self.validates_last_step = False  # as Lightning's
        accelerator = name_of(accelerator, strategy)
        devices = whole_number_of(devices, accelerator)
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
        options = checked_options(options, exact)
        kind = chosen_strategy(strategy, bool(options.pop("sync_batchnorm", False)))
        self._strategy, self._reads_parts = kind, kind.weights == "sharded"
        self.batch_size = batch_size
        hide_harmless_warnings()
        self._join(timeout_of(strategy))
        seed = self.seed = chosen_seed(seed)
        chosen = chosen_devices(kind, devices, num_nodes, accelerator)
        refuse_more_than_one(strategy, chosen["devices"] * chosen["num_nodes"])
        self._batches = 1  # of the training loader, in a step
        if batch_size is None and accumulate_grad_batches:
            self._batches, accumulate_grad_batches = accumulate_grad_batches, None
            number = chosen["devices"] * chosen["num_nodes"]  # more devices than batches get more pieces
            pieces = pieces or (self._batches * -(-number // self._batches) if self._batches > 1 else None)
        self._layout_options = {
            **chosen,
            "pieces": pieces,
            "accumulate_grad_batches": accumulate_grad_batches,
            "exact": exact,
            "shares": kind.shares,
            "weights": kind.weights,
            "one_process": kind.one_process,
        }
        layout = self._layout(batch_size)
        precision = PRECISIONS.get(precision, precision)
        check_pairs(kind, layout, precision, options)
        portable.set_up_worker(exact)
        set_up_process(layout)

        root = root_folder(default_root_dir)
        self._last: Path | None = None  # of our callbacks; known when a fit has begun
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
        self._checkpoint_io = checkpoint_io or AtomicCheckpointIO(
            ranks=self._ranks, timeout=group_timeout().total_seconds()
        )
        self._fitted: pl.LightningModule | None = None
        self._of_fit: list[pl.Callback] = []  # those of our callbacks that belong to a module
        self._datamodule: Any = None  # that of the last method, of the user
        self._steps: tuple[int, int] | None = None  # samples of the training set and of a step
        with one_line_errors(ValueError, TypeError):
            super().__init__(
                gradients or kind.build(layout),
                step_checks(layout, nonfinite) if hooks is None else hooks,
                seed,
                precision=precision,
                callbacks=[
                    *(EvaluationSeed(), DummyBatchOnEmptyRank(), ReplicaConsistencyCheck(), OneOptimizerCheck()),
                    *user_callbacks,
                    *ours,
                ],
                plugins=[self._checkpoint_io],
                default_root_dir=root,
                **(device_options(layout) | options),
            )
        self.accumulate_grad_batches = self._batches  # for users: the loop takes a step for each of its batches
        self._validates_every = getattr(self, "val_check_interval", None)  # batches of the loader

    # --- what users read ---

    def _watched(self, size: int) -> int:
        return size if self.state.status == TrainerStatus.RUNNING else watched(size, self._quotients)  # not in a step

    @property
    def world_size(self) -> int:
        """The number of processes; see `lockstep.trainer.data.WatchedSize`."""
        return self._watched(super().world_size)

    @property
    def num_devices(self) -> int:
        """The number of devices of a machine."""
        return self._watched(super().num_devices)

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self._watched(super().num_nodes)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps of a fit. Lightning divides its batches, which are steps here."""
        batches, self.accumulate_grad_batches = self.accumulate_grad_batches, 1
        try:
            return super().estimated_stepping_batches
        finally:
            self.accumulate_grad_batches = batches

    def _users_loader(self, loader: Any, name: str) -> Any:
        data: Any = vars(self).get("datamodule")
        ours = isinstance(data, StepData) and (isinstance(loader, DataLoader) or (isinstance(loader, list) and loader))
        return data.users_loader(name) if ours else loader

    @property
    def train_dataloader(self) -> Any:
        """The user's loader, when the loop has one."""
        return self._users_loader(super().train_dataloader, "train_dataloader")

    @property
    def val_dataloaders(self) -> Any:
        """The user's loader, when the loop has one."""
        return self._users_loader(super().val_dataloaders, "val_dataloader")

    @property
    def test_dataloaders(self) -> Any:
        """The user's loader, when the loop has one."""
        return self._users_loader(super().test_dataloaders, "test_dataloader")

    @property
    def predict_dataloaders(self) -> Any:
        """The user's loader, when the loop has one."""
        return self._users_loader(super().predict_dataloaders, "predict_dataloader")

    # --- Lightning's methods ---

    def fit(
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a module.

        Args:
            model: the module.
            train_dataloaders: a DataLoader, whose data set, batch size and order are used; or a map-style data set, or
                a data module; None: the module's `train_dataloader` returns it.
            val_dataloaders: a DataLoader or map-style data set for validation, or several in a list or dict; None: the
                module's `val_dataloader` returns them, if it has one.
            datamodule: a LightningDataModule or a `lockstep.DataModule`.
            ckpt_path: a checkpoint to continue from, of any layout; `last`: the last one, if there is one.
            weights_only: a checkpoint is always loaded as plain data and tensors.

        Raises:
            UserError: the module or the data can't be used, or the checkpoint does not fit.
        """
        check_weights_only(weights_only)
        if self.run is not None:
            if not self.run.skips_fit():
                with self.run.around_fit(ckpt_path) as path:
                    super().fit(model, train_dataloaders, val_dataloaders, datamodule, path)
                    self._checkpoint_io.wait()  # hooks that Lightning calls last may save and remove files
            return
        self._check_module(model)
        if self._fitted is not None and self._fitted is not model:
            raise UserError("trainer.fit gets another module than before: make a lockstep.Trainer for each of them")
        self._fitted = model
        data = self._prepared_data("fit", model, train_dataloaders, val_dataloaders, datamodule)
        path = self._checkpoint_path("fit", ckpt_path)
        self._run_folder.continued = (
            paths.run_of(Path(path)) if path and Path(path).name == paths.last(Path()).name else None
        )
        record = self._record(data)
        if path is not None:
            content = checkpoint_io.load(path, broadcast=True, whole=not self._reads_parts)
            check_record(path, content, ANEW)
            limits = {f"max_steps={self.max_steps}": self.max_steps} if self.max_steps >= 0 else {}
            if self.max_epochs is not None and self.max_epochs >= 0:
                limits[f"max_epochs={self.max_epochs}"] = self.max_epochs * data.order.steps_per_epoch
            exact = dict.fromkeys(record["trainer"], "exact=True, and ") if data.layout.exact else {}
            must_stay = exact | dict.fromkeys(COUNTED_BY, "")
            changes = check_fits(path, content, record["trainer"], compared_weights(model), limits, must_stay, ANEW)
            if changes:
                rank_zero_info(f"changed since the checkpoint: {', '.join(changes)}")
            self._checkpoint_io.expect(content)
            del content  # free the memory once it is restored
        others = [each for each in self.callbacks if each not in self._of_fit]
        self._of_fit = [ResumeState(record, {}, data.order.steps_per_epoch), ParameterNameCheck(model)]
        train = data.splits.split("train")
        if train.draws is not None:
            self._of_fit.append(SamplerCheck(train.draws))
        self.callbacks = [*self._of_fit, *others]
        rank_zero_info(data.layout.describe())
        if data.splits.val is None:  # Lightning takes the method of our data module for a loader
            warnings.filterwarnings("ignore", message="You passed in a `val_dataloader`")
        if self.checkpoint_callbacks:
            self._note_left_out(model, data)
        if data.layout.exact and self._layout_options["pieces"] is None:
            pieces = data.layout.pieces
            rank_zero_info(
                f"exact=True without pieces: the same bits on layouts with the same number of pieces, here {pieces}: "
                "give Trainer(pieces=...) for other numbers of devices"
            )
        try:
            with _set_up_once(model, data), one_line_errors():
                super().fit(model, datamodule=data, ckpt_path=path)
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
        self._checkpoint_io.wait()

    def validate(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Validate a module; see `fit` and Lightning's method. Every sample counts once, on any layout."""
        return self._evaluate("validate", model, dataloaders, datamodule, ckpt_path, weights_only, verbose=verbose)

    def test(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool | None = None,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Test a module; see `fit` and Lightning's method. Every sample counts once, on any layout.

        `verbose` is the default without a config, whose run prints a line. With a config, `ckpt_path="best"` are the
        weights that training has ended with if the run has no best checkpoint.
        """
        verbose = self.run is None if verbose is None else verbose
        return self._evaluate("test", model, dataloaders, datamodule, ckpt_path, weights_only, verbose=verbose)

    def predict(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Predict; see `fit` and Lightning's method. Each process returns its batches, of neighbouring samples."""
        options = {"return_predictions": return_predictions}
        return self._evaluate("predict", model, dataloaders, datamodule, ckpt_path, weights_only, **options)

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = False, storage_options: Any = None) -> None:
        """Save a checkpoint; see Lightning's method.

        Inside a step it is saved when the step is complete; outside of `fit`, the file is complete on return.
        """
        filepath = local_path("trainer.save_checkpoint", filepath)
        super().save_checkpoint(filepath, weights_only, storage_options)
        if self.state.fn != TrainerFn.FITTING or self.state.status != TrainerStatus.RUNNING:
            self._checkpoint_io.teardown()

    # --- parts ---

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
        self._last = paths.last(run)
        for each in self.callbacks:
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
            module.trainer = self
            module.configure_model()  # its layers must exist before their names are recorded
        for callback in callbacks_of(module.configure_callbacks()):
            refuse_callback(f"configure_callbacks of {type(module).__name__}", callback)
        if lazy := [name for name, each in (*module.named_parameters(), *module.named_buffers()) if is_lazy(each)]:
            raise UserError(f"{type(module).__name__}: the size of {lazy[0]} is unknown: give its lazy layer a size")
        if self.precision == "64-true":
            module.double()  # Lightning converts after it loads a checkpoint, which would be rounded to float32

    def _prepared_data(self, stage: str, module: Any, first: Any, val_loaders: Any, datamodule: Any) -> StepData:
        """Return this process's data for one of the Trainer's methods."""
        # `setup` and loaders may read the state
        self.state.fn, self.state.stage = TrainerFn(stage), RunningStage("train" if stage == "fit" else stage)
        for each in (first, datamodule):
            refuse_other_package(f"trainer.{stage}: the data module", each)
        for each in self.callbacks:  # Lightning's Tuner adds one
            refuse_callback("callbacks", each)
        splits = user_splits(self, stage, self.seed, first, val_loaders, datamodule, module, self._datamodule)
        devices = self._layout_options["devices"] * self._layout_options["num_nodes"]
        about = self.batch_size, devices, splits.owner or module, self._quotients
        loaders = over_all_devices(dict(splits.loaders), *about)
        if "train" in loaders:
            if self.overfit_batches:
                ordered = {part: in_order(each) for part, each in loaders.items()}
                changed = [part for part, each in ordered.items() if each is not loaders[part] and loaders[part].loader]
                if changed:
                    names = join_names(changed)
                    rank_zero_warn(f"overfit_batches: samples of {names} come in the order of the data set")
                loaders = ordered
            limit = 1.0 if self.fast_dev_run else self.limit_train_batches
            loaders["train"] = first_batches(loaders["train"], limit, self._batches > 1)
        trained = self._steps[1] if self._steps and stage != "fit" else None
        size = trained or batch_size_of(loaders, self.batch_size, ("train", "val", "test"))
        if size is None:
            raise UserError(f"trainer.{stage}: the batch size is unknown: give Trainer(batch_size=...)")
        trains = stage == "fit" or trained is not None
        if stage == "fit":
            size *= self._batches
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
        layout, batch = self._layout(size), size // self._batches
        whole = samples - samples % batch if train.drop_last and samples >= batch else samples
        if self._batches == 1 or batch > whole:
            rules.check_sizes(self._strategy, replace(layout, batch_size=batch), whole)
        else:  # the batches that an epoch has left make its last step
            self._strategy.check_samples(layout, whole)
        samples = samples if train.most is None else train.most
        if self.global_step and self._steps != (samples, size):
            raise UserError("trainer.fit got other data than before, and its steps are counted on: make a new Trainer")
        self._steps = samples, size

    def _validate_after_batches(self, train: Any) -> None:
        """Let the loop, which counts steps, validate after as many batches of the loader as with Lightning.

        Raises:
            UserError: a validation would come inside a step.
        """
        many, every = self._batches, self._validates_every
        if many == 1 or every is None:
            return
        batches = -(-train.samples // train.batch_size)
        interval = max(1, int(batches * every)) if isinstance(every, float) else every
        each_epoch = self.check_val_every_n_epoch is not None
        if each_epoch and interval >= batches:  # Lightning refuses a larger one
            self.val_check_interval = 1.0 if interval == batches else interval
        elif interval % many or not (each_epoch or batches % many == 0):
            of = "" if each_epoch else f", and an epoch of {batches} batches,"
            raise UserError(
                f"val_check_interval={every} with accumulate_grad_batches={many}: a validation after {interval} "
                f"batches{of} would come inside a step: use a multiple of {many} batches"
            )
        else:
            self.val_check_interval = interval // many

    def _checkpoint_path(self, stage: str, ckpt_path: Any) -> str | None:
        """Return the path of a checkpoint that a user has named, or None. All ranks must call it."""
        if ckpt_path in ("hpc", "registry"):
            raise UserError(f"ckpt_path={ckpt_path}: must be a path, 'last' or 'best'")
        if ckpt_path not in ("last", "best"):
            return None if ckpt_path is None else str(local_path(f"trainer.{stage}: ckpt_path", ckpt_path))
        if ckpt_path == "best":
            best = getattr(self.checkpoint_callback, "best_model_path", "") or None  # as Lightning, the first one's
            if (path := broadcast_from_rank_zero(best)) is None:
                raise UserError(f"trainer.{stage}(ckpt_path='best'): no checkpoint has been saved: leave it out")
            return path
        last, foreign = self._find_last(stage == "fit")
        if last is not None:
            if stage == "fit" and self.is_global_zero:
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

        rank, last, foreign = self.global_rank, None, None
        if rank in self._ranks:
            last, foreign = self._run_folder.find_last(self, map(Path, last_checkpoints(self)), continues)
        modified = last.stat().st_mtime_ns if last is not None else 0
        rows = gather_objects((modified, rank == 0, last, foreign))
        last, foreign = max(rows, key=lambda row: row[:2])[2:]
        if last is not None and len(self._ranks) > 1:
            share_newest(last, self._ranks)
        return last, foreign

    def _record(self, data: StepData) -> dict[str, Any]:
        """Return the entry `lockstep` of the checkpoints, as plain data."""
        train = data.splits.split("train")
        stream, dataset = train.stream, train.dataset
        content = content_of([dataset]) or (digest_of(dataset) if stream is None else stream.fingerprint())
        facts = {
            "samples": data.order.samples_per_epoch if stream is None or stream.has_end else None,
            "order": train.draws and train.draws.digest(0),
            "fingerprint": fingerprint(dataset),
            **({"content": content} if content else {}),
        }
        length = {"max_epochs": self.max_epochs, "max_steps": self.max_steps}
        started_by = broadcast_from_rank_zero(command())
        return make_record(train, data.layout, self.seed, self.precision, facts, command=started_by, config=length)

    def _note_left_out(self, *made: Any) -> None:
        """Say which hyperparameters checkpoints lack, without which Lightning would make another module or data."""
        for each in made:
            if names := checkpoint_io.not_plain(each.hparams):
                kind = type(each).__name__
                rank_zero_warn(
                    f"hyperparameters {join_names(names)} of {kind} are no plain data, so checkpoints leave them out: "
                    f"{kind}.load_from_checkpoint needs them as arguments"
                )

    @contextmanager
    def _without_fit_only(self) -> Iterator[None]:
        """Leave out for a while what can't work in a test."""
        before = self.callbacks, self.profiler
        self.profiler = PassThroughProfiler()  # Lightning's profilers fail if their schedule recorded nothing
        # WeightAveraging would load from the checkpoint the weights that are not averaged.
        self.callbacks = [each for each in self.callbacks if not isinstance(each, WeightAveraging)]
        try:
            yield
        finally:
            self.callbacks, self.profiler = before

    def _evaluate(
        self,
        stage: str,
        model: pl.LightningModule | None,
        loaders: Any,
        datamodule: Any,
        ckpt_path: Any,
        weights_only: bool | None,
        **options: Any,
    ) -> Any:
        """Run `validate`, `test` or `predict`."""
        check_weights_only(weights_only)
        if self.run is not None:
            method = getattr(super(), stage)
            if stage != "test":
                return method(model, loaders, datamodule=datamodule, ckpt_path=ckpt_path, **options)
            if ckpt_path == "best":
                names = [str(path) for each in self.callbacks if (path := getattr(each, "best_path", None))]
                ckpt_path = broadcast_from_rank_zero(names[0] if names else None)  # other ranks may not see the file
            with self._without_fit_only(), self.run.around_test(ckpt_path):
                return method(model, loaders, datamodule=datamodule, ckpt_path=ckpt_path, **options)
        refuse_compiled(stage, model)
        module = self.lightning_module if model is None else model
        if module is None:
            raise UserError(f"trainer.{stage} needs a module: give one")
        data = self._prepared_data(stage, module, loaders, None, datamodule)
        best = getattr(self.checkpoint_callback, "best_model_path", "")
        if model is None and ckpt_path is None and best:  # as Lightning does
            rank_zero_warn(f"trainer.{stage} got no module, so the best checkpoint of the fit is loaded: {best}")
            ckpt_path = "best"
        path = self._checkpoint_path(stage, ckpt_path)
        method = getattr(super(), stage)
        with _set_up_once(module, data), one_line_errors():
            results = method(module, datamodule=data, ckpt_path=path, **options)
        self._checkpoint_io.wait()
        return results


def _set_up_once(module: Any, data: StepData) -> AbstractContextManager[None]:
    """Return the context of one of Lightning's methods. If the module has returned loaders, it is set up already."""
    return setup_was_called(module) if data.splits.owner is module else nullcontext()
