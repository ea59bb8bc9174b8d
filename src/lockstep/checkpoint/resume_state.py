"""State that Lightning does not save in a checkpoint, and that a resumed run needs to continue exactly."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

LENGTH = ("callbacks", "max_epochs", "max_steps")  # if one of them has changed, a stopped run trains further
# What a ReduceLROnPlateau keeps when its settings change. warmup_done: of one with a warm-up, its steps so far
PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "warmup_done")


class ResumeState(Callback):
    """Saves whether a callback (such as EarlyStopping) has stopped training, and which parameters it has (un)frozen.

    New settings of the optimizer, the schedule or EarlyStopping's patience take precedence over the checkpoint's. The
    optimizer keeps its state, such as momentum. A new schedule starts at its value for the checkpoint's step.

    Args:
        config: the run's plain config.
        settings: plain settings of the module's optimizer and schedule; see `lockstep.run.optimizers.settings`.
        steps_per_epoch: optimizer steps of an epoch.
    """

    def __init__(self, config: dict[str, Any], settings: dict[str, Any], steps_per_epoch: int) -> None:
        self.settings = settings
        self.steps_per_epoch = steps_per_epoch
        self._loaded: dict[str, Any] = {}  # the checkpoint; Lightning restores loops and optimizers after on_fit_start
        self.length = {key: config.get(key) for key in LENGTH}
        self._trained: dict[str, bool] = {}  # requires_grad at the start of the run, by parameter name

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trained = _trained(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        changed = {name: now for name, now in _trained(pl_module).items() if now != self._trained.get(name)}
        record = {"length": self.length, "trained": changed, "settings": self.settings}
        checkpoint["continuation"] = {"stopped": trainer.should_stop, **record}

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("continuation")
        if saved is not None and trainer.state.fn == "fit":
            trainer.should_stop = saved["stopped"] and saved["length"] == self.length
            self._loaded = checkpoint
            for callback in trainer.callbacks:
                if isinstance(callback, EarlyStopping) and callback.state_key in checkpoint["callbacks"]:
                    checkpoint["callbacks"][callback.state_key]["patience"] = callback.patience

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved = self._loaded.get("continuation", {"trained": {}, "settings": self.settings})
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
