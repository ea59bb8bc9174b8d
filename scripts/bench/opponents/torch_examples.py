"""The way of pytorch/examples' MNIST program, with this project's network: torchvision's data set and transforms, a
DataLoader, a loop with a line every 10 steps.

    python scripts/bench/opponents/torch_examples.py --data-dir data --workers 0 --threads 1
"""

from __future__ import annotations

import torch
from bare_loop import mnist_cnn
from mnist import arguments, training_set
from torch.nn.functional import cross_entropy
from turns import Turns


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
