"""`lockstep.Trainer`: what a loader decides of its samples and batches is as with Lightning's on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from trainer.small import BATCH, Net, loader, samples, trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"pieces": 4},
    "dp": {"pieces": 4, "strategy": "dp", "devices": 3},
}


class Sizes(Dataset[Any]):
    """Images of which each has another size, so that two of them can't be collated."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return torch.ones(8 + index), index


class Recorded(Net):
    """Records the sizes of evaluation batches."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Any] = []

    def _record(self, batch: Any, batch_idx: int) -> None:
        self.sizes.append(tuple(batch[0].shape))

    validation_step = test_step = predict_step = _record


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_batches_of_an_evaluation_have_the_loaders_size(tmp_path: Path, stage: str, layout: str) -> None:
    for options in ({}, {"batch_size": BATCH}):
        module = Recorded()
        made = trainer(tmp_path, **LAYOUTS[layout], **options)
        verbose = {} if stage == "predict" else {"verbose": False}
        getattr(made, stage)(module, DataLoader(samples(), batch_size=50), **verbose)
        assert [size[0] for size in module.sizes] == [50, 50, 32]
        module.sizes.clear()
        getattr(made, stage)(module, DataLoader(Sizes(), batch_size=1), **verbose)
        assert module.sizes == [(1, 8 + index) for index in range(7)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_batches_of_a_validation_in_fit_have_the_loaders_size(tmp_path: Path, layout: str) -> None:
    module = Recorded()
    trainer(tmp_path, max_epochs=1, **LAYOUTS[layout]).fit(module, loader(), DataLoader(Sizes(), batch_size=1))
    assert module.sizes == [(1, 8 + index) for index in range(7)]
