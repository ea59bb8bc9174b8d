"""`lockstep.Trainer`: Lightning's Trainer with Lockstep's step, for any Lightning project."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.utils.data import DataLoader

from lockstep.arithmetic.layout import Layout
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.data.step_data import StepData
from lockstep.errors import UserError
from lockstep.lightning.trainer import StepTrainer
from lockstep.step.gradients import GradientSum
from lockstep.step.hook import StepHook
from lockstep.strategies import Strategy
from lockstep.trainer.data import watched
from lockstep.trainer.options import (
    check_weights_only,
    one_line_errors,
    refuse_beside_layout,
    with_options_of_lightning,
)
from lockstep.trainer.parts import device_options, step_checks
from lockstep.trainer.program import ProgramRun
from lockstep.trainer.run import GivenData, Run
from lockstep.trainer.run_folder import local_path


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
        run: with a layout: what stands around the methods. None: nothing.
        options: other options of Lightning's Trainer.

    Attributes:
        run: what stands around the methods: the `Job` of a config, or a `ProgramRun`.

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
        self.quotients: list[tuple[Any, Any]] = []  # what was divided by a number of devices, with the results
        errors: AbstractContextManager[None] = nullcontext()
        of_layout: dict[str, Any] = {
            "accelerator": accelerator,
            "devices": devices,
            "num_nodes": num_nodes,
            "batch_size": batch_size,
            "pieces": pieces,
            "accumulate_grad_batches": accumulate_grad_batches,
            "exact": exact,
            "checkpoint_every": checkpoint_every,
        }
        if layout is None:
            made = ProgramRun(
                **of_layout,
                strategy=strategy,
                seed=seed,
                precision=precision,
                nonfinite=nonfinite,
                callbacks=callbacks,
                default_root_dir=default_root_dir,
                checkpoint_io=checkpoint_io,
                options=options,
            )
            run, layout, strategy, seed, precision = made, made.layout, made.strategy, made.seed, made.precision
            callbacks, checkpoint_io, options = made.callbacks, made.checkpoint_io, made.options
            default_root_dir, errors = made.root, one_line_errors(ValueError, TypeError)
        else:
            named = None if accelerator == "auto" else accelerator
            refuse_beside_layout(**of_layout | {"accelerator": named, "exact": exact or None})
            batch_size = layout.batch_size
        if not isinstance(strategy, Strategy) or seed is None or checkpoint_io is None:
            right = "strategy=one of lockstep.strategies, seed and checkpoint_io"
            raise UserError(f"Trainer(layout=...) lacks what a config gives beside it: give {right}")
        self.run = run or Run()
        self.seed, self.batch_size, self._checkpoint_io = seed, batch_size, checkpoint_io
        with errors:
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
        self.run.begin(self)

    # --- what users read ---

    def _watched(self, size: int) -> int:
        return size if self.state.status == TrainerStatus.RUNNING else watched(size, self.quotients)  # not in a step

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
        if self.run.skips_fit():
            return
        given = GivenData(train_dataloaders, val_dataloaders, datamodule)
        with self.run.around_fit(model, given, ckpt_path) as (data, path):
            super().fit(model, *data, path)
        self._checkpoint_io.wait()  # hooks that Lightning calls last may save and remove files

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
        verbose = self.run.prints_results if verbose is None else verbose
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
        method = getattr(super(), stage)
        given = GivenData(loaders, datamodule=datamodule)
        with self.run.around_evaluation(stage, model, given, ckpt_path) as (module, data, path):
            results = method(module, data.loaders, datamodule=data.datamodule, ckpt_path=path, **options)
        self._checkpoint_io.wait()
        return results
