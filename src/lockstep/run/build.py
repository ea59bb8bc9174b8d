"""Builds what a worker needs from a checked config: module, data, callbacks, Trainer."""

from __future__ import annotations

import csv
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lockstep.arithmetic.layout import Refusal
from lockstep.arithmetic.order import DataOrder
from lockstep.callbacks.checkpoint_io import AtomicCheckpointIO, is_plain
from lockstep.launch import logs
from lockstep.launch.environment import environment
from lockstep.launch.watchdog import patient
from lockstep.loading import DataModule, Splits
from lockstep.run import fast
from lockstep.run.config import Config
from lockstep.run.provenance import versions
from lockstep.run.summary import describe
from lockstep.run.targets import build
from lockstep.step.compiled import GRAPHS, compile_networks
from lockstep.step.finite import FiniteGradientCheck
from lockstep.step.gradients import ExactGradientSum, GradientSum
from lockstep.step.hooks import overrides
from lockstep.step.loop import StepLoop
from lockstep.step.memory import MIB, Memory
from lockstep.step.strategies import make_strategy
from project.models import ImageClassifier

# Keys of the front page that do nothing where a module's constructor does not take what they make.
OFFERED = dict.fromkeys(("lr", "lr_scaling", "reference_batch_size"), "lr") | {
    "optimizer": "optimizer",
    "scheduler": "scheduler",
}
# Hooks of a LightningModule for which steps made of pieces have no place.
REFUSED = {
    **dict.fromkeys(
        ("on_before_batch_transfer", "transfer_batch_to_device"),
        "would see a whole step instead of a batch; on_after_batch_transfer gets each piece's",
    ),
    **dict.fromkeys(
        ("train_dataloader", "val_dataloader", "test_dataloader"), "would not be asked; data=... is trained on"
    ),
    "on_after_backward": "would see the gradient of a piece; on_before_optimizer_step sees the step's",
}


def total_steps(config: Config, samples: int) -> int:
    """Optimizer steps of the whole run; of an evaluation, which has no schedule, as many as any warm-up has."""
    if config.checkpoint is not None:
        return sys.maxsize
    steps = config.max_epochs * DataOrder(samples, config.batch_size, config.layout.pieces, config.seed).steps_per_epoch
    return min(steps, config.max_steps or steps)


@patient()
def make_module(config: Config, splits: Splits) -> pl.LightningModule:
    """The LightningModule that the config names, with weights that follow from the seed alone. Where a checkpoint is
    going to bring them, pretrained ones are not asked for."""
    held = (config.checkpoint or config.resume) and config.model.get("pretrained") is True
    module = _module(config, splits, {**config.model, "pretrained": False} if held else config.model)
    if held and not module.strict_loading:  # its checkpoints may lack some
        module = _module(config, splits, config.model)
    return module


def _module(config: Config, splits: Splits, options: dict[str, Any]) -> pl.LightningModule:
    pl.seed_everything(config.seed, workers=False, verbose=False)
    spec = splits.spec
    wanted = {OFFERED[key.partition(".")[0]]: key for key in config.given if key.partition(".")[0] in OFFERED}
    module = build(
        "model",
        options,
        wanted,
        channels=spec.channels,
        image_size=spec.image_size,
        num_classes=len(spec.classes),
        lr=config.step_lr,
        optimizer=config.optimizer,
        scheduler=config.scheduler,
        total_steps=total_steps(config, len(splits.train)),
    )
    named = f"model._target_={config.model['_target_']}"
    if not isinstance(module, pl.LightningModule):
        raise Refusal(
            f"{named}: not a LightningModule; a network becomes one as the net of "
            "model._target_=project.models.ImageClassifier: docs/own.md"
        )
    for hook, why in REFUSED.items():
        if overrides(module, hook, pl.LightningModule):
            raise Refusal(f"{named}: its {hook} {why}")
    if not module.automatic_optimization:
        raise Refusal(f"{named}: with manual optimization a step can't be cut in pieces")
    for name, given in wanted.items():
        if _unused(module, name):
            raise Refusal(
                f"{given}: the configure_optimizers of {config.model['_target_']} does not use self.{name}, so this "
                "would change nothing; leave it out"
            )
    if odd := [name for name, value in module.hparams.items() if not is_plain(value)]:
        held = ", ".join(f"{name} ({type(module.hparams[name]).__name__})" for name in odd)
        raise Refusal(
            f"{named}: its hyperparameters hold {held}, and a checkpoint holds plain data only: "
            f"save_hyperparameters(ignore={json.dumps(odd)})"
        )
    module.configure_optimizers = partial(_one_optimizer, module.configure_optimizers)  # type: ignore[method-assign]
    module.configure_model()  # what it makes must be there for a checkpoint, a memory format and a compiler
    if config.precision == "64-true":
        module.double()  # now: a checkpoint is loaded before Lightning converts, and would be rounded to float32
    fast.memory_format(module, config.memory_format)
    return module


