"""A bare loop whose memory is measured: grey images of 28 x 28 in memory as bytes, a batch made float at a time.

python scripts/opponents/bare_memory.py mnist_cnn <batch size> <steps> <images>
"""

from __future__ import annotations

import sys

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy


def main(model: str, batch_size: int, steps: int, samples: int) -> None:
    images = torch.randint(256, (samples, 1, 28, 28), dtype=torch.uint8)
    labels = torch.arange(samples) % 10
    if model == "resnet18":
        net = torchvision.models.resnet18(num_classes=10)
        net.conv1, net.maxpool = nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.Identity()
    else:
        net = nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.Conv2d(20, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(2000, 50), nn.ReLU(), nn.Linear(50, 10),
        )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    order = torch.randperm(len(images))
    for step in range(steps):
        index = order[step * batch_size : (step + 1) * batch_size]
        optimizer.zero_grad()
        cross_entropy(net(images[index].float() / 255), labels[index]).backward()
        optimizer.step()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
