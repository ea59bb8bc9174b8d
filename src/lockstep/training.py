"""What a worker does: builds module, data and Trainer from a checked config, fits, tests, and says how it went."""

from __future__ import annotations

import errno
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch.utils.data import Subset

from lockstep import checkpoint_io, fast, logs, provenance
from lockstep.callbacks import Agreement, Checkpoint, FoundPieces, Heartbeat, Preemption, StandIn
from lockstep.callbacks.found_pieces import kept
from lockstep.callbacks.pruning import Pruned, pruning
from lockstep.checkpoint_io import AtomicCheckpointIO, CheckpointError
from lockstep.compiled import GRAPHS, compile_networks
from lockstep.config import Config
from lockstep.data import DataModule, Splits
from lockstep.gradients import ExactGradientSum, GradientSum
from lockstep.launch import STARTED, Interrupted, restart_count
from lockstep.layout import Refusal, counted
from lockstep.loop import StepLoop
from lockstep.memory import MIB, Memory
from lockstep.nonfinite import Watch
from lockstep.plan import Plan
from lockstep.resume import differences, must_fit
from lockstep.strategies import make_strategy
from lockstep.summary import git_info, versions, weights_sha256, write_summary
from lockstep.targets import build

LOG = logging.getLogger("lockstep")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def total_steps(config: Config, samples: int) -> int:
    """Optimizer steps of the whole run."""
    steps = config.max_epochs * Plan(samples, config.batch_size, config.layout.pieces, config.seed).steps_per_epoch
    return min(steps, config.max_steps or steps)


def as_launched(config: Config) -> Config:
    """The config with the number of machines that take part; under `elastic` these may be fewer than asked for."""
    if not config.elastic or config.layout.strategy != "ddp":
        return config
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", config.layout.num_nodes))
    return replace(config, layout=replace(config.layout, num_nodes=nodes))


def make_module(config: Config, splits: Splits) -> pl.LightningModule:
    """The LightningModule that the config names, with weights that follow from the seed alone."""
    pl.seed_everything(config.seed, workers=False, verbose=False)
    spec = splits.spec
    module = build(
        "model",
        config.model,
        channels=spec.channels,
        image_size=spec.image_size,
        num_classes=len(spec.classes),
        lr=config.step_lr,
        optimizer=config.optimizer,
        scheduler=config.scheduler,
        total_steps=total_steps(config, len(splits.train)),
    )
    if not isinstance(module, pl.LightningModule):
        raise Refusal(f"model._target_={config.model['_target_']}: not a LightningModule")
    if not module.automatic_optimization:
        raise Refusal(
            f"model._target_={config.model['_target_']}: with manual optimization a step can't be cut in pieces"
        )
    if config.precision == "64-true":
        module.double()  # now: a checkpoint is loaded before Lightning converts, and would be rounded to float32
    fast.memory_format(module, config.memory_format)
    return module


def make_data(config: Config, splits: Splits, rank: int) -> DataModule:
    """The DataModule of one worker."""
    budget = None if config.memory_budget is None else config.memory_budget * MIB
    data = DataModule(splits, config.layout, config.seed, config.num_workers, config.resident, budget)
    data.process = rank
    return data


def compile_module(config: Config, module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """What `compile` asks for, before the trainer's fit."""
    if config.compile:
        compile_networks(module, config.compile, config.exact)
        loop: Any = trainer.fit_loop.epoch_loop
        loop.automatic_optimization.graphs = config.compile in GRAPHS


def make_loggers(config: Config, folder: Path, step: int) -> list[Logger]:
    """The run's loggers, inside its folder; `step` optimizer steps are logged already."""
    name = config.logger.get("name", "none")
    if name == "tensorboard":
        # Hides what a killed run logged after its last checkpoint. At the first start too: of the starts that it finds,
        # TensorBoard takes only those after the first for a restart.
        return [TensorBoardLogger(folder, name="", version="tensorboard", default_hp_metric=False, purge_step=step + 1)]
    if name == "csv":
        return [CSVLogger(folder, name="", version="csv")]
    return []


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
        **config.debug.get("trainer", {}),
    )
    # one piece has no order to depend on
    auto = config.accumulate_grad_batches == "auto"
    gradients = (ExactGradientSum if layout.exact and layout.pieces > 1 else GradientSum)(
        trainer.strategy, layout.processes, late=auto
    )
    budget = None if config.memory_budget is None else config.memory_budget * MIB
    trainer.fit_loop.epoch_loop = StepLoop(
        trainer,
        gradients,
        Watch(config.nonfinite, layout.processes),
        config.seed,
        Memory(layout.processes, budget, repeats=auto and not layout.exact),
    )
    return trainer


