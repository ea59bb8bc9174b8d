"""Build what a worker needs from a checked config: module, data, callbacks, Trainer."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ProgressBar,
    WeightAveraging,
)
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.parameter import is_lazy

from lockstep.callbacks.monitors import MonitorCheck
from lockstep.checkpoint import paths
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.checkpoint.run_checks import SharedFileCheck
from lockstep.config.check import Config
from lockstep.config.extras import CheckpointObserver, RunParts
from lockstep.config.instantiate import call, instantiate, locate, parameters
from lockstep.config.metrics import UnknownMode, modes_with_model, with_mode
from lockstep.config.run_length import smallest_piece
from lockstep.data import Splits, StepData
from lockstep.data.datasets import fetch
from lockstep.data.labels import first_label, sample_checks
from lockstep.data.splits import TASKS
from lockstep.errors import UserError
from lockstep.job import worker_setup
from lockstep.job.optimizers import (
    LR_SETTERS,
    OptimizerCheck,
    refuse_keys_without_effect,
    training_arguments,
    without_defaulted,
)
from lockstep.launch.environment import environment
from lockstep.launch.process_group import broadcast_from_rank_zero
from lockstep.report.loggers import make_loggers
from lockstep.report.report_lines import headline
from lockstep.step.compile import CudaGraphs, EagerEvaluation
from lockstep.step.trial import modes_restored
from lockstep.trainer.parts import (
    callbacks_of,
    rank_of_replica,
    refuse_callback,
    refuse_hooks,
    step_checks,
)
from lockstep.trainer.run import Run
from lockstep.trainer.trainer import Trainer

# Keys of the `model` group that callbacks read: the main metric, and whether its largest or smallest value is the best.
# They are not passed to a model that takes no such argument.
KEYS_FOR_CALLBACKS = ("monitor", "mode")


def make_module(config: Config, splits: Splits) -> pl.LightningModule:
    """Return the config's LightningModule, with weights that depend on the seed only.

    A run that loads a checkpoint does not load pretrained weights first, from a file or the network, if the module's
    class says by `without_pretrained` which options do without.
    """
    if config.checkpoint or config.resume:
        target = locate("model._target_", config.model["_target_"])
        without = {key: off for key, off in getattr(target, "without_pretrained", {}).items() if config.model.get(key)}
        if without:
            module = _module(config, splits, {**config.model, **without})
            if module.strict_loading:  # otherwise its checkpoints may lack some of the weights
                return module
    return _module(config, splits, config.model)


def _no_lightning_module(config: Config) -> UserError:
    return UserError(
        f"model._target_={config.model['_target_']} is not a LightningModule: "
        "pass the network as the net of model._target_=lockstep.vision.models.ImageClassifier (lockstep docs own-model)"
    )


def _module(config: Config, splits: Splits, options: dict[str, Any]) -> pl.LightningModule:
    """Build the module from `options`, check that its steps can be cut into pieces, and set its memory format."""
    pl.seed_everything(config.seed, workers=False, verbose=False)
    spec = splits.spec
    target = locate("model._target_", options["_target_"])
    of_python = getattr(target, "__module__", "").partition(".")[0] in sys.stdlib_module_names  # os.system, say
    if of_python or (isinstance(target, type) and not issubclass(target, pl.LightningModule)):
        raise _no_lightning_module(config)
    argument_names = parameters(target)
    options = {key: value for key, value in options.items() if key not in KEYS_FOR_CALLBACKS or key in argument_names}
    refuse_keys_without_effect(config)
    sizes = {"channels": spec.channels, "image_size": spec.image_size, "num_classes": len(spec.classes)}
    arguments = training_arguments(config, len(splits.train)) | sizes
    arguments["smallest_piece"] = smallest_piece(config, len(splits.train))
    offered = without_defaulted(arguments, target, config)
    if config.trains and offered.get("optimizer", "") is None and "optimizer" in argument_names - set(options):
        raise UserError(f"optimizer: {options['_target_']} takes one, and the config has none: give optimizer=sgd, say")
    if "lr" in offered and "lr" in argument_names:
        options = {"lr": offered["lr"], **options}
    yielding = () if LR_SETTERS & config.requested else ("lr",)
    # The networks in `options` may have a `later:lr`, and an optimizer of their own with a default.
    module = instantiate("model", options, yielding, **{"lr": arguments["lr"], **offered})
    setting = f"model._target_={config.model['_target_']}"
    if not isinstance(module, pl.LightningModule):
        raise _no_lightning_module(config)
    if (task := getattr(module, "task", spec.task)) in TASKS and task != spec.task:
        hint = first_label(splits.train) if (task, spec.task) == ("classification", "regression") else ""
        raise UserError(
            f"model={config.model.get('name')} is for {task}, and data={config.data.get('name')} for {spec.task}: "
            f"use a model and data of the same task (lockstep docs tasks){hint}"
        )
    if config.trains:
        for split, check in sample_checks(splits, getattr(module, "task", None) == "classification").items():
            if split != "train" or splits.window is None:  # those of so many samples are checked batch by batch
                check.check_all()
    refuse_hooks(setting, module, "data=...")
    module.configure_model()  # its layers must exist before their weights are loaded
    initialise_lazy_layers(setting, module, splits, config.seed)
    if config.precision == "64-true":
        module.double()  # Lightning converts after it loads a checkpoint, which would be rounded to float32
    worker_setup.apply_memory_format(module, config.speed.memory_format)
    if arguments["optimizer"]:  # the optimizer's factory divides the parameters into groups by their names
        arguments["optimizer"].named_parameters = module.named_parameters
    return module


def initialise_lazy_layers(setting: str, module: pl.LightningModule, splits: Splits, seed: int) -> None:
    """Give lazy layers (`torch.nn.LazyLinear`) their sizes by a forward pass of one sample."""

    def lazy_names() -> list[str]:
        tensors = [*module.named_parameters(), *module.named_buffers()]
        return [name for name, each in tensors if is_lazy(each)]

    if not lazy_names():
        return
    reason = "its forward does not use them"
    try:
        with modes_restored(module), torch.no_grad(), isolate_rng(include_cuda=False):
            x = sample_images(splits)
            pl.seed_everything(seed, workers=False, verbose=False)
            module.eval()
            module(x)
    except Exception as error:
        reason = f"a forward pass of one sample fails ({type(error).__name__}: {error})".partition("\n")[0]
    if left := lazy_names():
        raise UserError(f"{setting}: the sizes of its lazy layers are unknown, since {reason}: give {left[0]} a size")


def sample_images(splits: Splits) -> Any:
    """Return one sample as a batch of a module's `forward`; images of zeros if the data has none, as in `predict`."""
    dataset = splits.train if hasattr(splits.train, "__getitem__") and not isinstance(splits.train, range) else None
    if dataset is None:
        return torch.zeros(1, splits.spec.channels, splits.spec.image_size, splits.spec.image_size)
    x = fetch(dataset, np.zeros(1, dtype=np.int64))[0]
    numbers = isinstance(x, torch.Tensor) and (x.dtype == torch.uint8 or x.is_floating_point())
    return x.float() if numbers else x


