"""Calls of a module outside a run: its initial weights, its forward pass, its export.

Nothing of this is a step, so nothing is recorded as one: initial weights are compared to the bit, and an exported
network, which is other code for the same numbers, to CLOSE.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.plain import not_plain
from lockstep.config.check import Config
from lockstep.data import Spec, Splits, StepData
from lockstep.data.datasets import fetch
from lockstep.job.build import make_module
from lockstep.job.worker_setup import set_up_worker
from lockstep.lightning.hooks import overrides_method
from lockstep.testing.fake_gpu import faults_of_steps

SAMPLES = 8  # of the batch that is tried
CLOSE = 1e-6  # relative difference in float64 that counts as rounding; a module may compute parts in float32
EXPORTED = (1, 2, 7)  # batch sizes of an exported network


class Network(nn.Module):
    """The forward pass of a module, for export."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Any:
        """Return the logits of images [n, C, H, W]."""
        return self.module(images)


def probe(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Try the module in this worker. The return values are None where there is nothing to say.

    Args:
        config: a config in float64, with a checkpoint of the module.
        splits: the data set.
        folder: a folder for logs.

    Returns:
        `initial`: names of initial weights that differ between two modules of one seed; `trains`: whether the
        checkpoint has other weights; `hyperparameters`: names and types of those that are no plain data; `transfer`:
        whether `on_after_batch_transfer` changes images in evaluation; `export`: the error of an export; `gpu`: the
        kind of fault by line, of `faults_of_steps`, or a text: why it is unknown. `skipped` is a text, if forward takes
        no images.
    """
    set_up_worker(config, folder)
    module, other = make_module(config, splits), make_module(config, splits)
    states, trained = (module.state_dict(), other.state_dict()), dict(outside_a_run(config, splits).named_parameters())
    results: dict[str, Any] = {
        "initial": [name for name, value in states[0].items() if not torch.equal(value, states[1][name])],
        "trains": any(not torch.equal(value, states[0][name]) for name, value in trained.items()),
        "hyperparameters": {name: type(module.hparams[name]).__qualname__ for name in not_plain(module.hparams)},
        "skipped": None,
    }
    try:
        data = StepData(splits, config.layout, config.seed)
        results["gpu"] = faults_of_steps(make_module(config, splits), data, splits).faults
    except Exception as error:  # the runs show whether the module works
        results["gpu"] = first_line(error)
    batch = prepared(splits)
    if batch is None:
        return {**results, "skipped": "a batch of this data set is not (images, labels)"}
    x, y = batch
    try:
        after = outside_a_run(config, splits).on_after_batch_transfer((x.clone(), y.clone()), 0)[0]
        results["transfer"] = not torch.equal(after, x)
    except Exception as error:
        return {**results, "skipped": f"on_after_batch_transfer failed outside a run: {first_line(error)}"}
    if not overrides_method(module, "forward", pl.LightningModule):
        return {
            **results,
            "skipped": "the module has no forward: define it, since predict.py and `lockstep export` call it",
        }
    results["export"] = export_error(outside_a_run(config, splits), x)
    return results


def outside_a_run(config: Config, splits: Splits) -> pl.LightningModule:
    """Return the module of `config.checkpoint` in evaluation mode, with a trainer that does nothing.

    Its `log` and `log_dict` do nothing either.
    """
    module = make_module(config, splits)
    module.load_state_dict(checkpoint_io.load(str(config.checkpoint), broadcast=True)["state_dict"], strict=False)
    module.trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    module.log = module.log_dict = lambda *args, **options: None  # type: ignore[method-assign, assignment]
    return module.eval().requires_grad_(False)


def prepared(splits: Splits) -> tuple[Tensor, Tensor] | None:
    """Return a batch of the training set as a step gets it, float64 [n, C, H, W] and labels [n]; None if it differs."""
    batch = fetch(splits.train, np.arange(min(SAMPLES, len(splits.train))))
    if not (isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)):
        return None
    x, y = batch
    return (normalised(x, splits.spec) if x.dtype == torch.uint8 else x.double()), y


def normalised(images: Tensor, spec: Spec) -> Tensor:
    """Return uint8 images [n, C, H, W] as normalised float64."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (spec.mean, spec.std))
    return (images.double() / 255 - mean) / std


def export_error(module: pl.LightningModule, x: Tensor) -> str | None:
    """Return why torch.export can't export the forward pass for batches of any size; None if it can."""
    network = Network(module).eval()
    images = x if len(x) >= max(EXPORTED) else x.repeat(max(EXPORTED), 1, 1, 1)
    try:
        sizes = {"images": {0: torch.export.Dim("n", min=1)}}
        exported = torch.export.export(network, (images[:2],), dynamic_shapes=sizes).module()
        for size in EXPORTED:
            part = images[:size].clone()
            if not torch.allclose(network(part), exported(part), rtol=CLOSE, atol=CLOSE):
                return f"the exported forward pass gives other numbers for a batch of {size}"
    except Exception as error:
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
