"""Small data sets, DataModules on them with what they ask of a Trainer, and models for such data."""

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from conftest import page_file
from omegaconf import OmegaConf
from PIL import Image

from lockstep.arithmetic.layout import Layout, resolve
from lockstep.data import ArrayDataset, Spec, Splits, StepData
from lockstep.data.augment import Augment
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.step.batch import StepBatch
from lockstep.vision.models import FastCNN, ResNet9, SmallCNN, SmallResNet18
from lockstep.vision.schedules import cosine

GENERATED = ("data=synthetic", "data.num_classes=3", "data.channels=3")
TASK_ROWS = {  # each task but the classification, with a small net and generated images
    "multi_label": (
        *("model=multi_label", "model.arch=mobilenet_v3_small"),
        *(*GENERATED, "data.task=multi_label", "data.image_size=40"),
    ),
    "regression": (
        *("model=regression", "model.arch=mobilenet_v3_small"),
        *(*GENERATED, "data.task=regression", "data.image_size=40"),
    ),
    "segmentation": ("model=segmentation", *GENERATED, "data.task=segmentation", "data.image_size=32"),
}


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)


MODEL = Model()


def layout(
    devices: int = 1, batch_size: int = 12, pieces: int | None = None, strategy: str = "ddp", exact: bool = False
) -> Layout:
    return resolve(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        num_nodes=1,
        batch_size=batch_size,
        pieces=pieces,
        exact=exact,
        one_process=strategy == "dp",
    )


def arrays(samples: int, size: int = 6) -> ArrayDataset:
    rng = np.random.default_rng(0)
    return ArrayDataset(rng.integers(0, 256, (samples, 1, size, size), dtype=np.uint8), np.arange(samples))


def splits(train: Any, augment: Augment | None = None, evaluated: Any = None) -> Splits:
    evaluated = arrays(10) if evaluated is None else evaluated
    spec = Spec(1, 6, ("a", "b"), mean=(0.4,), std=(0.2,))
    return Splits(train, evaluated, evaluated, spec, "", augment or Augment())


def module(
    data: Splits, on: Layout, rank: int = 0, seed: int = 3, workers: int | None = 0, net: Any = MODEL
) -> StepData:
    made = StepData(data, on, seed, rank, num_workers=workers)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    made.trainer = SimpleNamespace(global_step=0, predicting=False, lightning_module=net, strategy=strategy)  # type: ignore[assignment]
    made.setup("fit")
    return made


def step_batches(made: StepData) -> list[StepBatch]:
    return list(made.train_dataloader())


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**OmegaConf.to_container(OmegaConf.load(page_file(f"data/{name}"))), **changes}  # type: ignore[dict-item]


def write_images(root: Path, parts: tuple[str, ...] = ("train", "test"), each: int = 6) -> Path:
    rng = np.random.default_rng(2)
    for part in parts:
        for name in ("cat", "dog"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(each):
                Image.fromarray(rng.integers(0, 256, (20, 14, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return root


def write_list(folder: Path, head: str, rows: list[str], coding: str = "utf-8") -> Path:
    """Write a list of images, and 12 images for it."""
    (folder / "images").mkdir()
    for number in range(12):
        Image.new("RGB", (8, 9), (number, 0, 0)).save(folder / "images" / f"{number}.png")
    (folder / "list.csv").write_text("\n".join([head, *rows]) + "\n", encoding=coding)
    return folder / "list.csv"


def open_list(file: Path | None, **changes: Any) -> Splits:
    path = None if file is None else str(file)
    return open_data(config("image_list", csv=path, image_size=8, **changes), "nowhere")


def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_mnist(folder: Path) -> None:
    """Write a small set in MNIST's files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(1)
    for prefix, count in (("train", 20), ("t10k", 5)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8) % 10))


def refusal_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return the line with which a call refuses its arguments."""
    with pytest.raises(UserError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def task(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "channels": 1,
        "image_size": 12,
        "num_classes": 3,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "scheduler": by_step,
    }
    return plain | changes


def by_step(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"scheduler": cosine(optimizer, total_steps=8), "interval": "step"}


def small_cnn(**changes: Any) -> Any:
    return SmallCNN(**task(**changes))


def resnet9(**changes: Any) -> Any:
    return ResNet9(**task(**{"width": [4, 4, 8, 8], **changes}))


def fast_cnn(**changes: Any) -> Any:
    return FastCNN(**task(**{"image_size": 19, **changes}))


def small_resnet18(**changes: Any) -> Any:
    return SmallResNet18(**task(**changes))
