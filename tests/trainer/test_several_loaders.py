"""`lockstep.Trainer`: a module's loaders, several loaders of an evaluation, and plain data sets."""

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from rank_fits import layout_of, splits, trainer_and_data
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split
from torchmetrics import MeanMetric
from trainer.small import BATCH, LAYOUTS, QUIET, Data, Net, fit, loader, samples, trainer

import lockstep
from lockstep.data.step_data import StepData
from lockstep.data.user_data import user_splits
from lockstep.errors import UserError

SIZES = [(0, 30, 7), (30, 80, 9), (80, 81, 4)]  # first sample, end and batch size; the last loader has one sample


def loaders(data: Any = None) -> list[DataLoader[Any]]:
    data = data or samples()
    return [DataLoader(Subset(data, range(*part)), batch_size=size) for *part, size in SIZES]


class Several(Net):
    """Logs in the usual ways for each of several loaders, and records which batches its hooks get."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.seen: list[tuple[str, int, int, int]] = []

    def _log(self, batch: Any, name: str, number: int) -> None:
        self.log(f"{name}_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        self.log(f"{name}_samples", float(len(batch[0])), reduce_fx="sum")
        self.log(f"{name}_only_{number}", batch[0].mean(), add_dataloader_idx=False)
        self.log(f"{name}_least", batch[0].min(), reduce_fx="min", on_step=True, on_epoch=True)
        self.mean.update(batch[0])
        self.log(f"{name}_mean", self.mean)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.seen.append(("validation_step", batch_idx, dataloader_idx, len(batch[0])))
        self._log(batch, "val", dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.seen.append(("test_step", batch_idx, dataloader_idx, len(batch[0])))
        self._log(batch, "test", dataloader_idx)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.seen.append(("end", batch_idx, dataloader_idx, len(batch[0])))

    def on_validation_epoch_end(self) -> None:
        self.log("val_twice", 2 * self.trainer.callback_metrics["val_loss/dataloader_idx_1"], sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:  # type: ignore[override]
        self.seen.append(("predict_step", batch_idx, dataloader_idx, len(batch[0])))
        first: Tensor = batch[0]
        return first


class NothingElse(Several):
    on_validation_epoch_end: Any = pl.LightningModule.on_validation_epoch_end


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, number: int, dataloader_idx: int
    ) -> None:
        self.written.append((indices, number, dataloader_idx))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append((indices, [[len(each) for each in part] for part in predictions]))


def both(folder: Path, **options: Any) -> list[Any]:
    """Return Lightning's Trainer and ours."""
    made = trainer(folder, **options)
    return [pl.Trainer(default_root_dir=folder, **{**QUIET, "callbacks": options.get("callbacks")}), made]


def shaped(kind: str) -> Any:
    made = loaders()
    shapes = {"list": made, "dict": dict(zip("cab", made, strict=True)), "nested": [made[0], made[1:]]}
    return Whole() if kind == "data module" else shapes[kind]


class Whole(pl.LightningDataModule):
    """Returns the same loaders."""

    def val_dataloader(self) -> Any:
        return loaders()

    test_dataloader = predict_dataloader = val_dataloader


@pytest.mark.parametrize(
    ("kind", "layout"), [("list", "dp"), ("dict", "one"), ("nested", "dp"), ("data module", "one")]
)
def test_several_loaders_give_what_lightning_gives(tmp_path: Path, kind: str, layout: str) -> None:
    results: list[tuple[Any, ...]] = []
    pl.seed_everything(0, verbose=False)
    module = Several()
    for made in both(tmp_path, callbacks=[writer := Writer()], **LAYOUTS[layout]):
        module.seen, writer.written = [], []
        validated = made.validate(module, shaped(kind), verbose=False)
        tested = made.test(module, shaped(kind), verbose=False)
        predicted = made.predict(module, shaped(kind))
        results.append((validated, tested, module.seen, [torch.cat(each).tolist() for each in predicted]))
        results[-1] += (writer.written,)
        assert type(made.predict_dataloaders) is (list if kind == "data module" else type(shaped(kind)))
    expected, ours = results
    assert [len(each) for each in ours[0]] == [len(each) for each in expected[0]]
    for these, those in zip((*ours[0], *ours[1]), (*expected[0], *expected[1]), strict=True):
        assert these == pytest.approx(those, abs=1e-6)
    assert ours[2:] == expected[2:]


@pytest.mark.parametrize(("limit", "batches"), [(2, [2, 2, 2]), (0.5, [2, 3, 1]), (0, [])])
def test_a_limit_counts_the_batches_of_each_loader(tmp_path: Path, limit: Any, batches: list[int]) -> None:
    data = loaders()
    data[2] = DataLoader(Subset(samples(), range(2)), batch_size=1)
    module, made = Several(), trainer(tmp_path, limit_test_batches=limit, limit_predict_batches=limit)
    made.test(module, data, verbose=False)
    numbers = [each[2] for each in module.seen if each[0] == "test_step"]
    assert [numbers.count(each) for each in sorted(set(numbers))] == batches
    assert [len(each) for each in made.predict(module, data) or []] == batches


