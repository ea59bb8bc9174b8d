"""Callbacks: when a checkpoint is written, which one is the best, and what it has beside Lightning's state."""

import difflib
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.callbacks import EarlyStopping

from lockstep.checkpoint import paths
from lockstep.checkpoint.io import step_of, weights_in_use
from lockstep.config.metrics import best_value, direction_of_name, resolve_mode
from lockstep.errors import UserError
from lockstep.files import link_file
from lockstep.step.lightning_quirks import validation_or_epoch_end_follows
from lockstep.step.timing import exclude_from_timing

log = logging.getLogger("lockstep")
LENGTH = ("callbacks", "debug", "max_epochs", "max_steps")  # if one of them has changed, a stopped run trains further
# What a ReduceLROnPlateau keeps when its settings change. warmup_done: of one with a warm-up, its steps so far
PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "warmup_done")


class Checkpoint(LightningCheckpoint):
    """Writes `last.ckpt` and `best.ckpt`.

    `last.ckpt` is written every `every` optimizer steps and at each epoch's end, after validation. `best.ckpt` is the
    same file under another name, whenever the monitored metric improves. The Trainer's plugin `AtomicCheckpointIO`
    writes both atomically while training continues. Nothing is saved inside a step, because a checkpoint has no partly
    accumulated gradient.

    Args:
        folder: the run folder; the files go to its `checkpoints/`.
        every: optimizer steps between checkpoints; None: only at an epoch's end.
        monitor: the logged metric that selects the best checkpoint; None: no best checkpoint.
        mode: `max` or `min`; None: it follows from the metric's name.

    Attributes:
        monitor: the argument.
        mode: `max` or `min`; None without a metric.
        best_score: the monitored metric of the best checkpoint; None without one.
        saved: the step after which `last.ckpt` was last written; -1: never.
    """

    changes_weights = False  # so the record of settings that affect the weights leaves this callback out
    # What Lightning's ModelCheckpoint has with these settings.
    save_top_k, save_last, save_weights_only, save_on_exception = 1, True, False, False
    filename, auto_insert_metric_name, verbose = None, True, False
    current_score: torch.Tensor | None = None

    def __init__(
        self,
        folder: str | Path,
        every: int | None = None,
        monitor: str | None = "val/acc",
        mode: str | None = None,
    ) -> None:
        if monitor is not None:
            mode = resolve_mode("callbacks.checkpoint.monitor", monitor, mode, "callbacks.checkpoint.mode")
        self.best_score: float | None = None
        self.saved = -1
        self.use_folder(Path(folder))
        self._every = every
        self.monitor = monitor
        self.mode = mode
        self._best_step = -1
        self._validated = -1  # the step of the last validation
        self._by_validation = (monitor or "").startswith("val")  # whether validation logs it: `val/acc` or `val_acc`
        self._due = False

    def use_folder(self, folder: Path) -> None:
        """Write into another run folder from now on."""
        self._last, self._best = paths.last(folder), paths.best(folder)

    @property
    def best(self) -> str:
        """The best score and its step, as in `val/acc 0.9912 at step 420`; empty without a best checkpoint."""
        if self.best_score is None or not self._best.exists():
            return ""
        best = "largest" if self.mode == "max" else "smallest"
        return f"{best} {self.monitor} {self.best_score:.4f} at step {self._best_step}"

    @property
    def best_path(self) -> Path | None:
        """The path of the best checkpoint; None without one."""
        return self._best if self.best_score is not None and self._best.exists() else None

    @property
    def best_target(self) -> Path:
        """The path to which the best checkpoint is written."""
        return self._best

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint, else of the last one, under the name of Lightning's ModelCheckpoint."""
        path = self.best_path or self._last
        return str(path) if path.exists() else ""

    @property
    def last_model_path(self) -> str:
        """The path of the last checkpoint; empty without one. This and what follows is as in Lightning."""
        return str(self._last) if self._last.exists() else ""

    @property
    def dirpath(self) -> str:
        """The folder of the checkpoints."""
        return str(self._last.parent)

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The monitored metric of the best checkpoint; None without one."""
        return None if self.best_score is None else torch.tensor(self.best_score)

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """The best checkpoint's score by its path; empty without one."""
        score = self.best_model_score
        return {} if score is None or self.best_path is None else {str(self.best_path): score}

    @property
    def kth_best_model_path(self) -> str:
        """The path of the best checkpoint, since one is kept; empty without one."""
        return next(iter(self.best_k_models), "")

    def save(self, trainer: Trainer) -> None:
        """Write `last.ckpt` now. All ranks must call it, between two optimizer steps."""
        with exclude_from_timing(trainer):
            trainer.save_checkpoint(self._last, weights_only=False)
        self.saved = trainer.global_step

    # --- hooks ---

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.best_score is None:
            return
        # The run may have been killed after it saved its best weights and before `best.ckpt` had that file.
        source, step = weights_in_use(trainer)
        if _writes(trainer):
            if source is not None and step == self._best_step and Path(source).exists():
                link_file(source, self._best)
            # The run may continue from a step before its best one, which is then of steps that do not count.
            # Or its file is damaged.
            elif step_of(self._best) != self._best_step:
                self._best.unlink(missing_ok=True)
                if (copy := paths.step_path(self._best.parent, self._best_step)).exists():
                    link_file(copy, self._best)
        if not trainer.strategy.broadcast(self._best.exists()):  # a score without its file is useless
            log.warning("%s is missing beside %s: the next best checkpoint replaces it", self._best.name, source)
            self.best_score, self._best_step = None, -1

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._due = self._every is not None and trainer.global_step % self._every == 0
        if self._due and not validation_or_epoch_end_follows(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._validated = trainer.global_step
        # At an epoch's end, on_train_epoch_end saves: one file is enough, and it also has the epoch's metrics.
        if not trainer.is_last_batch:
            self._save_if_due(trainer, due=self._due)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_if_due(trainer, due=True)  # save before the check below, so that a refused run can be resumed
        names, expected = sorted(trainer.callback_metrics), self._validated >= 0 or not self._by_validation
        if self.monitor is not None and expected and self.monitor not in names:
            raise UserError(unlogged_metric_message("callbacks.checkpoint.monitor", self.monitor, names, has_mode=True))

    def state_dict(self) -> dict[str, Any]:
        best = {"best_score": self.best_score, "best_step": self._best_step}
        return {"monitor": self.monitor, "mode": self.mode, **best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (state_dict["monitor"], state_dict["mode"]) == (self.monitor, self.mode):  # otherwise scores differ in kind
            self.best_score, self._best_step = state_dict["best_score"], state_dict["best_step"]

    # --- the best ---

    def _save_if_due(self, trainer: Any, due: bool) -> None:
        """Save if a checkpoint is due, or if the monitored metric has improved."""
        # `callback_metrics` may hold the value of an earlier validation. Ignore it unless validation ran at this step.
        validated_now = self._validated == trainer.global_step or not self._by_validation
        improved = validated_now and self._improved(trainer)
        trainer.fit_loop.epoch_loop.follow_metrics()
        if improved or due:
            self.save(trainer)
        if improved and _writes(trainer):
            trainer.strategy.checkpoint_io.link_checkpoint(self._last, self._best)

    def _improved(self, trainer: Trainer) -> bool:
        """Check whether the monitored metric is the best so far. If it is, store it as the new best score."""
        if self.monitor is None:
            return False
        metric = trainer.callback_metrics.get(self.monitor)
        # Rank zero decides: a metric that a module did not reduce differs between ranks, a rank without a sample may
        # lack it, and saving is collective.
        score = trainer.strategy.broadcast(None if metric is None else float(torch.as_tensor(metric)))
        if score is None:
            return False
        self.current_score = torch.tensor(score)
        # An equal score is an improvement: with few validation samples, the highest score often comes early by chance.
        best = score if self.best_score is None else self.best_score
        if math.isnan(score) or (score < best if self.mode == "max" else score > best):
            return False
        self.best_score, self._best_step = score, trainer.global_step
        return True


def _writes(trainer: Any) -> bool:
    """Check whether this rank writes the run's checkpoints, or copies of them."""
    return bool(trainer.is_global_zero or getattr(trainer.strategy.checkpoint_io, "keeps_copies", False))


def unlogged_metric_message(key: str, metric: str, logged: Iterable[str], has_mode: bool = False) -> str:
    """Return the message for a metric that nothing logs: which metrics are logged, and what to give instead.

    Args:
        key: the config key that names the metric.
        has_mode: whether the key has a `mode` beside it.
    """
    names = sorted(logged)
    message = f"{key}={metric}: nothing logs it; logged: {', '.join(names) or 'nothing'}"
    same_stage = [name for name in names if name.startswith("val") == metric.startswith("val")]
    known = [name for name in same_stage if direction_of_name(name)]
    near = [*difflib.get_close_matches(metric, same_stage, n=1, cutoff=0.85), *known, *same_stage]
    if not near:
        otherwise = f", or give {key}=null" if key == "callbacks.checkpoint.monitor" else ""
        return f"{message}; call self.log({metric!r}, ...) in the module{otherwise}"
    message += f"; give {key}={near[0]}"
    if has_mode:
        mode = direction_of_name(near[0])
        message += f" {key.removesuffix('monitor')}mode={mode or 'max or min'}"
        message += f" ({best_value(mode)})" if mode else ""
    return message


class ResumeState(Callback):
    """Saves and restores what Lightning does not save in a checkpoint, and what a resumed run needs.

    This is a record of the run, whether a callback (such as EarlyStopping) has stopped training, and which parameters
    it has (un)frozen.

    New settings of the optimizer, the schedule or EarlyStopping's patience take precedence over the checkpoint's. The
    optimizer keeps its state, such as momentum. A new schedule starts at its value for the checkpoint's step.

    Args:
        record: the entry `lockstep` of each checkpoint, without metrics; see `lockstep.report.provenance`.
        settings: plain settings of the module's optimizer and schedule; see `lockstep.job.optimizers.settings`.
        steps_per_epoch: optimizer steps of an epoch.
    """

    def __init__(self, record: Mapping[str, Any], settings: dict[str, Any], steps_per_epoch: int) -> None:
        self.record = record
        self.settings = settings
        self.steps_per_epoch = steps_per_epoch
        self._loaded: dict[str, Any] = {}  # the checkpoint; Lightning restores loops and optimizers after on_fit_start
        self.length = {key: record["config"].get(key) for key in LENGTH}
        self._trained: dict[str, bool] = {}  # requires_grad at the start of the run, by parameter name
        self.fits = 1  # how many times `trainer.fit` was called

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trained = _trained(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        metrics = {name: torch.as_tensor(value).item() for name, value in trainer.callback_metrics.items()}
        checkpoint["lockstep"] = {**self.record, "metrics": metrics}
        changed = {name: now for name, now in _trained(pl_module).items() if now != self._trained.get(name)}
        checkpoint["continuation"] = {
            "stopped": trainer.should_stop,
            "length": self.length,
            "trained": changed,
            "settings": self.settings,
            **({"fits": self.fits} if self.fits > 1 else {}),
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            saved = checkpoint["continuation"]
            same_length = all(self.length.get(key) == value for key, value in saved["length"].items())
            trainer.should_stop = saved["stopped"] and same_length
            self._loaded = checkpoint
            for callback in trainer.callbacks:
                if isinstance(callback, EarlyStopping) and callback.state_key in checkpoint["callbacks"]:
                    checkpoint["callbacks"][callback.state_key]["patience"] = callback.patience

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._loaded:
            return
        saved = self._loaded["continuation"]
        for name, trained in saved["trained"].items():  # the optimizer exists already, with the original parameters
            pl_module.get_parameter(name).requires_grad_(trained)
        if saved["settings"] != self.settings:
            self._apply_new_settings(trainer, saved["settings"])
        self._loaded = {}

    def _apply_new_settings(self, trainer: Any, before: dict[str, Any]) -> None:
        """Write the new settings into the loaded checkpoint, before Lightning restores it."""
        configs, states = trainer.lr_scheduler_configs, []
        for config, state in zip(configs, [*self._loaded["lr_schedulers"], {}], strict=False):
            new = config.scheduler.state_dict()
            if config.reduce_on_plateau:
                new |= {name: state[name] for name in PLATEAU_STATE if name in state}
            else:
                steps = self._loaded["global_step"] // (self.steps_per_epoch if config.interval == "epoch" else 1)
                for _ in range(steps // config.frequency):
                    config.scheduler.step()  # this also sets the optimizer's learning rates
                new = config.scheduler.state_dict()
            states.append(new)
        self._loaded["lr_schedulers"] = states
        same_lr = _lr(before) == _lr(self.settings)
        unchanged_keys = (
            {"params", "lr"} if same_lr and any(config.reduce_on_plateau for config in configs) else {"params"}
        )
        for state, optimizer in zip(self._loaded["optimizer_states"], trainer.optimizers, strict=False):
            for old, new in zip(state["param_groups"], optimizer.param_groups, strict=False):
                old |= {name: value for name, value in new.items() if name not in unchanged_keys}


def _lr(settings: dict[str, Any]) -> Any:
    """Return the settings of the learning rate."""
    optimizer = settings.get("optimizer", settings)
    return optimizer.get("lr"), optimizer.get("lr_scale")


def _trained(module: LightningModule) -> dict[str, bool]:
    """Return whether each parameter is trained, by name."""
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}
