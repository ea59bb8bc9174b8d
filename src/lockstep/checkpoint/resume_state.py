"""What Lightning leaves out of a checkpoint, and a run needs to go on as if it had never ended."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

LENGTH = ("callbacks", "max_epochs", "max_steps")  # who changes one of them means to train on
GATHERED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # by ReduceLROnPlateau


class ResumeState(Callback):
    """Whether a callback has ended training (EarlyStopping, say), and what was frozen or unfrozen since it began.

    Where the optimizer's or the schedule's settings are others than the checkpoint's, or the patience of EarlyStopping,
    they win: the optimizer takes them and keeps what it has gathered, and the new schedule stands where it would after
    as many steps.

    Args:
        config: the run's plain config.
        settings: of the module's optimizer and schedule, plain; see `lockstep.run.optimizers.settings`.
        steps_per_epoch: optimizer steps.
    """

    def __init__(self, config: dict[str, Any], settings: dict[str, Any], steps_per_epoch: int) -> None:
        self.settings = settings
        self.steps_per_epoch = steps_per_epoch
        self._loaded: dict[str, Any] = {}  # the checkpoint, which Lightning goes on from after `on_fit_start`
        self.length = {key: config.get(key) for key in LENGTH}
        self._trained: dict[str, bool] = {}  # by name of the parameter, as the run begins

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
        for name, trained in saved["trained"].items():  # the optimizer was made before, as it was then
            pl_module.get_parameter(name).requires_grad_(trained)
        if saved["settings"] != self.settings:
            self._follow_settings(trainer, saved["settings"])
        self._loaded = {}

    def _follow_settings(self, trainer: Any, before: dict[str, Any]) -> None:
        configs, states = trainer.lr_scheduler_configs, []
        for config, state in zip(configs, [*self._loaded["lr_schedulers"], {}], strict=False):
            new = config.scheduler.state_dict()
            if config.reduce_on_plateau:
                new |= {name: state[name] for name in GATHERED if name in state}
            else:
                counted = self._loaded["global_step"] // (self.steps_per_epoch if config.interval == "epoch" else 1)
                for _ in range(counted // config.frequency):
                    config.scheduler.step()  # and the optimizer's learning rates with it
                new = config.scheduler.state_dict()
            states.append(new)
        self._loaded["lr_schedulers"] = states
        same_lr = _lr(before) == _lr(self.settings)
        unchanged_keys = (
            {"params", "lr"} if same_lr and any(config.reduce_on_plateau for config in configs) else {"params"}
        )
        for state, optimizer in zip(self._loaded["optimizer_states"], trainer.optimizers, strict=False):
            for old, fresh in zip(state["param_groups"], optimizer.param_groups, strict=False):
                old |= {name: value for name, value in fresh.items() if name not in unchanged_keys}


def _lr(settings: dict[str, Any]) -> Any:
    of = settings.get("optimizer", settings)
    return of.get("lr"), of.get("lr_scale")


def _trained(module: LightningModule) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}
