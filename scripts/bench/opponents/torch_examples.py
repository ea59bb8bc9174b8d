"""The way of pytorch/examples' MNIST program, with this project's network: torchvision's data set and transforms, a
DataLoader, a loop with a line every 10 steps.

    python scripts/bench/opponents/torch_examples.py --data-dir data --workers 0 --threads 1
"""

from __future__ import annotations

import argparse

import torch
from bare_loop import mnist_cnn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from turns import Turns


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
    return DataLoader(train, batch_size=64, shuffle=True, **workers)


def main() -> None:
    """Trains until nobody gives it a turn any more."""
    options = arguments()
    loader = training_set(options)
    model = mnist_cnn(1, 28, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    turns = Turns()
    turns.begin()
    model.train()
    for epoch in range(options.epochs):
        for number, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            if number % 10 == 0:
                print(f"Train Epoch: {epoch} [{number}/{len(loader)}] Loss: {loss.item():.6f}", flush=True)
            turns.step(model.parameters())


if __name__ == "__main__":
    main()