def _unused(module: pl.LightningModule, name: str) -> bool:
    """Whether a classifier makes its optimizer itself, and no method of its own names this attribute, or hands the work
    on to `ImageClassifier`."""
    if not isinstance(module, ImageClassifier) or not overrides(module, "configure_optimizers", ImageClassifier):
        return False
    classes = type(module).__mro__
    methods = [
        inspect.unwrap(method)
        for owner in classes[: classes.index(ImageClassifier)]
        for method in vars(owner).values()
        if inspect.isfunction(method)
    ]
    mentioned = {mention for method in methods for mention in method.__code__.co_names}
    return mentioned.isdisjoint({name, "hparams", "configure_optimizers"})


def _one_optimizer(configure: Callable[[], Any]) -> Any:
    """What a module's own `configure_optimizers` returns. Lightning would train nothing without an optimizer, and of
    several advise to step them by hand."""
    found = configure()
    optimizers = list(found) if isinstance(found, list | tuple) else [] if found is None else [found]
    if len(optimizers) == 2 and isinstance(optimizers[0], list):  # and schedules
        optimizers = optimizers[0]
    if (number := len(optimizers)) != 1:
        raise Refusal(
            f"configure_optimizers returned {number or 'no'} optimizer{'s' * (number != 1)}: a step has one; "
            "what is trained otherwise is a parameter group of it, what is not trained is frozen by "
            "requires_grad_(False)"
        )
    return found


def make_data(config: Config, splits: Splits, rank: int) -> DataModule:
    """The DataModule of one worker."""
    trains = config.checkpoint is None
    data = DataModule(splits, config.layout, config.seed, config.num_workers, config.resident, _budget(config), trains)
    data.process = rank
    return data


def make_trial(config: Config, splits: Splits, folder: Path, steps: int) -> tuple[pl.Trainer, DataModule]:
    """What a worker measures a run's first steps with: nothing is validated, saved or shown, and no process loads."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    logs.configure(folder, rank)  # should the user's own code fail
    fast.set_up(config.layout, config.threads, config.allocator)
    data = make_data(replace(config, num_workers=0), splits, rank)
    trainer = make_trainer(replace(config, max_steps=steps, logger={}, val_every=None), folder, [])
    trainer.loggers = [DummyLogger()]  # for a module that draws by itself
    trainer.limit_val_batches = 0
    return trainer, data


def compile_module(config: Config, module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """What `compile` asks for, before the trainer's fit."""
    if config.compile:
        compile_networks(module, config.compile, config.exact)
        loop: Any = trainer.fit_loop.epoch_loop
        loop.automatic_optimization.graphs = config.compile in GRAPHS


