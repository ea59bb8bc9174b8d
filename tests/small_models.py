"""The models on a task of three classes and twelve pixels."""

from __future__ import annotations

from typing import Any

from project.models import FastCNN, MnistCNN, ResNet18


def task(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "channels": 1,
        "image_size": 12,
        "num_classes": 3,
        "lr": 0.1,
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "scheduler": {"name": "cosine"},
        "total_steps": 8,
    }
    return plain | changes


def mnist_cnn(**changes: Any) -> Any:
    return MnistCNN(**task(**changes))


def fast_cnn(**changes: Any) -> Any:
    return FastCNN(**task(**{"image_size": 19, **changes}))


def resnet18(**changes: Any) -> Any:
    return ResNet18(**task(**changes))
