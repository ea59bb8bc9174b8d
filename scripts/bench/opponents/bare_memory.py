"""A bare loop whose memory is measured: grey images of 28 x 28 in memory as bytes, a batch made float at a time.

python scripts/bench/opponents/bare_memory.py mnist_cnn <batch size> <steps> <images>
"""

from __future__ import annotations

import sys

import torch
from bare_loop import NETWORKS
from torch.nn.functional import cross_entropy


def main(model: str, batch_size: int, steps: int, samples: int) -> None:
    images = torch.randint(256, (samples, 1, 28, 28), dtype=torch.uint8)
    labels = torch.arange(samples) % 10
    net = NETWORKS[model](1, 28, 10)
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