class Opens(Several):
    """Opens its data in `setup`, by torch's global random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {TrainerFn(stage).value}")
        self.parts = random_split(samples(), [108, 23, 1])
        self.first = self.parts[0].indices[0]

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts[0], batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(each, batch_size=8) for each in self.parts]

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    predict_dataloader = test_dataloader

    def on_train_start(self) -> None:
        dataset: Any = self.trainer.train_dataloader.dataset  # type: ignore[union-attr]
        assert dataset.indices[0] == self.first, "the sets of the one call of setup are used"


def opens(folder: Path, **options: Any) -> tuple[Any, ...]:
    """Return the hash of a fit that stops by the second loader's metric, and what its evaluations give."""
    pl.seed_everything(0, verbose=False)
    module = Opens()
    stop = EarlyStopping("val_loss/dataloader_idx_1", patience=0, min_delta=0.04, mode="min")
    made = trainer(folder, callbacks=[stop], max_epochs=8, exact=True, enable_checkpointing=False, **options)
    made.fit(module)
    followed = {name: float(value) for name, value in made.callback_metrics.items()}
    tested = made.test(module, verbose=False)
    predicted = [sum(map(len, each)) for each in made.predict(module) or [[]]]
    counts = [sum(each) for each in zip(*lockstep.gather_objects(predicted), strict=True)]
    assert module.calls in (
        ["prepare_data", "setup fit", "prepare_data", "setup test", "prepare_data", "setup predict"],
        ["setup fit", "setup test", "setup predict"],
    )
    return lockstep.weights_sha256(module.state_dict()), made.global_step, followed, tested, counts


@pytest.mark.usefixtures("whole_run")
def test_a_module_with_loaders_follows_the_second_ones_metric_to_one_hash(tmp_path: Path) -> None:
    one = opens(tmp_path, pieces=4)
    assert one[1] not in (5, 40), "it stops between the first epoch and the last"
    assert one[4] == [108, 23, 1]
    assert [each[f"test_samples/dataloader_idx_{number}"] for number, each in enumerate(one[3])] == one[4]
    assert opens(tmp_path, pieces=4, strategy="dp", devices=3) == one
    for strategy in ("ddp", "fsdp"):
        other = lockstep.launch(lambda kind=strategy: opens(tmp_path, pieces=4, strategy=kind), devices=2)
        assert other == one, strategy


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_sample_of_each_loader_counts_once_on_ranks(ranks: Ranks, strategy: str, world: int) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data, module = loaders(), Several()
    read = user_splits(None, "test", 0, data)

    def evaluate(rank: int, world: int, method: str) -> Any:
        layout = layout_of(world, batch_size=24, strategy=strategy if world > 1 else "single")
        made, _ = trainer_and_data(rank, layout, splits())
        copy = deepcopy(module)
        owned = StepData(read, layout, 0, rank, trains=False)
        options = {} if method == "predict" else {"verbose": False}
        result = getattr(made, method)(copy, datamodule=owned, **options)
        return result, [each for each in copy.seen if each[0] != "end"]

    (one, seen) = evaluate(0, 1, "test")
    of_ranks = ranks(world, lambda rank: evaluate(rank, world, "test"))
    for result, _ in of_ranks:
        assert [each.keys() for each in result] == [each.keys() for each in one]
        for these, those in zip(result, one, strict=True):
            values = {name: value for name, value in those.items() if "_step" not in name}
            assert {name: these[name] for name in values} == pytest.approx(values, abs=1e-6)
    dummies = world - 1  # of the loader with one sample
    assert sum(len(seen) for _, seen in of_ranks) == len(seen) + dummies
    predictions = [result for result, _ in ranks(world, lambda rank: evaluate(rank, world, "predict"))]
    for number, (start, stop, _) in enumerate(SIZES):
        parts = [torch.cat(of_rank[number]) for of_rank in predictions if of_rank and of_rank[number]]
        assert torch.equal(torch.cat(parts), samples().tensors[0][start:stop])


