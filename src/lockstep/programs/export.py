"""Export a trained model to a file that needs neither Lockstep nor Lightning:

    lockstep export checkpoint=outputs/mnist_cnn_digits/<timestamp> format=onnx

The file includes normalisation. Its input is decoded images, uint8 [n, channels, size, size] for any n. Its output is
what predict.py writes for the model: what its predict_step returns, or `forward` without one; floats are float32. In an
ONNX file the input is named `images`, and a single output `output`; several are named by the keys of a dict, the fields
of a named tuple, or their places.

The program reads the file again and compares its output with what predict.py computes, on images of the data set if it
is still there, and on random ones. The file's metadata describe it: class names, channels, image size, normalisation.
So does model.json beside it, which has the largest difference too.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lockstep.commands import cli
from lockstep.config.check import Config
from lockstep.config.value_checks import checker
from lockstep.data import Spec, StepData
from lockstep.data.build import open_data
from lockstep.data.datasets import fetch
from lockstep.errors import UserError
from lockstep.job.build import make_data
from lockstep.job.prediction import as_splits, config_and_spec, load_module
from lockstep.launch import logs
from lockstep.lightning.hooks import overrides_method
from lockstep.programs.common.packages import check_packages
from lockstep.step.batch import MicroBatch
from lockstep.text import join_names

TOLERANCE = 1e-5  # largest allowed difference: absolute for outputs up to 1, relative above
MOST_OTHER = 1e-3  # the largest share of whole numbers that differ
BATCH_SIZES = (1, 2, 7)  # batch sizes at which the outputs are compared
SAMPLES = sum(BATCH_SIZES)
DESCRIPTION = "model.json"  # the file beside the model, and the entry of a .pt2 file


class Different(Exception):
    """The output of the file differs from that of the model."""


class Predicting(nn.Module):
    """What predict.py computes of normalised images, as a network: tensors by name, see `named_tensors`."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module
        self.has_step = overrides_method(module, "predict_step", pl.LightningModule)
        self.where = f"{type(module).__name__}.{'predict_step' if self.has_step else 'forward'}"

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if self.has_step:
            returned = self.module.predict_step((images, torch.arange(images.shape[0])), 0)
        else:
            returned = self.module(images)
        return named_tensors(returned, self.where)


class Deployed(nn.Module):
    """The network of the file: it maps uint8 images to a tensor, or to a tuple of several ones."""

    scale: Tensor
    shift: Tensor

    def __init__(self, module: pl.LightningModule, spec: Spec) -> None:
        super().__init__()
        self.predict = Predicting(module)
        mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (spec.mean, spec.std))
        self.register_buffer("scale", (1 / (255 * std)).float())
        self.register_buffer("shift", (-mean / std).float())

    def forward(self, images: Tensor) -> Any:
        predicted = self.predict(images.float() * self.scale + self.shift).values()
        tensors = tuple(each.float() if each.is_floating_point() else each for each in predicted)
        return tensors[0] if len(tensors) == 1 else tensors


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
    check_packages(f"format={file_format}")
    fixed = {"accelerator": "cpu", "devices": 1, "batch_size": 1, "precision": "32-true"}
    fixed["speed"] = {"memory_format": "contiguous"}
    for key, value in fixed.items():
        if key in raw:
            raise UserError(f"{key}: an export always uses {key}={value}: leave it out")
    config, spec = config_and_spec({**raw, **fixed})
    real, about_images = real_images(config, spec)
    images = [*([real] if real is not None else []), random_images(spec)]
    splits = as_splits(spec, images=range(1))
    module = load_module(config, splits).float()
    compared = [prepared(make_data(config, splits), each) for each in images]
    if changes_images(module, compared[0]):
        raise UserError(
            f"model._target_={config.model['_target_']}: its on_after_batch_transfer changes images in evaluation, "
            "and the file would not: move this into forward"
        )
    names = names_of(module, compared[0])
    model = Deployed(module, spec).eval()
    example = torch.zeros(2, spec.channels, spec.image_size, spec.image_size, dtype=torch.uint8)
    path = folder / f"model.{'pt2' if file_format == 'torch' else 'onnx'}"
    description = described(spec, names)
    try:
        exported = (write_torch if file_format == "torch" else write_onnx)(model, example, path, description)
    except Exception as error:  # torch raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"model._target_={config.model['_target_']} can't be exported: {type(error).__name__}: {reason}: compute "
            "with torch's operations only, without `if` and loops that depend on values or on the size of the batch"
        ) from error
    with torch.no_grad():
        pairs = zip(images, compared, strict=True)
        largest = max(largest_difference(module, exported, each, x) for each, x in pairs)
    if not largest <= TOLERANCE:  # also if it is NaN
        path.unlink()
        raise Different(
            f"{path} was deleted: its output differs from the model's by {largest:.1e}, more than {TOLERANCE:.0e}"
        )
    description |= {"difference": largest, "checkpoint": config.checkpoint}
    path.with_suffix(".json").write_text(json.dumps(description, indent=2) + "\n")
    batches = f"batches of {', '.join(map(str, BATCH_SIZES))} {about_images}"
    print(f"{path}: {join_names(names)} agrees with the checkpoint to {largest:.1e} on {batches}")