def make_data(config: Config, splits: Splits) -> StepData:
    """Return the data of this worker: the samples of its pieces."""
    rank, resident = rank_of_replica(config.layout), config.speed.resident
    return StepData(splits, config.layout, config.seed, rank, config.num_workers, resident, config.trains)


def make_callbacks(config: Config, splits: Splits, folder: Path, module: pl.LightningModule) -> list[pl.Callback]:
    """Build the config's callbacks. Check them, and the module's own callbacks, which Lightning adds later."""
    arguments = {
        "folder": folder,
        "every": config.checkpoint_every,
        "log_every": config.log_every,
        "config": config.record,
        "headline": headline(config, splits, folder),
        "started": environment().started,
    }
    modes = modes_with_model(config.model)
    unknown: dict[str, UserError] = {}
    groups = {
        f"callbacks.{name}": _with_mode(f"callbacks.{name}", options, modes, unknown)
        for name, options in config.callbacks.items()
        if options
    }
    # `instantiate` passes those of the arguments that a callback's class takes; a user's class keeps its own defaults.
    config_callbacks = {}
    for key, options in groups.items():
        ours = str(options.get("_target_")).startswith(("lockstep.", "lockstep_"))
        config_callbacks[key] = instantiate(key, options, () if ours else tuple(arguments), **arguments)
    for key, callback in config_callbacks.items():
        if not isinstance(callback, pl.Callback):
            raise UserError(f"{key}._target_={groups[key]['_target_']}: must be a lightning.pytorch.Callback")
    module_callbacks = list(callbacks_of(module.configure_callbacks()))
    for key, callback in config_callbacks.items():
        _check_callback(key, callback, config, module, groups[key] or {})
    for callback in module_callbacks:
        _check_callback(f"model._target_={config.model['_target_']}", callback, config, module, {})
    all_callbacks = config_callbacks | {
        f"configure_callbacks: {type(each).__name__}": each for each in module_callbacks
    }
    # If the metric that the schedule monitors is missing, the error names the setting that the user can change.
    monitor_is_in_config = config.scheduler.get("monitor") and "scheduler" in parameters(type(module))
    monitor_setting = (
        "scheduler.monitor" if monitor_is_in_config else "configure_optimizers: the monitor of its lr_scheduler"
    )
    checks = [OptimizerCheck(config), MonitorCheck(all_callbacks, monitor_setting, unknown)]
    return [*config_callbacks.values(), *checks, SharedFileCheck(folder, all_callbacks)]


