"""A piece begins at an aligned address, whoever fetches it with how many others: MKL chooses kernels by the address."""

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.arithmetic.layout import Layout
from lockstep.data import ArrayDataset, Spec, Splits, StepData

SIZE = 7  # a sample of 49 float32 numbers, so that views of several samples begin anywhere
IMAGES: Any = np.random.default_rng(0).standard_normal((120, 1, SIZE, SIZE), dtype=np.float32)
SPLITS = Splits(ArrayDataset(IMAGES, np.zeros(120, dtype=np.int64)), None, None, Spec(1, SIZE, ("a", "b")), "")


@pytest.mark.parametrize("first", [0, 1], ids=["from the start", "resumed"])
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 4)])
def test_images_that_are_floats(strategy: str, devices: int, first: int) -> None:
    layout = Layout(strategy, "cpu", devices, 1, 40, 4, True)
    for rank in range(devices):
        module = StepData(SPLITS, layout, 0, rank)
        steps = module._steps()
        for step in range(first, 3):
            for micro_batch in steps.__getitems__((0, step)).micro_batches:
                x, _ = module.prepare(micro_batch)
                assert torch.equal(x, torch.from_numpy(IMAGES[micro_batch.ids]))
                assert x.data_ptr() % 64 == 0