# --- images to compare with ---


def real_images(config: Config, spec: Spec) -> tuple[Tensor | None, str]:
    """Return SAMPLES images of the data set of the training, uint8, and what is compared, for the console.

    There are none if the data set is not there any more.
    """
    try:
        splits = open_data(config.data, str(config.data_dir), config.seed)
        dataset = next(each for each in (splits.test, splits.val, splits.train) if each is not None)
        ids = np.linspace(0, len(dataset) - 1, SAMPLES).astype(np.int64)
        images = fetch(dataset, ids)[0]
    except Exception as error:  # the user's code, or the network
        reason = str(error).partition("\n")[0]
        return None, f"random images, since the data set can't be read ({reason})"
    if not isinstance(images, Tensor) or tuple(images.shape[1:]) != (spec.channels, spec.image_size, spec.image_size):
        return None, "random images, since those of the data set have another size"
    if images.dtype != torch.uint8:
        return None, "random images, since those of the data set are no pixels"
    return images, "images of the data set and random ones"


def random_images(spec: Spec) -> Tensor:
    """Return SAMPLES random images, uint8."""
    shape = SAMPLES, spec.channels, spec.image_size, spec.image_size
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def prepared(data: StepData, images: Tensor) -> Tensor:
    """Return uint8 images normalised as in an evaluation."""
    ids = np.arange(len(images))
    normalised: Tensor = data.prepare(MicroBatch(ids, 0, 0, np.zeros_like(ids), batch=(images, torch.from_numpy(ids))))[
        0
    ]
    return normalised


def changes_images(module: pl.LightningModule, images: Tensor) -> bool:
    """Check whether the module's own `on_after_batch_transfer` changes normalised images outside training."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hide the list of devices that a Trainer logs
    logs.hide_harmless_warnings()
    module.trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    batch = images.clone(), torch.zeros(len(images), dtype=torch.int64)
    transferred, _ = module.on_after_batch_transfer(batch, 0)
    module.trainer = None
    return not torch.equal(transferred, images)


# --- what the file computes ---


def names_of(module: pl.LightningModule, images: Tensor) -> list[str]:
    """Return the names of a module's predictions.

    Args:
        images: normalised images to try it on.

    Raises:
        UserError: the predictions are no tensors, or differ from call to call.
    """
    if not any(overrides_method(module, name, pl.LightningModule) for name in ("predict_step", "forward")):
        raise UserError(f"{type(module).__name__} has neither forward nor predict_step: define forward(images)")
    with torch.no_grad():
        predicted, again = (Predicting(module)(images) for _ in range(2))
    if any(not torch.equal(predicted[key], again[key]) for key in predicted):
        raise UserError(
            f"{type(module).__name__} draws random numbers in evaluation, so an exported file can't be compared with "
            "it: let it draw only if self.training"
        )
    return [*predicted]


def named_tensors(result: Any, where: str) -> dict[str, Tensor]:
    """Return the tensors that a module returns, by name. None in a tuple or dict is left out.

    The name is `output` for a single tensor; else the keys of a dict, the fields of a named tuple, or `output_0`, ...

    Raises:
        UserError: there is something else than tensors, or no tensor.
    """
    if isinstance(result, Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        items = [(str(key), value) for key, value in result.items()]
    elif isinstance(result, tuple | list):
        fields = getattr(result, "_fields", [f"output_{place}" for place in range(len(result))])
        items = list(zip(fields, result, strict=True))
    else:
        raise UserError(f"{where} returned a {type(result).__name__}: must be a tensor, or a tuple or dict of tensors")
    tensors: dict[str, Tensor] = {}
    for name, value in items:
        if value is None:
            continue
        inner = named_tensors(value, where)
        tensors |= {name if key == "output" else f"{name}.{key}": tensor for key, tensor in inner.items()}
    if not tensors:
        raise UserError(f"{where} returned no tensor: must be a tensor, or a tuple or dict of tensors")
    return tensors


def described(spec: Spec, names: Sequence[str]) -> dict[str, Any]:
    """Return the description of a file whose outputs have these names, as plain data."""
    mean, std = (list(values) * (spec.channels // len(values)) for values in (spec.mean, spec.std))
    return {
        "task": spec.task,
        "classes": list(spec.classes),
        "input": ["n", spec.channels, spec.image_size, spec.image_size],
        "dtype": "uint8",
        "channels": spec.channels,
        "image_size": spec.image_size,
        "value_range": [0, 255],
        "mean": mean,  # of pixels / 255; the file normalises with it
        "std": std,
        "outputs": list(names),
    }


# --- writing and comparing ---


def traced(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Return the program of a model, for batches of any size."""
    sizes = {"images": {0: torch.export.Dim("n", min=1)}}
    try:
        return torch.export.export(model, (example,), dynamic_shapes=sizes)
    except Exception:  # torch raises many kinds; a strict trace, which is slower, understands len(images)
        return torch.export.export(model, (example,), dynamic_shapes=sizes, strict=True)