def first_batch(config: Config, train: Any) -> Any:
    """The run's first batch as a training set of its own: every step then has these samples, whatever the position."""
    plan = Plan(len(train), config.batch_size, config.layout.pieces, config.seed)
    return Subset(train, plan.step(0, 0))  # type: ignore[arg-type]


def describe(config: Config, splits: Splits, steps: int, folder: Path, chosen: str = "") -> str:
    """The start-up line, with what was `chosen` for speed."""
    plan = Plan(len(splits.train), config.batch_size, config.layout.pieces, config.seed)
    exact = ", exact" if config.exact else ""
    auto = config.accumulate_grad_batches == "auto"
    found = f", accumulate_grad_batches={config.layout.accumulate} is the least that fits" if auto else ""
    scaled = (
        f" ({config.lr_scaling} from {config.lr:g} at {config.reference_batch_size})"
        if config.lr_scaling != "none"
        else ""
    )
    shown = os.path.relpath(folder)
    where = shown if not shown.startswith("..") else folder
    epoch = f"{counted(plan.steps_per_epoch, 'step')} per epoch, {steps} in all"
    return (
        f"{config.layout.describe()}{found}{exact} | {epoch} | "
        f"lr {config.step_lr:g}{scaled} | {f'{chosen} | ' * bool(chosen)}{where}"
    )


def train(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Fits and tests in this worker; returns the run's summary. Every worker of the layout calls it."""
    started = time.perf_counter()
    rank = int(os.environ.get("RANK", "0"))
    config = as_launched(config)
    logs.configure(folder, rank)
    if config.batch_size > len(splits.train):
        there = counted(len(splits.train), "sample")
        raise Refusal(f"batch_size={config.batch_size}: a step has {there} at most, as many as the training set")
    fast.set_up(config.layout, config.threads, config.allocator)
    if config.debug.get("one_batch"):
        splits = replace(splits, train=first_batch(config, splits.train))
    module = make_module(config, splits)
    checkpoint = _checkpoint_to_resume(config, folder)
    resumed = checkpoint_io.load(checkpoint) if checkpoint else {}
    config = replace(config, layout=kept(config, resumed) or config.layout)
    data = make_data(config, splits, rank)
    callbacks = [StandIn(), Heartbeat(), Agreement(), *make_callbacks(config, splits, folder)]
    callbacks += [*pruning(), Preemption(folder)]
    if config.accumulate_grad_batches == "auto":
        callbacks.append(FoundPieces(data))
    if checkpoint:
        must_fit(checkpoint, resumed, module.state_dict(), config.optimizer)
    trainer = make_trainer(config, folder, callbacks, resumed.get("global_step", 0))
    compile_module(config, module, trainer)
    if rank == 0:
        provenance.record(config, splits.fingerprint, folder)
        LOG.info(describe(config, splits, total_steps(config, len(splits.train)), folder, fast.describe(module)))
        for message in _resumption(config, splits, resumed):
            LOG.info(message)
    run = Run(config, splits, folder, trainer, module, started)
    run.metrics.update(resumed.get("lockstep", {}).get("metrics", {}))  # where nothing is left to train
    del resumed
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        run.fitted()
        best = _best(callbacks)
        if splits.test is not None:
            trainer.test(module, datamodule=data, ckpt_path=best, verbose=False)
            run.metrics.update(_numbers(trainer))
    except Interrupted as interrupted:
        run.fitted()
        run.finish("interrupted", str(interrupted))
        raise
    except Pruned as pruned:
        run.fitted()
        return run.finish("pruned", str(pruned))
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            error.filename = str(folder)  # TensorBoard's, which name no file
        logging.root.error("the run failed", exc_info=error)
        with suppress(OSError):  # a full disk, say
            run.finish("failed", f"{type(error).__name__}: {error}")
        raise
    return run.finish("completed", None)


def make_callbacks(config: Config, splits: Splits, folder: Path) -> list[pl.Callback]:
    """The callbacks that the config names."""
    recorded = {"config": config.raw, "fingerprint": splits.fingerprint, "versions": versions()}
    recorded["spec"] = asdict(splits.spec)  # with it, the model can be used where the data set is not
    offers = {
        "folder": folder,
        "every": config.checkpoint_every,
        "log_every": config.log_every,
        "record": recorded,
        "config": config.raw,
        "headline": describe(config, splits, total_steps(config, len(splits.train)), folder),
        "started": float(os.environ.get(STARTED, time.time())),
    }
    return [build(f"callbacks.{name}", options, **offers) for name, options in config.callbacks.items() if options]


def _checkpoint_to_resume(config: Config, folder: Path) -> str | None:
    """What `resume` names; but a group that was restarted goes on from what it has saved since."""
    for name in ("last.ckpt", "best.ckpt") if restart_count() else ():
        path = folder / "checkpoints" / name
        try:
            checkpoint_io.load(path)
            return str(path)
        except CheckpointError as error:
            LOG.warning("%s; trying what is older", error)
    return config.resume


def _resumption(config: Config, splits: Splits, resumed: dict[str, Any]) -> list[str]:
    """What a user should know about the run that goes on."""
    if not resumed:
        return []
    recorded = resumed.get("lockstep", {})
    messages = [f"resumes after step {resumed['global_step']}"]
    changed = [
        change for change in differences(recorded.get("config", {}), config.raw) if not change.startswith("resume:")
    ]
    if changed:
        messages.append("changed since the checkpoint: " + ", ".join(changed))
    if recorded.get("fingerprint") != splits.fingerprint:
        messages.append("the data set is not the one that the checkpoint was trained on")
    return messages


def _best(callbacks: list[pl.Callback]) -> str | None:
    paths = [path for callback in callbacks if (path := getattr(callback, "best_path", None))]
    return str(paths[0]) if paths else None


def _numbers(trainer: pl.Trainer) -> dict[str, float]:
    """What was logged, as plain numbers; counts are whole."""
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: int(value) if name.endswith(("/correct", "/count")) else value for name, value in found.items()}


