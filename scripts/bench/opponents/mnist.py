"""What people's MNIST programs have in common: their arguments, and torchvision's data set through a DataLoader."""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

BATCH_SIZE = 64


def arguments() -> argparse.Namespace:
    """Of the command line; sets torch's threads and seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.03)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    return options


def training_set(options: argparse.Namespace) -> DataLoader:
    """Batches of images [64, 1, 28, 28] float, each image transformed by itself, and labels."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train = datasets.MNIST(options.data_dir, train=True, transform=transform)
    workers = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
    return DataLoader(train, batch_size=BATCH_SIZE, shuffle=True, **workers)
