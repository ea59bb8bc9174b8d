"""`lockstep.Trainer`: hooks that use the batch of a step, or what `training_step` returned, as with Lightning's."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from small_data import refusal_of
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from trainer.small import BATCH, SAMPLES, Data, Net, fit, loader, samples, trainer

import lockstep
from lockstep.step.batch import CannotJoin, joined

LAYOUTS: dict[str, dict[str, Any]] = {
    "one piece": {"pieces": 1},
    "four pieces": {"pieces": 4},
    "dp": {"pieces": 4, "strategy": "dp", "devices": 3},
}


class Looks(Net):
    """Uses the batch in its hooks in the usual ways, and adds up what it gets."""

    total: Tensor
    rows = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4, dtype=torch.float64))
        self.pieces: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.pieces.clear()
        assert len(batch) == 2
        assert len(x) == len(y) == len(batch[0])
        self.total[0] += x.double().sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.pieces.append(x)
        scores = self.net(x)
        loss = torch.nn.functional.cross_entropy(scores, y)
        names = [f"sample {int(each)}" for each in y]
        return {"loss": loss, "scores": scores, "y": y, "acc": (scores.argmax(1) == y).float().mean(), "names": names}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        seen = torch.cat(self.pieces) if self.pieces else x[:0]
        assert torch.equal(x[x[:, 0].argsort()], seen[seen[:, 0].argsort()]), "dp computes the pieces in another order"
        assert torch.equal(outputs["y"], y)
        assert not outputs["scores"].requires_grad
        assert outputs["scores"].shape == (len(y), 3)
        assert outputs["names"] == [f"sample {int(each)}" for each in y]
        assert outputs["acc"].shape == outputs["loss"].shape == ()
        assert outputs.get("scores") is outputs["scores"]
        correct = (outputs["scores"].argmax(1) == y).float().sum()
        assert torch.isclose(outputs["acc"] * len(y), correct)
        self.rows += len(x)


class AsCallback(pl.Callback):
    rows = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rows += len(batch[1].tolist())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs.keys() == {"loss", "scores", "y", "acc", "names"}
        for each in batch:
            assert len(each) == len(outputs["y"])
        assert len(batch.to(torch.device("cpu"))[0]) == len(outputs["y"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_get_the_samples_of_the_step(tmp_path: Path, layout: str) -> None:
    module, callback = Looks(), AsCallback()
    made = trainer(tmp_path, callbacks=[callback], **LAYOUTS[layout])
    made.fit(module, loader())
    assert module.rows == callback.rows == 2 * SAMPLES
    assert module.total[0] == pytest.approx(2 * float(samples().tensors[0].double().sum()))


def test_looking_at_a_batch_changes_no_bit(tmp_path: Path) -> None:
    class Transformed(Net):
        def on_after_batch_transfer(self, batch: Any, n: int) -> Any:
            return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]

    class LooksOnly(Transformed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.shapes = [each.shape for each in batch]

    one = fit(tmp_path, kind=Transformed, exact=True, pieces=4)
    assert fit(tmp_path, kind=LooksOnly, exact=True, pieces=4) == one
    assert fit(tmp_path, kind=Net, exact=True, pieces=4) != one


class Dicts(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["x"], batch["y"]), batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert batch.keys() == {"x", "y", "name"}
        assert "x" in batch
        assert set(batch) == {"x", "y", "name"}
        assert len(batch["name"]) == len(batch["x"]) == len(dict(batch.items())["y"])


class OneTensor(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert batch.shape[1:] == (8,)
        assert len(batch) == batch.size(0)


def as_dicts(items: list[Any]) -> dict[str, Any]:
    x, y = zip(*items, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y), "name": [str(int(each)) for each in y]}


def test_batches_of_other_kinds(tmp_path: Path) -> None:
    fit(tmp_path, kind=Unused, pieces=4)
    fit(tmp_path, loader(collate_fn=as_dicts), kind=Dicts, pieces=4)
    fit(tmp_path, DataLoader(list(samples().tensors[0]), BATCH), kind=OneTensor, pieces=4)  # type: ignore[arg-type]


def test_lightnings_monitor_of_the_throughput_reads_the_batch(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: batch[0].size(0), window_size=2)
    fit(tmp_path, callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1, pieces=4)


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("parts", "sizes", "expected"),
    [
        ([torch.ones(2, 3), torch.zeros(1, 3)], [2, 1], torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3])),
        ([("a", "b"), ("c",)], [2, 1], ("a", "b", "c")),
        ([[{"box": 1}], [{"box": 2}, {"box": 3}]], [1, 2], [{"box": 1}, {"box": 2}, {"box": 3}]),
        ([[{"box": torch.ones(5, 4)}] * 2] * 2, [2, 2], None),
        ([{"n": 3, "x": [1, 2]}, {"n": 3, "x": [3]}], [2, 1], {"n": 3, "x": [1, 2, 3]}),
        ([Pair([1, 2, 3], [2] * 3), Pair([3], [4])], [3, 1], Pair([1, 2, 3, 3], [2, 2, 2, 4])),
        ([(torch.ones(2), ["a", "b"]), (torch.ones(2), ["c", "d"])], [2, 2], (torch.ones(4), ["a", "b", "c", "d"])),
        ([torch.eye(3), torch.eye(3)], [2, 1], torch.eye(3)),
        ([None, None], [1, 2], None),
    ],
)
def test_parts_of_pieces_are_put_together(parts: list[Any], sizes: list[int], expected: Any) -> None:
    result = joined(parts, sizes)
    if isinstance(expected, Tensor):
        assert torch.equal(result, expected)
    elif isinstance(result, list) and expected is None:
        assert [each["box"].shape for each in result] == [(5, 4)] * 4
    elif isinstance(expected, tuple) and isinstance(expected[0], Tensor):
        assert torch.equal(result[0], expected[0])
        assert result[1] == expected[1]
    else:
        assert result == expected


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        ([torch.ones(2, 3), torch.zeros(1, 4)], [2, 1]),  # padded to unlike lengths
        ([torch.eye(3), 2 * torch.eye(3)], [2, 1]),
        ([torch.ones(2), None], [2, 1]),
        ([[1, 2, 3], [1]], [2, 1]),
        ([{"a": 1}, {"b": 1}], [1, 1]),
        ([1, 2], [1, 1]),
    ],
)
def test_what_has_no_rows_can_not_be_put_together(parts: list[Any], sizes: list[int]) -> None:
    with pytest.raises(CannotJoin):
        joined(parts, sizes)


class InPlace(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(2)


class Matrix(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "matrix": batch[0].T @ batch[0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["matrix"]


class Untouched(list[Any]):
    def __len__(self) -> int:
        raise AssertionError("it is put together")


class Unused(Matrix):
    """Returns what no hook uses, so nothing is put together."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "more": Untouched()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["loss"].shape == ()


