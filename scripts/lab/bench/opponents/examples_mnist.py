"""Train like the MNIST program of pytorch/examples, written anew from its description, for `benchmark.py accuracy`:

    python scripts/lab/bench/opponents/examples_mnist.py <folder with MNIST/> 0.99

It has the same network, optimizer, schedule, batch sizes and data path: torchvision's MNIST through per-image
transforms and a DataLoader. In addition it ends when an epoch's test accuracy reaches the target, and prints the
seconds since its start. Exit codes: 0 target reached, 1 not reached.
"""

# ruff: noqa: E402
import time

STARTED = time.perf_counter()  # before the imports, because users wait for them too

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

EPOCHS = 14


def network() -> nn.Module:
    """Return the network, from images [n, 1, 28, 28] to log-probabilities [n, 10], with 1.2 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1),
    )  # fmt: skip


def main(data_dir: str, target: str) -> int:
    torch.manual_seed(1)
    pixels = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train, test = (datasets.MNIST(data_dir, train=part, transform=pixels) for part in (True, False))
    model = network()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for images, labels in DataLoader(train, 64, shuffle=True):
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = torch.cat([model(images).argmax(1) == labels for images, labels in DataLoader(test, 1000)])
        accuracy = float(right.double().mean())
        print(f"epoch {epoch}  test/acc {accuracy:.4f}  {time.perf_counter() - STARTED:.1f} s", flush=True)
        if accuracy >= float(target):
            return 0
        scheduler.step()
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
