"""Export a trained model to a file that needs neither Lockstep nor Lightning:

    python scripts/export.py checkpoint=outputs/mnist_cnn_digits/<timestamp> format=onnx

The file includes normalisation. Its input is decoded images, uint8 [n, channels, size, size] for any n. Its output is
float32 and depends on the task of the data: probabilities of the classes or labels, [n, classes]; values, [n, values];
or probabilities of the classes of each pixel, [n, classes, size, size]. In an ONNX file the input is named `images`,
and the output `probabilities` or `values`. The program reads the file again and compares its output with that of the
model. It also writes model.json: class names, shape, and the largest difference.
"""

import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

if __name__ == "__main__":
    import lockstep.exit_on_signal  # noqa: F401  from here on Ctrl-C prints one line

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lockstep.config.value_checks import checker
from lockstep.data import Spec
from lockstep.errors import UserError
from lockstep.launch import logs
from lockstep.run import cli
from lockstep.run.prediction import as_splits, config_and_spec, load_module

TOLERANCE = 1e-5  # largest allowed difference: absolute for outputs up to 1, relative above
# By the task of the data: the name of the output, and the function that computes it from what `forward` returns.
OUTPUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "classification": ("probabilities", partial(torch.softmax, dim=1)),
    "multi_label": ("probabilities", torch.sigmoid),
    "regression": ("values", lambda values: values),
    "segmentation": ("probabilities", partial(torch.softmax, dim=1)),
}
BATCH_SIZES = (1, 2, 7)  # batch sizes at which the outputs are compared
ONNX_PACKAGES = ("onnx", "onnxscript")


class Different(Exception):
    """The output of the file differs from that of the model."""


class Deployed(nn.Module):
    """The network of the file: it maps uint8 images to probabilities or values."""

    scale: Tensor
    shift: Tensor

    def __init__(self, net: nn.Module, spec: Spec) -> None:
        super().__init__()
        self.net = net
        self.output_name, self.activation = OUTPUTS[spec.task]
        mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (spec.mean, spec.std))
        self.register_buffer("scale", (1 / (255 * std)).float())
        self.register_buffer("shift", (-mean / std).float())

    def forward(self, images: Tensor) -> Tensor:
        return self.activation(self.net(images.float() * self.scale + self.shift))


def export(raw: dict[str, Any], folder: Path) -> None:
    """Write the file, read it again, and compare it with the model.

    Args:
        raw: the composed config of this command.
        folder: the folder for the file.

    Raises:
        Different: the output of the file differs from that of the model.
        UserError: the model can't be exported.
    """
    file_format = checker(Literal["torch", "onnx"])("format", raw.pop("format"))
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing and file_format == "onnx":
        raise UserError(f"format=onnx needs {' and '.join(missing)}: pip install -e .[export]; format=torch does not")
    fixed = {"accelerator": "cpu", "devices": 1, "batch_size": 1, "precision": "32-true"}
    fixed["speed"] = {"memory_format": "contiguous"}
    for key, value in fixed.items():
        if key in raw:
            raise UserError(f"{key}: an export always uses {key}={value}: leave it out")
    config, spec = config_and_spec({**raw, **fixed})
    splits = as_splits(spec, images=range(1))  # no image is read: the module only needs the spec
    module = load_module(config, splits).float()
    if changes_images(module, spec):
        raise UserError(
            f"model._target_={config.model['_target_']}: its on_after_batch_transfer changes images in evaluation, "
            "and the file would not: move this into forward"
        )
    model = Deployed(module, spec).eval()
    example = torch.zeros(2, spec.channels, spec.image_size, spec.image_size, dtype=torch.uint8)
    path = folder / f"model.{'pt2' if file_format == 'torch' else 'onnx'}"
    exported = (write_torch if file_format == "torch" else write_onnx)(model, example, path)
    largest = largest_difference(model, exported, spec)
    if not largest <= TOLERANCE:  # also if it is NaN
        path.unlink()
        raise Different(
            f"{path} was deleted: its output differs from the model's by {largest:.1e}, more than {TOLERANCE:.0e}"
        )
    description: dict[str, Any] = {
        "task": spec.task,
        "input": ["n", *example.shape[1:]],
        "dtype": "uint8",
        "classes": list(spec.classes),
    }
    description |= {"difference": largest, "checkpoint": config.checkpoint}
    path.with_suffix(".json").write_text(json.dumps(description, indent=2) + "\n")
    print(f"{path}: agrees with the checkpoint to {largest:.1e} on batches of {', '.join(map(str, BATCH_SIZES))}")


def changes_images(module: pl.LightningModule, spec: Spec) -> bool:
    """Check whether the module's own `on_after_batch_transfer` changes images outside training."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hide the list of devices that a Trainer logs
    logs.hide_harmless_warnings()
    module.trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    images = torch.rand(2, spec.channels, spec.image_size, spec.image_size)
    transferred, _ = module.on_after_batch_transfer((images.clone(), torch.zeros(2, dtype=torch.int64)), 0)
    module.trainer = None
    return not torch.equal(transferred, images)


def write_torch(model: nn.Module, example: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    """Write the file with torch.export. Return it as a function of images."""
    program = torch.export.export(model, (example,), dynamic_shapes={"images": {0: torch.export.Dim("n", min=1)}})
    torch.export.save(program, path)
    return torch.export.load(path).module()


def write_onnx(model: Deployed, example: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    """Write the file with torch's ONNX exporter. Return it as a function of images.

    The function is onnx's reference evaluator.
    """
    torch.onnx.export(
        model,
        (example,),
        path,
        input_names=["images"],
        output_names=[model.output_name],
        dynamic_shapes={"images": {0: torch.export.Dim("n", min=1)}},
        external_data=False,
        dynamo=True,
        verbose=False,
    )
    import onnx
    from onnx.reference import ReferenceEvaluator

    onnx.checker.check_model(path)
    session = ReferenceEvaluator(str(path))
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def largest_difference(model: nn.Module, exported: Callable[[Tensor], Tensor], spec: Spec) -> float:
    """Return the largest difference of the outputs for batches of random images; it is relative for outputs above 1."""
    generator = torch.Generator().manual_seed(0)
    differences = []
    for size in BATCH_SIZES:
        shape = size, spec.channels, spec.image_size, spec.image_size
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        with torch.no_grad():
            expected = model(images)
            differences.append(((expected - exported(images)).abs() / expected.abs().clamp(min=1)).max())
    return float(torch.stack(differences).max())


if __name__ == "__main__":
    cli.command(export, "export")
