"""The MNIST program of pytorch/examples, written anew after its description, for `benchmark.py accuracy`:

    python scripts/bench/opponents/examples_mnist.py --data-dir <folder with MNIST/> --target 0.99

Same network, optimizer, schedule, batch sizes and data path: torchvision's MNIST through per-image transforms and a
DataLoader. Added: it ends once an epoch's test accuracy reaches --target, and it says the seconds since it began.
Exit codes: 0 target reached, 1 not reached.
"""

# ruff: noqa: E402
import time

STARTED = time.perf_counter()  # before the imports: who waits for a result waits for them too

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adadelta, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Net(nn.Module):
    """Images [n, 1, 28, 28] to log-probabilities [n, 10]; 1.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.hidden = nn.Linear(9216, 128)
        self.dropout2 = nn.Dropout(0.5)
        self.logits = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.hidden(x)))
        return F.log_softmax(self.logits(x), dim=1)


def train(model: nn.Module, loader: DataLoader, optimizer: Optimizer) -> None:
    """One epoch."""
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> float:
    """Share of the images that are classified right."""
    model.eval()
    right = torch.cat([model(images).argmax(1) == labels for images, labels in loader])
    return float(right.double().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder that holds MNIST/raw")
    parser.add_argument("--epochs", type=int, default=14, help="at most (default: %(default)s)")
    parser.add_argument("--target", type=float, default=1.0, help="test accuracy that ends it (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(1)
    pixels = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    loaders = {
        split: DataLoader(
            datasets.MNIST(options.data_dir, train=split == "train", transform=pixels),
            batch_size=64 if split == "train" else 1000,
            shuffle=split == "train",
        )
        for split in ("train", "test")
    }
    model = Net()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, options.epochs + 1):
        train(model, loaders["train"], optimizer)
        accuracy = test(model, loaders["test"])
        print(f"epoch {epoch}  test/acc {accuracy:.4f}  {time.perf_counter() - STARTED:.1f} s", flush=True)
        if accuracy >= options.target:
            return 0
        scheduler.step()
    return 1


if __name__ == "__main__":
    sys.exit(main())
