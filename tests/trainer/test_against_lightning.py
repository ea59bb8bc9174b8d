"""What trains on other numbers than with Lightning's Trainer: it is the same on one device, or it is refused.

Each row is a program that Lightning runs. The samples are whole numbers, and what a program has trained on is compared.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset, WeightedRandomSampler
from torchmetrics import SumMetric
from trainer.small import QUIET

import lockstep

X = torch.arange(8.0).view(8, 1)


class Records(pl.LightningModule):
    """Records the numbers that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.trained: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch.x if isinstance(batch, Batch) else batch["in"]["x"] if isinstance(batch, dict) else batch[0]
        self.trained += x.flatten().tolist()
        return ((self.weight * x.float() - 1) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.001)


class Batch:
    """A batch of a user's own class."""

    def __init__(self, items: list[Any]) -> None:
        self.x = torch.stack([each[0] for each in items])


class Levels(Dataset[Any]):
    """Samples that a hook changes."""

    level = 0.0

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return (X[index] + self.level,)


class Batches(Levels):
    def __getitems__(self, ids: Any) -> Any:
        return (X[ids],)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        number = 0.0
        while True:
            yield (torch.tensor([number]),)
            number += 1


class ByScore(Sampler[int]):
    """An order that a hook changes."""

    def __init__(self) -> None:
        self.score: Any = {index: index for index in range(8)}

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(8), key=lambda index: self.score[index]))


class ByLevel(Sampler[int]):
    """An order that follows from what a hook changes in the data set."""

    def __init__(self, data: Levels) -> None:
        self.data = data

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(7, -1, -1) if self.data.level else range(8))


def by_level() -> Any:
    data = Levels()
    return DataLoader(data, batch_size=4, sampler=ByLevel(data))


class At(pl.Callback):
    """Calls a function with the trainer in a hook."""

    def __init__(self, hook: str, function: Callable[..., Any]) -> None:
        setattr(self, hook, lambda trainer, module, *args: function(trainer, *args))


class Metrics(Records):
    """Metrics and a teacher in lists and dicts, which are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics, self.teachers = {"samples": SumMetric()}, [nn.Linear(1, 1, bias=False)]
        nn.init.zeros_(self.teachers[0].weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.metrics["samples"].update(len(batch[0]))
        with torch.no_grad():
            self.teachers[0].weight += 1
        self.trained += [float(self.metrics["samples"].compute()), self.teachers[0].weight.item()]
        return super().training_step(batch, batch_idx)


class Labels(Records):
    """Changes whole numbers in place, as what is moved to another range."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        y += 1
        self.trained.append(float(y.float().mean()))
        return ((self.weight * x - y) ** 2).mean()


class InHook(Records):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, Batch):
            batch.x = batch.x + 100
        else:
            batch[0].add_(100)
        return batch


