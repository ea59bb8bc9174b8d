"""What the planted programs share: data, networks, arguments."""

import argparse
import os

import torch
from torch import Tensor, nn

STEP = 16  # samples of an optimizer step


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--bug", default="")
    parser.add_argument("--net", default="mlp", choices=NETS)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw", "sign"))
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--normalize", action="store_true")
    parser.add_argument("--schedule", action="store_true")
    return parser.parse_args()


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Drift(nn.Module):
    """Keeps a running mean of what passes, which the network does not use while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x


class Wave(nn.Module):
    """Makes small differences large."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)


class Last(nn.Module):
    """Takes the last 12 columns."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -12:]


class Labelled(nn.Module):
    """Gets the labels too, and first, as Hugging Face's collators give them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(12, 4)

    def forward(self, labels: Tensor, x: Tensor) -> Tensor:
        return self.net(x)


NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)),
    "norm": lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
    "group": lambda: nn.Sequential(nn.Linear(12, 8), nn.GroupNorm(2, 8), nn.GELU(), nn.Linear(8, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)),
    "drift": lambda: nn.Sequential(nn.Linear(12, 8), Drift(), nn.ReLU(), nn.Linear(8, 4)),
    "sharp": lambda: nn.Sequential(nn.Linear(12, 8), *[Wave() for _ in range(3)], nn.Linear(8, 4)),
    "labelled": Labelled,
    "last": lambda: nn.Sequential(Last(), nn.Linear(12, 4)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 4)
    ),
}


def data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 12, generator=generator)
    return x, (x[:, :4] + 0.5 * torch.randn(samples, 4, generator=generator)).argmax(1)