def test_a_modules_loaders_are_used_where_lightning_uses_them(tmp_path: Path) -> None:
    class Beside(Net):
        def val_dataloader(self) -> Any:
            return DataLoader(Subset(samples(), range(11)), batch_size=4)

    class WithoutValidation(Data):
        val_dataloader: Any = pl.LightningDataModule.val_dataloader

    cases: list[tuple[Any, ...]] = [(loader(),), (loader(), loader(shuffle=False)), (Data(),), (WithoutValidation(),)]
    for data in cases:
        lengths = []
        for made in both(tmp_path, enable_checkpointing=False, max_epochs=1):
            made.fit(Beside(), *data)
            val = made.val_dataloaders
            lengths.append(len(val.dataset) if val is not None and val != [] else 0)
        assert lengths[0] == lengths[1], data
    with pytest.warns(UserWarning, match="val_dataloader of Beside is not called, since a data module is given"):
        trainer(tmp_path, max_epochs=1).fit(Beside(), Data())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_data_sets_are_cut_by_the_trainers_batch_size(tmp_path: Path, layout: str) -> None:
    options = {"exact": True, "batch_size": BATCH, **LAYOUTS[layout]}
    data: Any = ConcatDataset([samples()])  # no tensors: any map-style data set
    assert fit(tmp_path, data, data, **options) == fit(tmp_path, loader(), **options)
    made = trainer(tmp_path, **options)
    assert torch.equal(torch.cat(made.predict(Net(), lockstep.DataModule(predict=data))), samples().tensors[0])
    mean = float(samples().tensors[0].double().mean())
    assert made.test(Net(), data, verbose=False)[0]["mean_x"] == pytest.approx(mean, abs=1e-6)
    assert len(made.test(Several(), [data, samples()], verbose=False)) == 2
    assert torch.equal(torch.cat(made.predict(Net(), data)), samples().tensors[0])


class TwoTrain(Net):
    def train_dataloader(self) -> Any:
        return [loader(), loader()]


class NoIndex(Net):
    def test_dataloader(self) -> Any:
        return loaders()


@pytest.mark.parametrize(
    ("module", "method", "data", "line"),
    [
        (Net, "fit", samples(), "the batch size is unknown: give Trainer(batch_size=...)"),
        (Net, "test", samples(), "the batch size is unknown: give Trainer(batch_size=...)"),
        (Net, "fit", [loader(), loader()], "trainer.fit returns a list: it must be one torch DataLoader"),
        (Net, "fit", {"a": loader(), "b": loader()}, "trainer.fit returns a dict: it must be one torch DataLoader"),
        (Net, "fit", CombinedLoader([loader(), loader()]), "it must be one torch DataLoader"),
        (TwoTrain, "fit", None, "the train_dataloader of TwoTrain returns a list: it must be one torch DataLoader"),
        (Net, "test", [loader(), 3], "data: the test_dataloader[1] of trainer.test returns a int"),
        (Net, "test", CombinedLoader([loader()]), "it must be one torch DataLoader"),
        (Net, "test", torch.ones(5, 8), "returns a Tensor: it must be one torch DataLoader"),
        (Net, "test", [loader(), DataLoader(Subset(samples(), []))], "the data set of test_dataloader is empty"),
        (NoIndex, "test", None, "dataloader_idx"),
    ],
)
def test_what_can_not_be_used_is_refused_in_a_line(
    tmp_path: Path, module: Any, method: str, data: Any, line: str
) -> None:
    with pytest.raises((UserError, RuntimeError)) as refused:
        getattr(trainer(tmp_path), method)(module(), data)
    assert line in str(refused.value)


@pytest.mark.parametrize(("steps", "expected"), [(2, [2, 2, 1]), (-1, [5, 6, 1]), (1, [1, 1, 1])])
def test_a_sanity_check_has_its_number_of_batches(tmp_path: Path, steps: int, expected: list[int]) -> None:
    class Counts(pl.Callback):
        numbers: tuple[int, ...] = ()

        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            self.numbers = tuple(each[2] for each in pl_module.seen)

    module, counts = NothingElse(), Counts()
    made = trainer(tmp_path, num_sanity_val_steps=steps, max_steps=1, callbacks=[counts])
    made.fit(module, loader(), loaders())
    assert [counts.numbers.count(number) for number in range(3)] == expected


def test_a_run_goes_on_inside_an_epoch_to_the_same_bits(tmp_path: Path) -> None:
    def run(folder: Path, steps: int, ckpt_path: Any = None) -> str:
        options: dict[str, Any] = {"val_check_interval": 2, "exact": True, "pieces": 2, "max_steps": steps}
        return fit(folder, loader(), loaders(), kind=Several, ckpt_path=ckpt_path, **options)

    whole = run(tmp_path / "whole", 9)
    run(tmp_path / "cut", 4)
    (last,) = (tmp_path / "cut").rglob("last.ckpt")
    assert run(tmp_path / "cut", 9, ckpt_path=last) == whole


def test_a_metric_of_no_loader_is_refused_before_the_first_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[EarlyStopping("val_loss")])
    with pytest.raises(UserError, match="val_loss/dataloader_idx_0"):
        made.fit(NothingElse(), loader(), loaders())
    assert made.global_step == 0