def _has_lr(module: pl.LightningModule) -> bool:
    """Check whether a module has an attribute that Lightning takes for its learning rate."""
    return any(hasattr(module, name) or name in module.hparams for name in ("lr", "learning_rate"))


def _with_mode(
    key: str, options: dict[str, Any], modes: Mapping[str, str], unknown: dict[str, UserError]
) -> dict[str, Any]:
    """Return a callback's options with the `mode` of its `monitor`, if its class takes one.

    If the mode is unknown, it is `min` until `MonitorCheck` refuses it: the metric may be one that nothing logs.
    """
    if "mode" not in parameters(locate(f"{key}._target_", str(options.get("_target_")))):
        return options
    try:
        return with_mode(key, options, modes, required=True)
    except UnknownMode as refusal:
        if not options["monitor"].startswith("val"):
            raise
        unknown[options["monitor"]] = refusal
        return {**options, "mode": "min"}


def _check_callback(
    setting: str, callback: pl.Callback, config: Config, module: pl.LightningModule, options: Mapping[str, Any]
) -> None:
    """Refuse a callback of Lightning that can't work with the config or the module.

    Args:
        setting: what chooses the callback.
        options: the callback's options in the config.
    """
    kind = type(callback).__name__
    if isinstance(callback, ProgressBar):
        raise UserError(f"{setting}: the console has its own progress bar (callbacks.console): leave {kind} out")
    refuse_callback(setting, callback)
    if isinstance(callback, LearningRateFinder) and not (options.get("attr_name") or _has_lr(module)):
        raise UserError(
            f"{setting}: {kind} needs a module with an attribute lr that its configure_optimizers reads: "
            "`lockstep search` finds lr for any other one"
        )
    if not isinstance(callback, WeightAveraging):
        return
    if config.layout.weights == "staged":  # each process has a part of the network
        raise UserError(f"{setting}: {kind} needs the whole network on each device: use strategy=ddp")
    if config.precision.endswith("16-true"):
        precision = f"precision={config.precision}"
        raise UserError(f"{setting}: {precision} has too few digits for an average to move: use precision=bf16-mixed")