class Padded(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[:2], batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch[2]


def padded(items: list[Any]) -> Any:
    x, y = zip(*items, strict=True)
    return torch.stack(x), torch.stack(y), torch.zeros(len(x), 1 + int(10 * max(float(each.max()) for each in x)))


@pytest.mark.parametrize(
    ("module", "data", "line"),
    [
        (InPlace, loader, "an on_train_batch_start changes the batch in place"),
        (Matrix, loader, "a hook uses outputs['matrix'], and what training_step returned for the pieces"),
        (
            Padded,
            lambda: loader(collate_fn=padded),
            "the batches of its 4 pieces can't be put together: use batch.micro",
        ),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(tmp_path: Path, module: Any, data: Any, line: str) -> None:
    assert line in refusal_of(trainer(tmp_path, pieces=4).fit, module(), data())


class ByPosition(Net):
    """Takes part in the transfer of batches, with other names of arguments than Lightning's."""

    calls: tuple[str, ...] = ()

    def on_before_batch_transfer(self, b: Any, i: int) -> Any:
        assert i == 0
        return b[0] + 1, b[1]

    def transfer_batch_to_device(self, b: Any, d: Any, i: int) -> Any:
        assert d == torch.device("cpu")
        return b[0] * 2, b[1]

    def on_after_batch_transfer(self, b: Any, *rest: Any) -> Any:
        return b[0] - 3, b[1]

    def _check(self, batch: Any) -> None:
        expected = (samples().tensors[0] + 1) * 2 - 3
        assert {round(each, 4) for each in batch[0].flatten().tolist()} <= {
            round(each, 4) for each in expected.flatten().tolist()
        }

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._check(batch)
        assert len(batch[0]) < BATCH
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._check(batch)
        super().validation_step(batch, batch_idx)


class DataByPosition(Data):
    """Has these hooks in the data module; they come before those of the module."""

    on_before_batch_transfer = ByPosition.on_before_batch_transfer  # type: ignore[assignment]
    transfer_batch_to_device = ByPosition.transfer_batch_to_device  # type: ignore[assignment]
    on_after_batch_transfer = ByPosition.on_after_batch_transfer  # type: ignore[assignment]


class Checks(ByPosition):
    def on_after_batch_transfer(self, b: Any, *rest: Any) -> Any:
        raise AssertionError("Lightning calls the data module's")


def test_hooks_of_the_transfer_get_pieces_by_position(tmp_path: Path) -> None:
    exact: dict[str, Any] = {"exact": True, "pieces": 2}
    one = fit(tmp_path, loader(), loader(shuffle=False), kind=ByPosition, **exact)
    assert fit(tmp_path, loader(), kind=ByPosition, strategy="dp", devices=2, **exact) == one
    fit(tmp_path, DataByPosition(), kind=Checks, **exact)


@pytest.mark.usefixtures("processes")
def test_ranks_get_their_samples_and_an_empty_rank_gets_none(tmp_path: Path) -> None:
    """The last step has one sample, so one of two ranks has none."""

    class Rows(Looks):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 3))

    def rows() -> list[int]:
        module = Rows()
        data = DataLoader(Subset(samples(), range(131)), batch_size=26)
        trainer(tmp_path, max_epochs=1, pieces=2).fit(module, data)
        return lockstep.gather_objects(module.rows)

    assert sum(lockstep.launch(rows, devices=2)) == 131