class Run:
    """The account of a run, from which rank zero writes summary.json."""

    def __init__(
        self,
        config: Config,
        splits: Splits,
        folder: Path,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        started: float,
    ) -> None:
        self.config, self.splits, self.folder, self.trainer, self.module, self.started = (
            config,
            splits,
            folder,
            trainer,
            module,
            started,
        )
        self.metrics: dict[str, float] = {}
        self.sha: str | None = None

    def fitted(self) -> None:
        """Takes down what testing would overwrite."""
        self.metrics.update(_numbers(self.trainer))
        self.sha = weights_sha256(self.trainer.strategy.lightning_module_state_dict())
        layout = self.trainer.datamodule.layout  # type: ignore[attr-defined]
        self.config = replace(self.config, layout=layout)  # memory may have run out in mid-training

    def finish(self, status: str, error: str | None) -> dict[str, Any]:
        """Writes the summary and returns it."""
        summary = summarise(self.config, self.folder, status, error)
        trainer = self.trainer
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        throughput = next((c for c in callbacks if hasattr(c, "samples_per_second")), None)
        checkpoint = next((c for c in callbacks if isinstance(c, Checkpoint)), None)
        summary |= {
            **progress(self.config, len(self.splits.train), trainer.global_step),
            "epochs": trainer.current_epoch,
            "metrics": self.metrics,
            "throughput": {
                "samples_per_second": getattr(throughput, "samples_per_second", None),
                "seconds_to_first_step": getattr(throughput, "seconds_to_first_step", None),
                "seconds_saving": getattr(checkpoint, "seconds", None),
                "seconds": time.perf_counter() - self.started,
            },
            "weights_sha256": self.sha,
        }
        if trainer.is_global_zero:
            write_summary(self.folder / "summary.json", summary)
        return summary


def progress(config: Config, samples: int, steps: int) -> dict[str, int]:
    """A summary's account of `steps` optimizer steps on `samples` training samples."""
    plan = Plan(samples, config.batch_size, config.layout.pieces, config.seed)
    epochs, step = plan.position(steps)
    return {"steps": steps, "epochs": epochs, "samples_seen": epochs * samples + step * config.batch_size}


def summarise(config: Config, folder: Path, status: str, error: str | None) -> dict[str, Any]:
    """The part of a summary that is known without a worker; the rest is empty."""
    layout = config.layout
    checkpoints = {name: folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")}
    found = {name: str(path.relative_to(folder)) if path.exists() else None for name, path in checkpoints.items()}
    return {
        "status": status,
        "error": error,
        "name": config.name,
        "model": config.model.get("name"),
        "data": config.data.get("name"),
        "seed": config.seed,
        "layout": {
            "strategy": layout.strategy,
            "accelerator": layout.accelerator,
            "devices": layout.devices,
            "num_nodes": layout.num_nodes,
            "accumulate_grad_batches": layout.accumulate,
            "pieces": layout.pieces,
            "piece_size": layout.piece_size,
            "batch_size": layout.batch_size,
            "exact": layout.exact,
        },
        "steps": 0,
        "epochs": 0,
        "samples_seen": 0,
        "metrics": {},
        "throughput": {"samples_per_second": None, "seconds_to_first_step": None, "seconds": None},
        "weights_sha256": None,
        "best_checkpoint": found["best"],
        "last_checkpoint": found["last"],
        "restarts": restart_count(),
        "versions": versions(),
        "git": git_info(),
    }
