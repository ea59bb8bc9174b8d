"""Calls of a module outside a run: its initial weights, its forward pass, its loss, its export."""

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.io import not_plain
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
        `initial`: names of initial weights that differ between two modules of one seed; `hyperparameters`: names and
        types of those that are no plain data; `mean`: the loss of a batch twice over that of the batch; `mixing_layer`:
        the result of `find_mixing_layer`; `transfer`: whether `on_after_batch_transfer` changes images in evaluation;
        `export`: the error of an export; `gpu`: the kind of fault by line, of `faults_of_steps`, or a text: why it is
        unknown. `skipped` is a text, if forward takes no images.
    """
    set_up_worker(config, folder)
    module, other = make_module(config, splits), make_module(config, splits)
    states = module.state_dict(), other.state_dict()
    results: dict[str, Any] = {
        "initial": [name for name, value in states[0].items() if not torch.equal(value, states[1][name])],
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
    results["mean"] = loss_ratio(outside_a_run(config, splits), x, y)
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
    try:
        results["mixing_layer"] = find_mixing_layer(outside_a_run(config, splits), x)
    except Exception as error:
        return {**results, "skipped": f"forward(images) failed: {first_line(error)}"}
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


def loss_ratio(module: pl.LightningModule, x: Tensor, y: Tensor) -> float | None:
    """Return the loss of a batch followed by itself, divided by the loss of the batch: 1 for a mean, 2 for a sum.

    Returns:
        The ratio; None if the loss is zero, random, or can't be computed outside a run.
    """
    try:
        one, again = loss_of(module, x, y, 0), loss_of(module, x, y, 1)
        twice = loss_of(module, torch.cat([x, x]), torch.cat([y, y]), 0)
    except Exception:  # the runs show whether it works
        return None
    by_rounding = abs(one - again) <= CLOSE * max(abs(one), abs(again))
    return twice / one if one and by_rounding else None


def loss_of(module: pl.LightningModule, x: Tensor, y: Tensor, seed: int) -> float:
    """Return the loss of a batch in evaluation mode, with torch's generator seeded."""
    torch.manual_seed(seed)
    number = (0,) if len(inspect.signature(module.training_step).parameters) > 1 else ()
    output: Any = module.training_step((x.clone(), y.clone()), *number)
    return float(output["loss"] if isinstance(output, dict) else output)


def find_mixing_layer(module: pl.LightningModule, x: Tensor) -> str | None:
    """Return the first layer whose output for a sample depends on the other samples of its batch; None without one.

    Each sample is computed in the batch and alone. The layer is named with its type, `net.1 (BatchNorm2d)`, or is
    `forward` if only the module's own output depends on them.
    """
    together = outputs(module, x)
    for at in range(len(x)):
        for (name, whole), (_, alone) in zip(together, outputs(module, x[at : at + 1]), strict=False):
            if whole.shape[:1] != x.shape[:1] or alone.shape != (1, *whole.shape[1:]):
                continue
            if not torch.allclose(whole[at].double(), alone[0].double(), rtol=CLOSE, atol=CLOSE):
                return name
    return None


def outputs(module: pl.LightningModule, x: Tensor) -> list[tuple[str, Tensor]]:
    """Return name and output of each part of the module, in the order in which they are computed."""
    seen: list[tuple[str, Tensor]] = []

    def see(name: str) -> Any:
        def hook(part: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.append((f"{name} ({type(part).__name__})", output.detach().clone()))

        return hook

    handles = [part.register_forward_hook(see(name)) for name, part in module.named_modules() if name]
    try:
        result = module(x.clone())
    finally:
        for handle in handles:
            handle.remove()
    return [*seen, ("forward", result)] if isinstance(result, Tensor) else seen


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