def make_callbacks(config: Config, splits: Splits, folder: Path, module: pl.LightningModule) -> list[pl.Callback]:
    """The callbacks that the config names. Lightning adds the module's own, which are checked here too."""
    recorded = {"config": config.raw, "fingerprint": splits.fingerprint, "versions": versions()}
    recorded["precision"] = config.precision  # the config may say auto
    recorded["spec"] = asdict(splits.spec)  # with it, the model can be used where the data set is not
    offers = {
        "folder": folder,
        "every": config.checkpoint_every,
        "log_every": config.log_every,
        "record": recorded,
        "config": config.raw,
        "headline": describe(config, splits, total_steps(config, len(splits.train)), folder),
        "started": environment().started,
    }
    named = config.callbacks.items()
    made = {f"callbacks.{name}": build(f"callbacks.{name}", options, **offers) for name, options in named if options}
    brought = module.configure_callbacks()
    own = brought if isinstance(brought, Sequence) else [brought]
    for name, callback in [*made.items(), *((f"model._target_={config.model['_target_']}", each) for each in own)]:
        if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
            raise Refusal(
                f"{name}: {type(callback).__name__} changes how many batches make a step, which is the "
                "layout's: accumulate_grad_batches; of averages, EMAWeightAveraging leaves it alone"
            )
    return list(made.values())


def make_loggers(config: Config, folder: Path, step: int) -> list[Logger]:
    """The run's loggers, inside its folder; `step` optimizer steps are logged already."""
    if "_target_" in config.logger:
        own = build("logger", config.logger, folder=folder, save_dir=folder)
        return [_with_rows(own, step) if isinstance(own, CSVLogger) else own]
    name = config.logger.get("name", "none")
    if name == "tensorboard":
        # Hides what a killed run logged after its last checkpoint. At the first start too: of the starts that it finds,
        # TensorBoard takes only those after the first for a restart.
        return [TensorBoardLogger(folder, name="", version="tensorboard", default_hp_metric=False, purge_step=step + 1)]
    if name == "csv":
        return [_with_rows(CSVLogger(folder, name="", version="csv"), step)]
    return []


def _with_rows(logger: CSVLogger, step: int) -> CSVLogger:
    """Lightning's, which would remove the rows of the run that goes on: those of its `step` steps stay."""
    if step and environment().rank == 0:
        path = Path(logger.log_dir, "metrics.csv")
        before = path.with_name("metrics.before.csv")  # a run that is killed in here finds its rows there the next time
        if path.exists() and not before.exists():
            path.rename(before)
        if before.exists():
            with open(before, newline="") as file:
                rows = [row for row in csv.DictReader(file) if (row["step"] or "").isdigit()]
            logger.experiment.metrics = [row for row in rows if int(row["step"]) <= step]
            logger.save()
            before.unlink()
    return logger


def make_trainer(config: Config, folder: Path, callbacks: list[pl.Callback], step: int = 0) -> pl.Trainer:
    """Lightning's Trainer on the config's layout, with steps made of pieces; a resumed run has made `step` of them."""
    layout = config.layout
    trainer = pl.Trainer(
        accelerator=layout.accelerator,
        strategy=make_strategy(layout, config.strategy),
        devices=layout.devices if layout.strategy == "ddp" else 1,
        num_nodes=layout.num_nodes,
        precision=cast(Any, config.precision),
        max_epochs=config.max_epochs,
        max_steps=config.max_steps or -1,
        gradient_clip_val=config.gradient_clip_val,
        val_check_interval=config.val_every,
        check_val_every_n_epoch=None if config.val_every else 1,
        log_every_n_steps=config.log_every,
        logger=make_loggers(config, folder, step),
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        deterministic=True if layout.exact and layout.accelerator == "gpu" else None,
        **config.debug["trainer"],
    )
    # one piece has no order to depend on
    auto = config.accumulate_grad_batches == "auto"
    gradients = (ExactGradientSum if layout.exact and layout.pieces > 1 else GradientSum)(
        trainer.strategy, layout.world_size, late=auto
    )
    trainer.fit_loop.epoch_loop = StepLoop(
        trainer,
        gradients,
        FiniteGradientCheck(config.nonfinite, layout.world_size),
        config.seed,
        Memory(layout.world_size, _budget(config), repeats=auto and not layout.exact),
    )
    return trainer


def _budget(config: Config) -> float | None:
    """`memory_budget` in bytes."""
    return None if config.memory_budget is None else config.memory_budget * MIB
