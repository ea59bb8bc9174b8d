"""Callbacks: when a checkpoint is written, which one is the best, and what it has beside Lightning's state."""

import difflib
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from lockstep.checkpoint import paths
from lockstep.checkpoint.io import step_of, weights_in_use
from lockstep.checkpoint.left_out import Attributes, LeftOut
from lockstep.config.metrics import MODE_OF, best_value, resolve_mode
from lockstep.errors import UserError
from lockstep.files import link_file
from lockstep.lightning.epochs import AfterStart
from lockstep.lightning.hooks import overrides_method
from lockstep.lightning.saves import SavesSteps
from lockstep.step.timing import exclude_from_timing
from lockstep.text import join_names

log = logging.getLogger("lockstep")
LENGTH = ("callbacks", "debug", "max_epochs", "max_steps")  # if one of them has changed, a stopped run trains further
# What a ReduceLROnPlateau keeps when its settings change
PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class Checkpoint(SavesSteps):
    """Writes `last.ckpt` and `best.ckpt`.

    `last.ckpt` is written every `every` optimizer steps and at each epoch's end, after validation. `best.ckpt` is the
    same file under another name, whenever the monitored metric improves. The Trainer's plugin `AtomicCheckpointIO`
    writes both atomically while training continues. Nothing is saved inside a step, because a checkpoint has no partly
    accumulated gradient.

    Args:
        folder: the run folder; the files go to its `checkpoints/`.
        every: optimizer steps between checkpoints; None: only at an epoch's end.
        monitor: the logged metric that selects the best checkpoint; None: no best checkpoint.
        mode: `max` or `min`; may be None for an accuracy and a loss as Lockstep's models log them (`MODE_OF`).

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

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validated = trainer.global_step

    def on_step_complete(self, trainer: Any, ends_epoch: bool) -> None:
        self._save_if_due(trainer, ends_epoch)  # before the check below, so that a refused run can be resumed
        if not ends_epoch:
            return
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

    def _save_if_due(self, trainer: Any, ends_epoch: bool) -> None:
        """Save if a checkpoint is due, or if the monitored metric has improved."""
        due = ends_epoch or (self._every is not None and trainer.global_step % self._every == 0)
        # `callback_metrics` may hold the value of an earlier validation. Ignore it unless validation ran at this step.
        validated_now = self._validated == trainer.global_step or (ends_epoch and not self._by_validation)
        improved = validated_now and self._improved(trainer)
        if not improved and not due:
            return
        trainer.fit_loop.epoch_loop.follow_metrics()
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
    known = [name for name in same_stage if name in MODE_OF]
    near = [*difflib.get_close_matches(metric, same_stage, n=1, cutoff=0.85), *known, *same_stage]
    if not near:
        otherwise = f", or give {key}=null" if key == "callbacks.checkpoint.monitor" else ""
        return f"{message}; call self.log({metric!r}, ...) in the module{otherwise}"
    message += f"; give {key}={near[0]}"
    if has_mode:
        mode = MODE_OF.get(near[0])
        message += f" {key.removesuffix('monitor')}mode={mode or 'max or min'}"
        message += f" ({best_value(mode)})" if mode else ""
    return message


class ResumeState(AfterStart):
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
        # what is trained when the run has started, after all that freezes then; None: the run has not started
        self._trained: dict[str, bool] | None = None
        self._restored: dict[str, bool] = {}  # what differed from that when the checkpoint was saved
        self._groups: Any = None  # the optimizers' parameters when the run starts; see `_groups`
        self._left_out: LeftOut | None = None
        self._attributes: Attributes | None = None
        # Contents of attributes when the checkpoint was saved, and before the first epoch's hooks; see `_name_lost`
        self._lost: tuple[dict[str, str], dict[str, str]] | None = None
        self.fits = 1  # how many times `trainer.fit` was called

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        metrics = {name: torch.as_tensor(value).item() for name, value in trainer.callback_metrics.items()}
        checkpoint["lockstep"] = {**self.record, "metrics": metrics}
        saves = getattr(trainer, "saves", None)
        in_evaluation = trainer.evaluating and (saves is None or saves.under_way)  # then all layers evaluate
        incomplete = saves is not None and saves.incomplete
        # A module may have changed the others when this run continued inside an epoch.
        started = {} if self._trained is None else self._trained
        changed = {
            name: now
            for name, now in _trained(pl_module, modes=not in_evaluation).items()
            if now != started.get(name, now) or name in self._restored
        }
        groups = _groups(trainer, pl_module)
        left_out = self._left_out.state(pl_module, checkpoint["state_dict"]) if self._left_out else {}
        attributes = self._attributes.changed() if self._attributes else {}
        checkpoint["continuation"] = {
            "stopped": trainer.should_stop,
            "length": self.length,
            "trained": changed,
            "settings": self.settings,
            **({"fits": self.fits} if self.fits > 1 else {}),
            **({"left_out": left_out} if left_out else {}),
            **({"attributes": attributes} if attributes else {}),
            **({"incomplete": True} if incomplete else {}),
            **({"groups": groups} if groups and groups != self._groups else {}),
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
        self._trained, self._restored, self._lost = None, {}, None
        self._attributes = Attributes(pl_module, trainer.callbacks)  # type: ignore[attr-defined]
        state = pl_module.state_dict()
        self._left_out = LeftOut(pl_module, state, trainer.strategy)
        self._groups = _groups(trainer, pl_module)
        if not self._loaded:
            return
        self._restore_left_out(trainer, pl_module, state)
        saved = self._loaded["continuation"]
        if saved.get("incomplete"):
            message = "the checkpoint was saved after an error inside a step, so it lacks a part of this step"
            if self._exact:
                raise UserError(f"exact=True: {message}: continue from an earlier one")
            log.warning(message)
        self._lost = saved.get("attributes", {}), {}
        self._restored = saved["trained"]
        _train(pl_module, self._restored)  # the optimizer exists already, with the original parameters
        _add_groups(trainer, pl_module, saved.get("groups", []))
        if saved["settings"] != self.settings:
            self._apply_new_settings(trainer, saved["settings"])
        self._loaded = {}

    @property
    def _exact(self) -> bool:
        return bool(self.record["trainer"]["exact"])

    def _restore_left_out(self, trainer: Trainer, module: LightningModule, state: Mapping[str, Any]) -> None:
        """Restore what the module's state_dict leaves out.

        Raises:
            UserError: the run is exact, and something that the checkpoint lacks is not as it was.
        """
        assert self._left_out is not None
        saved = self._loaded["continuation"].get("left_out", {"changed": {}, "sha256": {}})
        others = self._left_out.restore(module, saved)
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        if overrides_method(module, "on_load_checkpoint", LightningModule):  # it may have restored them
            trained = set()
        others += [name for name in state if name in trained and name not in self._loaded["state_dict"]]
        if not (others := trainer.strategy.broadcast(others)):
            return
        message = (
            f"the checkpoint lacks {join_names(others, 3)}, which the module's state_dict leaves out or its "
            "on_save_checkpoint removes, and which is not as it was: save it (persistent=True), or make it alike"
        )
        if self._exact:
            raise UserError(f"exact=True: {message}")
        if trainer.is_global_zero:
            log.warning(message)

    def after_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore what is trained once more, after hooks that freeze at each start, such as BaseFinetuning's."""
        self._trained = _trained(pl_module)
        _train(pl_module, self._restored)
        if self._lost is not None and self._attributes is not None:
            self._lost = self._lost[0], self._attributes.values()

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._lost is not None:
            self._name_lost(trainer)

    def _name_lost(self, trainer: Any) -> None:
        """Name the Python attributes that had changed when the checkpoint was saved, and that nothing has set since.

        What a hook of the epoch's start sets is a value of this epoch, such as a temperature.
        """
        assert self._lost is not None
        assert self._attributes is not None
        (saved, before), self._lost = self._lost, None
        if not saved or not trainer.is_global_zero:
            return
        now = self._attributes.values()
        lost = [
            name for name, value in saved.items() if now.get(name, value) != value and before.get(name) == now[name]
        ]
        if lost:
            log.warning(
                "the run continues without the values that %s had, since no checkpoint has Python attributes or "
                "globals: if training reads them, make them buffers, or save them in on_save_checkpoint or a "
                "callback's state_dict",
                join_names(sorted(lost), 3),
            )

    def _apply_new_settings(self, trainer: Any, before: dict[str, Any]) -> None:
        """Write the new settings into the loaded checkpoint, before Lightning restores it."""
        states, keeps_rate = [], False
        for config, state in zip(trainer.lr_scheduler_configs, [*self._loaded["lr_schedulers"], {}], strict=False):
            new = config.scheduler.state_dict()
            if config.reduce_on_plateau and "num_bad_epochs" in state:  # the one before has followed a metric, too
                new |= {name: state[name] for name in PLATEAU_STATE if name in state}
                keeps_rate = True  # no other state has the rate that it has reached
            elif not config.reduce_on_plateau:
                epochs, steps = divmod(self._loaded["global_step"], self.steps_per_epoch)
                updates = epochs // config.frequency
                if config.interval == "step":  # as the loop counts: from each epoch's begin
                    updates = epochs * (self.steps_per_epoch // config.frequency) + steps // config.frequency
                for _ in range(updates):
                    config.scheduler.step()  # this also sets the optimizer's learning rates
                new = config.scheduler.state_dict()
            states.append(new)
        self._loaded["lr_schedulers"] = states
        same_lr = _lr(before) == _lr(self.settings)
        unchanged_keys = {"params", "lr"} if same_lr and keeps_rate else {"params"}
        for state, optimizer in zip(self._loaded["optimizer_states"], trainer.optimizers, strict=False):
            for old, new in zip(state["param_groups"], optimizer.param_groups, strict=False):
                old |= {name: value for name, value in new.items() if name not in unchanged_keys}


def _lr(settings: dict[str, Any]) -> Any:
    """Return the settings of the learning rate."""
    optimizer = settings.get("optimizer", settings)
    return optimizer.get("lr"), optimizer.get("lr_scale")


def _groups(trainer: Any, module: LightningModule) -> list[list[list[str]]]:
    """Return the names of each optimizer's parameters by group; empty if some are not the module's, as with fsdp."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [[[names.get(id(p), "") for p in group["params"]] for group in o.param_groups] for o in trainer.optimizers]
    return groups if all(name for of_one in groups for group in of_one for name in group) else []


def _add_groups(trainer: Any, module: LightningModule, groups: list[list[list[str]]]) -> None:
    """Add what hooks had added to the optimizers before a checkpoint was saved, see `_groups`."""
    for optimizer, saved in zip(trainer.optimizers, groups, strict=False):
        present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for number, names in enumerate(saved):
            added = [p for p in map(module.get_parameter, names) if id(p) not in present]
            if number < len(optimizer.param_groups):
                optimizer.param_groups[number]["params"] += added
            else:
                optimizer.add_param_group({"params": added})


# Flags of layers that freezing changes: the mode of any layer, and of a normalisation layer whether it has statistics.
FLAGS = ("training", "track_running_stats")


def _trained(module: LightningModule, modes: bool = True) -> dict[str, bool]:
    """Return whether each parameter is trained, and the flags of each layer, by name.

    Args:
        modes: whether the modes of the layers are among them.
    """
    flags = FLAGS if modes else FLAGS[1:]
    layers = {f"{name}.{flag}": vars(layer).get(flag) for name, layer in module.named_modules() for flag in flags}
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return trained | {name: value for name, value in layers.items() if isinstance(value, bool)}


def _train(module: LightningModule, trained: dict[str, bool]) -> None:
    """Set what `_trained` has returned."""
    for name, value in trained.items():
        layer, _, flag = name.rpartition(".")
        if flag in FLAGS:
            setattr(module.get_submodule(layer), flag, value)
        else:
            module.get_parameter(name).requires_grad_(value)
