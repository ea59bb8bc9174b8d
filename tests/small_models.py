"""The models on a task of three classes and twelve pixels."""

from functools import partial
from typing import Any

import torch

from lockstep.vision.models import FastCNN, ResNet9, SmallCNN, SmallResNet18
from lockstep.vision.schedules import cosine


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