def make_trainer(
    config: Config,
    folder: Path,
    callbacks: list[pl.Callback],
    parts: RunParts | None = None,
    ranks: Sequence[int] = (0,),
    run: Run | None = None,
) -> Trainer:
    """Build the `lockstep.Trainer` of a config.

    Args:
        parts: the run's config, data, module and the checkpoint from which it continues. Extras make their hooks and
            callbacks from them. None: an evaluation, which has no extras.
        ranks: the ranks that write in the folder, from `ranks_writing_in`.
        run: what stands around the Trainer's methods; None: nothing.
    """
    layout = config.layout
    resumed = parts.resumed if parts else {}
    gradient_sum = config.strategy.build(layout)
    hooks = step_checks(layout, config.nonfinite, config.compile)
    if config.speed.cuda_graphs:
        hooks.append(CudaGraphs())
    observers: list[CheckpointObserver] = []
    extra_callbacks: list[pl.Callback] = []
    for extra in config.extras.values():
        assert parts is not None, "extras take part in training only: see config.check"
        gradient_sum = extra.wrap_gradients(gradient_sum)
        observers += extra.checkpoint_observers(parts)
        extra_callbacks += extra.callbacks(parts)
    callbacks = [*extra_callbacks, *callbacks]
    debug_options = dict(config.debug.trainer)
    if isinstance(profiler := debug_options.get("profiler"), dict):
        debug_options["profiler"] = instantiate("debug.trainer.profiler", profiler, dirpath=folder / "profile")
    make_step_trainer = partial(
        Trainer,
        layout=layout,
        run=run,
        strategy=config.strategy,
        gradients=gradient_sum,
        hooks=hooks,
        seed=config.seed,
        precision=cast(Any, config.precision),
        max_epochs=config.epoch_limit,
        max_steps=config.max_steps or -1,
        gradient_clip_val=config.gradient_clip_val,
        gradient_clip_algorithm=config.gradient_clip_algorithm,
        val_check_interval=config.val_every,
        check_val_every_n_epoch=None if config.val_every else 1,
        log_every_n_steps=config.log_every,
        logger=make_loggers(config, folder, resumed.get("global_step", 0)),
        callbacks=[*callbacks, EagerEvaluation()] if config.compile else callbacks,
        checkpoint_io=AtomicCheckpointIO(
            observers, paths.last(folder), config.checkpoint_keep, ranks, config.hang_timeout, resumed or None
        ),
        num_sanity_val_steps=0,  # MonitorCheck sets it to 1 if something monitors a metric of validation
        enable_checkpointing=any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **debug_options,
    )
    # An error is reported as one of `debug.trainer`, because all other arguments are checked already.
    trainer: Trainer = call("debug.trainer", make_step_trainer)
    loop: Any = trainer.fit_loop.epoch_loop
    for extra in config.extras.values():
        loop.passes = extra.wrap_passes(loop.passes)
    return trainer


def best_checkpoint(trainer: Any) -> str | None:
    """Return the path of the best checkpoint of a config's run, on all ranks; None if it has none."""
    names = [str(path) for each in trainer.callbacks if (path := getattr(each, "best_path", None))]
    return broadcast_from_rank_zero(names[0] if names else None)  # other ranks may not see the file


@contextmanager
def without_fit_only(trainer: Any) -> Iterator[None]:
    """Return a context in which a Trainer lacks what can't work in a test."""
    before = trainer.callbacks, trainer.profiler
    trainer.profiler = PassThroughProfiler()  # Lightning's profilers fail if their schedule recorded nothing
    # WeightAveraging would load from the checkpoint the weights that are not averaged.
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, WeightAveraging)]
    try:
        yield
    finally:
        trainer.callbacks, trainer.profiler = before