def write_torch(
    model: nn.Module, example: Tensor, path: Path, description: Mapping[str, Any]
) -> Callable[[Tensor], Any]:
    """Write the file with torch.export. Return it as a function of images."""
    torch.export.save(traced(model, example), path, extra_files={DESCRIPTION: json.dumps(description)})
    return torch.export.load(path).module()


def write_onnx(
    model: nn.Module, example: Tensor, path: Path, description: Mapping[str, Any]
) -> Callable[[Tensor], Any]:
    """Write the file with torch's ONNX exporter. Return it as a function of images.

    The function is onnx's reference evaluator. Metadata are text: a text as it is, everything else as JSON.
    """
    torch.onnx.export(
        traced(model, example),
        (),
        path,
        input_names=["images"],
        output_names=description["outputs"],
        external_data=False,
        dynamo=True,
        verbose=False,
    )
    import onnx
    from onnx.reference import ReferenceEvaluator

    written = onnx.load(path)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in description.items()}
    onnx.helper.set_model_props(written, texts)
    onnx.save(written, path)
    onnx.checker.check_model(path)
    session = ReferenceEvaluator(str(path))
    return lambda images: tuple(map(torch.from_numpy, map(np.asarray, session.run(None, {"images": images.numpy()}))))


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors of one shape; it is relative for values above 1 in `one`.

    Of whole numbers, such as classes, few may differ: where two classes are equally likely, to rounding.
    """
    if not one.is_floating_point():
        return 0.0 if int((one != other).sum()) <= MOST_OTHER * one.numel() else float("inf")
    one, other = one.double(), other.double()
    return float(((one - other).abs() / one.abs().clamp(min=1)).max()) if one.numel() else 0.0


def largest_difference(
    module: pl.LightningModule, exported: Callable[[Tensor], Any], images: Tensor, normalised: Tensor
) -> float:
    """Return the largest difference between the outputs of a file and a module's, for several batch sizes.

    Args:
        module: the module.
        exported: the file, a function of uint8 images.
        images: SAMPLES images, uint8.
        normalised: the same images, normalised.
    """
    differences, predict = [], Predicting(module)
    for before, after in zip(images.split(BATCH_SIZES), normalised.split(BATCH_SIZES), strict=True):
        outputs = exported(before)
        outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
        for one, other in zip(predict(after).values(), outputs, strict=True):
            same_shape = one.shape == other.shape
            differences.append(difference(one, other) if same_shape else float("inf"))
    return float(torch.tensor(differences).max())  # NaN if one is NaN


def main(arguments: list[str]) -> NoReturn:
    """Run the program under Hydra."""
    cli.command(export, "export")
