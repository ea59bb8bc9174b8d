"""What happens to a batch on the device: normalisation and augmentation."""

import numpy as np
import pytest
import torch
from small_data import arrays, layout, module, splits, step_batches

from lockstep.data.augment import Augment


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_finish_normalises_in_the_modules_dtype(dtype: torch.dtype) -> None:
    dataset = arrays(30)
    data = module(splits(dataset), layout(batch_size=8), net=torch.nn.Linear(1, 1).to(dtype))
    micro_batch = step_batches(data)[0].micro_batches[0]
    x, y = data.prepare(micro_batch)
    wanted = (dataset.images[micro_batch.ids].double() / 255 - 0.4) / 0.2
    assert x.dtype == dtype
    assert torch.allclose(x.double(), wanted, atol={torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 3e-2))
    assert torch.equal(y, dataset.labels[micro_batch.ids])


def test_draws_are_keyed_by_seed_epoch_and_sample() -> None:
    augment, ids = Augment(crop=1), np.arange(1000)
    numbers = augment.random_numbers(1, 2, ids)
    assert numbers is not None
    assert numbers.dtype == torch.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    assert torch.equal(augment.random_numbers(1, 2, ids[[7, 3]]), numbers[[7, 3]])  # type: ignore[arg-type]
    for other in (augment.random_numbers(2, 2, ids), augment.random_numbers(1, 3, ids)):
        assert other is not None
        assert (other != numbers).float().mean() > 0.99
    assert Augment().random_numbers(1, 2, ids) is None


@pytest.mark.parametrize("fill", ["zero", "reflect"])
def test_augmentation_against_padding_and_slicing(fill: str) -> None:
    images = arrays(200, size=9).images
    numbers = torch.rand(200, 3)
    got = Augment(crop=2, flip=True, fill=fill)(images, numbers)
    mode = {"zero": "constant", "reflect": "reflect"}[fill]
    padded = torch.from_numpy(np.pad(images.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode))  # type: ignore[call-overload]
    tops, lefts = (numbers[:, :2] * 5).long().T.tolist()
    for index, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        # mirrored before the shift or after it, the set of outcomes is the same; here the mirror acts on the window
        window = padded[index, :, top : top + 9, left : left + 9]
        mirrored = padded[index].flip(2)[:, top : top + 9, 4 - left : 13 - left].flip(2)
        assert torch.equal(mirrored, window)
        wanted = padded[index].flip(2)[:, top : top + 9, 4 - left : 13 - left] if numbers[index, 2] < 0.5 else window
        assert torch.equal(got[index], wanted)
