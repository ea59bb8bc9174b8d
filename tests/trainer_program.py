"""A program with `lockstep.Trainer`, which the promise tests run as a project's src/train.py (conftest.py's `either`).

It takes those overrides of the template that say what is computed, and leaves a folder for each run, with checkpoints
and a summary.json.
"""

import json
import re
import sys
from itertools import count, product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import mine  # type: ignore[import-not-found] # user_modules.py, in the project
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.strategies import DDP, DP

FOR_TRAINER = {
    *("strategy", "devices", "accelerator", "batch_size", "pieces", "accumulate_grad_batches", "exact", "precision"),
    *("seed", "max_epochs", "max_steps", "checkpoint_every", "gradient_clip_val"),
}
# They change nothing that is computed.
OF_THE_TEMPLATE = {
    *("model", "data", "logger", "callbacks.console", "callbacks.dashboard", "hang_timeout"),
    *("callbacks.checkpoint.monitor", "callbacks.checkpoint.mode"),
}


class Begins(pl.Callback):
    """Writes which run it is after its first step, so nothing has been refused."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        summary = Path(trainer.default_root_dir, "summary.json")
        if trainer.is_global_zero and not summary.exists():
            summary.write_text(json.dumps({"overrides": self.words, "status": "running"}))


def loader(dataset: Any, spec: lockstep.Spec, options: dict[str, Any], train: bool = False) -> Any:
    """Return a loader of normalised images."""
    if dataset is None:
        return []
    x = torch.stack([dataset[index][0] for index in range(len(dataset))]).double() / 255
    y = torch.stack([dataset[index][1] for index in range(len(dataset))])
    x = x if options.get("precision") == "64-true" else x.float()
    return DataLoader(TensorDataset((x - spec.mean[0]) / spec.std[0], y), options["batch_size"], shuffle=train)


def train(folder: Path, words: list[str]) -> dict[str, Any]:
    """Fit and test in a run's folder. Return its summary."""
    options = options_of(words)
    torch.set_num_threads(options.pop("threads", 1))
    pl.seed_everything(options.get("seed", 0), verbose=False)
    layout = {name: options.get(name) for name in ("strategy", "devices")}
    if shares := options.pop("strategy.shares", None):
        options["strategy"] = {"ddp": DDP, "dp": DP}[options["strategy"]](shares=shares)
    resume, kind = options.pop("resume", None), getattr(mine, options.pop("model._target_").removeprefix("mine."))
    module = kind(**{name: options.pop(name) for name in ("lr",) if name in options})
    callbacks = [Begins(words), *([mine.Records()] if options.pop("+callbacks.recorded._target_", None) else [])]
    sizes = {name.removeprefix("data."): options.pop(name) for name in [*options] if name.startswith("data.")}
    taken = {name: options.pop(name) for name in FOR_TRAINER & options.keys()}
    if unknown := options.keys() - OF_THE_TEMPLATE:
        raise UserError(f"{min(unknown)}: there is no such key")
    splits = open_data({"_target_": "lockstep.vision.data.synthetic", **sizes}, "data")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lockstep.Trainer(**taken, **quiet, default_root_dir=folder, callbacks=callbacks)
    sets = (splits.train, splits.val, splits.test)
    loaders = [loader(data, splits.spec, taken, data is splits.train) for data in sets]
    trainer.fit(module, *loaders[:2], ckpt_path="last" if resume else None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if kind.validation_step is not pl.LightningModule.validation_step and loaders[1]:
        metrics |= trainer.validate(module, loaders[1], verbose=False)[0]  # max_steps may end a fit without one
    if kind.test_step is not pl.LightningModule.test_step:
        metrics |= trainer.test(module, loaders[2], verbose=False)[0]
    digest = lockstep.weights_sha256(module.state_dict())
    done = {"weights_sha256": digest, "steps": trainer.global_step, "metrics": metrics, "layout": layout}
    return {"overrides": words, "status": "completed", **done}


def options_of(words: list[str]) -> dict[str, Any]:
    return {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}


def run(folder: Path, words: list[str]) -> None:
    """Do a run in as many processes as it needs."""
    summary = folder / "summary.json"
    if summary.exists():  # it is continued
        words = json.loads(summary.read_text())["overrides"] + words
    options = options_of(words)
    if options.get("strategy") == "dp" or options.get("devices", 1) == 1:
        result = train(folder, words)
    else:
        result = lockstep.launch(train, folder, words, devices=options["devices"])
    print(f"completed: {folder}")
    summary.write_text(json.dumps(result))


def main(words: list[str]) -> None:
    outputs = Path(next(word for word in words if word.startswith("outputs=")).removeprefix("outputs="))
    values = [word for word in words if word != "-m" and not word.startswith("outputs=")]
    if resumed := [word.removeprefix("resume=") for word in values if word.startswith("resume=")]:
        return run(Path(resumed[0]), values)
    jobs = [values]
    if "-m" in words:
        choices = [(key, re.split(r",(?![^[]*])", each)) for key, _, each in (word.partition("=") for word in values)]
        jobs = [list(job) for job in product(*([f"{key}={one}" for one in each] for key, each in choices))]
    for job in jobs:
        run(next(each for each in (outputs / str(number) for number in count()) if not each.exists()), job)
    return None


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except lockstep.Interrupted as error:
        sys.exit(error.code)