class Data(pl.LightningDataModule):
    """One whose level a hook changes, and whose own hook counts."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.level, self.counts = 0, counts

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.level += self.counts
        return [batch[0] + 100 * self.level]


def trained(kind: Any, folder: Path, made: Any, module: Any = Records, callback: Any = None, **options: Any) -> Any:
    """Return what a module has been trained on in a fit of a Trainer of some kind."""
    fits = {**QUIET, "enable_checkpointing": False, "default_root_dir": folder, "max_epochs": 2, **options}
    model, data = module(), made()
    callbacks = [] if callback is None else [callback(data)]
    trainer = kind(**fits, callbacks=callbacks)
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(model, datamodule=data)
    else:
        trainer.fit(model, data)
    return model.trained[-16:]  # without the trial passes


def loader(dataset: Any, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(dataset() if isinstance(dataset, type) else dataset, **{"batch_size": 4, **options})


def rises(data: Any) -> pl.Callback:
    """Return a callback that changes the data set before the second epoch."""
    return At("on_train_epoch_start", lambda trainer: setattr(data.dataset, "level", 100.0 * trainer.current_epoch))


SAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "whole numbers in place": (loader(TensorDataset(X, torch.zeros(8, 1, dtype=torch.long))), {"module": Labels}),
    "a batch of a class": (loader(TensorDataset(X), collate_fn=Batch), {"module": InHook}),
    "whole numbers in a hook": (loader(TensorDataset(X.long())), {"module": InHook}),
    "collate_fn of whole batches": (loader(Batches, collate_fn=lambda batch: (batch[0] / 100,)), {}),
    "an order that a hook changes at the start of an epoch": (by_level, {"callback": rises}),
    "metrics in containers": (loader(TensorDataset(X)), {"module": Metrics}),
    "an attribute of the data module": (
        Data,
        {"callback": lambda data: At("on_train_epoch_end", lambda trainer: setattr(trainer.datamodule, "level", 1))},
    ),
    "a data module that counts": (lambda: Data(counts=True), {}),
}


@pytest.mark.parametrize("name", SAME)
def test_it_is_trained_on_the_same_numbers(name: str, tmp_path: Path) -> None:
    made, options = SAME[name]
    wanted = trained(pl.Trainer, tmp_path, made, **options)
    assert trained(lockstep.Trainer, tmp_path, made, **options) == wanted
    assert wanted != X.flatten().tolist() * 2, "the control: what is special about the row changes the numbers"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_hook_may_change_the_data_set_between_epochs(workers: int, tmp_path: Path) -> None:
    made = loader(Levels, num_workers=workers)
    seen = trained(lockstep.Trainer, tmp_path, made, callback=rises)
    assert seen == trained(pl.Trainer, tmp_path, made, callback=rises) == [*range(8), *range(100, 108)]


def test_an_endless_stream_gives_as_many_samples_as_steps_need(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "max_epochs": None}
    seen = trained(lockstep.Trainer, tmp_path, loader(Endless, batch_size=1), batch_size=4, **options)
    assert seen == trained(pl.Trainer, tmp_path, loader(Endless), **options) == list(range(16))


def test_predictions_are_of_all_samples(tmp_path: Path) -> None:
    class Predicts(Records):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0].flatten()

    trainer = lockstep.Trainer(**QUIET, default_root_dir=tmp_path)
    predicted = trainer.predict(Predicts(), DataLoader(TensorDataset(X), batch_size=3, drop_last=True))
    assert torch.cat(predicted).tolist() == X.flatten().tolist()


def test_the_data_module_of_a_trainer_is_of_the_users_class(tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(_: Any) -> pl.Callback:
        return At("on_train_start", lambda trainer: seen.append(isinstance(trainer.datamodule, Data)))

    trained(lockstep.Trainer, tmp_path, Data, callback=look)
    assert seen == [True]


def test_torch_stays_as_the_user_has_set_it(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        lockstep.Trainer(**QUIET, default_root_dir=tmp_path)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class Outside(Records):
    """Its optimizer has a parameter that is in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Parameter(torch.ones(1))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.more[0].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight, *self.more], 0.001)


def weighted(weights: Any) -> Callable[[], Any]:
    return lambda: DataLoader(TensorDataset(X), batch_size=4, sampler=WeightedRandomSampler(weights, 8))


def change(of: str, value: Any) -> Any:
    """Return what makes a callback that changes an attribute of the loader's sampler after an epoch."""
    return lambda data: At("on_train_epoch_end", lambda trainer: setattr(data.sampler, of, value))


def shuffle_list(data: Any) -> pl.Callback:
    return At("on_train_epoch_end", lambda trainer: data.sampler.reverse())


def grow(data: Any) -> pl.Callback:
    return At("on_train_epoch_end", lambda trainer: setattr(data.dataset, "indices", list(range(8))))


def nested(data: Any) -> pl.Callback:
    return At("on_train_batch_start", lambda trainer, batch, index: batch["in"].update(x=batch["in"]["x"] + 1))


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "other weights": (
        weighted([1.0] * 8),
        {"callback": change("weights", [1.0] + [0.0] * 7)},
        "weights of the Weighted",
    ),
    "no weight": (weighted([0.0] * 8), {}, "all samples have the weight 0"),
    "another dict": (
        loader(TensorDataset(X), sampler=ByScore()),
        {"callback": change("score", {index: -index for index in range(8)})},
        "ByScore whose score was changed",
    ),
    "another list": (
        lambda: DataLoader(TensorDataset(X), batch_size=4, sampler=list(range(8))),
        {"callback": shuffle_list},
        "list whose content was changed",
    ),
    "more samples": (
        lambda: DataLoader(Subset(TensorDataset(X), [0, 1, 2, 3]), batch_size=4),
        {"callback": grow},
        "has 8",
    ),
    "a list of one loader": (lambda: [DataLoader(TensorDataset(X), batch_size=4)], {}, "give the loader itself"),
    "a part of a batch": (
        loader([{"in": {"x": each}} for each in X]),
        {"callback": nested},
        "on_train_batch_start changes the batch",
    ),
    "a parameter outside": (
        loader(TensorDataset(X)),
        {"module": Outside, "pieces": 2},
        "that the module does not have",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_is_refused(name: str, tmp_path: Path) -> None:
    made, options, message = REFUSED[name]
    with pytest.raises(lockstep.UserError, match=message):
        trained(lockstep.Trainer, tmp_path, made, **options)
