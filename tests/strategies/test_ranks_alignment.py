"""Kernels read how weights and samples are aligned, so a layout may not hand them views at odd offsets.

cuDNN's heuristics look at the alignment of pointers, up to 32 bytes: a convolution whose weights lie 4 bytes further on
may take another algorithm, and have other bits (`scripts/lab/gpu_traps.py` tries it).
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_fits import Numbers, fits
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset

from lockstep.data import Spec, Splits

ALIGNED = 32  # bytes
SIZE = 13  # pixels: neither a sample nor a piece of them is a multiple of 32 bytes


class Odd(pl.LightningModule):
    """A block of odd sizes, large enough to be sharded. It notes where the weights and samples of each pass lie."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 7, 3), nn.Flatten(), nn.Linear(7 * 11 * 11, 67), nn.Linear(67, 3))
        self.places: list[tuple[str, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.places.append(("samples", x.data_ptr()))
        for name, layer in self.net.named_children():
            x = layer(x)
            for key, weights in layer.named_parameters():
                self.places.append((f"{name}.{key}", weights.data_ptr() if not hasattr(weights, "to_local") else -1))
        return F.cross_entropy(x, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> Splits:
    numbers = torch.Generator().manual_seed(0)
    dataset = Numbers(torch.randn(24, 3, SIZE, SIZE, generator=numbers), torch.arange(24) % 3)
    return Splits(dataset, Subset(dataset, range(3)), Subset(dataset, range(3)), Spec(3, SIZE, tuple("abc")), "")


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("dp", 2), ("ddp", 2), ("fsdp", 2)])
def test_weights_and_samples_of_every_layout_are_aligned(ranks: Ranks, strategy: str, world: int) -> None:
    results = fits(
        ranks, Odd(), world, strategy=strategy, batch_size=12, pieces=6, data=data(), limit_val_batches=0,
        parts={"blocks": "net.2"} if strategy == "fsdp" else {},
    )  # fmt: skip
    for result in results:
        places = result.trainer.lightning_module.places
        assert {name for name, _ in places} >= {"samples", "0.weight", "2.weight"}
        assert [(name, place % ALIGNED) for name, place in places if place % ALIGNED] == []
