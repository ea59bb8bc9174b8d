"""Folds: each sample is for validation once, each class alike, on every data set and layout, and refused if wrong."""

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Program
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule
from refusals import refused_with
from small_data import arrays, config, refusal_of, write_images
from torch.utils.data import DataLoader

from lockstep.data import ArrayDataset, Source, Spec
from lockstep.data.build import assign_folds, open_data
from lockstep.data.datasets import innermost_dataset
from lockstep.errors import UserError

RUN = (
    *("data=synthetic", "data.samples=150", "data.image_size=12", "data.num_classes=3", "data.folds=5", "data.fold=1"),
    *("batch_size=24", "max_epochs=2", "threads=1", "logger=none", "callbacks.dashboard=null", "model.dropout=0.2"),
    "accelerator=cpu",
)


@given(st.lists(st.integers(0, 4), max_size=80), st.integers(2, 12), st.integers(0, 2**32))
def test_folds_have_equal_shares_of_all_and_of_each_class(classes: list[int], folds: int, seed: int) -> None:
    labels = np.array(classes, dtype=np.int64)
    assigned = assign_folds(labels, folds, seed)
    for members in (assigned, *(assigned[labels == label] for label in range(5))):
        sizes = np.bincount(members, minlength=folds)
        assert len(sizes) == folds
        assert sizes.max() - sizes.min() <= 1


def test_folds_depend_on_seed_and_labels_alone() -> None:
    labels = np.arange(12) % 3
    assert assign_folds(labels, 3, 0).tolist() == FOLDS
    assert assign_folds(labels, 3, 1).tolist() != FOLDS


FOLDS = [2, 1, 0, 0, 1, 2, 1, 2, 2, 0, 0, 1]  # a changed split would make every run's fold another one


def opened(name: str, fold: int, data_dir: object = "nowhere", **changes: Any) -> Any:
    return open_data(config(name, folds=3, fold=fold, **changes), str(data_dir))


def of_files(dataset: Any) -> set[str]:
    names = innermost_dataset(dataset).names
    return {str(name) for name in (names[dataset.indices] if hasattr(dataset, "indices") else names)}


def test_each_sample_is_for_validation_once(tmp_path: Path) -> None:
    folds = [opened("digits", fold) for fold in range(3)]
    assert sorted(np.concatenate([each.val.indices for each in folds])) == list(range(1438))
    for each in folds:
        assert sorted([*each.train.indices, *each.val.indices]) == list(range(1438))
    assert "fold 2 of 3 (0 to 2) is for validation, each class alike" in folds[2].about
    plain = open_data(config("digits"), "nowhere")
    assert all(each.test.fingerprint() == plain.test.fingerprint() for each in folds)
    assert len({each.fingerprint for each in folds}) == 3

    # An opener that divides the images itself holds out nothing, and its test set is the same without folds.
    write_images(tmp_path, (".",), each=10)
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted(tmp_path.glob("*/*.png"))]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    (tmp_path / "split.csv").write_text("\n".join(["path,label,split", *(f"{row},train" for row in rows)]))
    options = {"image_size": 8}
    for name, more, tested in (
        ("image_folder", {}, 2),
        ("image_list", {"csv": str(tmp_path / "list.csv")}, 2),
        ("image_list", {"csv": str(tmp_path / "split.csv")}, 0),
    ):
        folds = [opened(name, fold, tmp_path, **options, **more) for fold in range(3)]
        validated = [of_files(each.val) for each in folds]
        assert not any(one & other for one, other in combinations(validated, 2))
        assert len(set.union(*validated)) == 20 - tested
        assert all(of_files(each.train) == set.union(*validated) - of_files(each.val) for each in folds)
        plain = open_data(config(name, **options, **more, val_fraction=0.2), str(tmp_path))
        assert [of_files(each.test) if tested else each.test for each in folds] == 3 * [
            of_files(plain.test) if tested else None
        ]


def test_validation_is_not_augmented_and_labels_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    augmenting, same = arrays(20), arrays(20)
    source = Source(augmenting, None, Spec(1, 6, ("a", "b")), val_candidates=same)
    monkeypatch.setattr("lockstep.data.build.instantiate", lambda *args, **offers: source)
    line = refusal_of(open_data, {"_target_": "mine.stripes", "folds": 2, "fold": 0}, "nowhere")
    assert line == "data.folds=2: the class a has 1 training sample: each class must have two at least"
    for each in (augmenting, same):
        each.labels = each.labels % 2
    actual = open_data({"_target_": "mine.stripes", "folds": 2, "fold": 0}, "nowhere")
    assert (actual.train.dataset, actual.val.dataset) == (augmenting, same)
    augmenting.labels = augmenting.labels / 2  # no classes
    actual = open_data({"_target_": "mine.stripes", "folds": 2, "fold": 0}, "nowhere")
    assert len(actual.val) == 10
    assert "for validation by chance, since the data set has no attribute labels" in actual.about


class Theirs(LightningDataModule):
    """A data module as other projects have it."""

    def train_dataloader(self) -> Any:
        dataset: Any = ArrayDataset(np.zeros((9, 1, 4, 4), np.uint8), np.arange(9) % 3)
        return DataLoader(dataset, batch_size=2)


class WithValidation(Theirs):
    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def test_a_lightning_data_module_has_folds_if_it_has_no_validation_set(tmp_path: Path) -> None:
    sizes = [
        open_data({"_target_": f"{__name__}.Theirs", "folds": 3, "fold": fold}, "nowhere").sizes for fold in (0, 2)
    ]
    assert sizes == 2 * [{"train": 6, "val": 3, "test": None}]
    with pytest.raises(UserError, match=r"brings its own validation set: leave data.folds out, or make"):
        open_data({"_target_": f"{__name__}.WithValidation", "folds": 3, "fold": 0}, "nowhere")
    write_images(tmp_path, ("train", "val"))
    with pytest.raises(UserError, match="data=image_folder brings its own validation set"):
        opened("image_folder", 0, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("data.fold=1", "^data.fold=1 has no effect without data.folds: give data.folds=5"),
        ("data.folds=5", "^data.folds=5 needs data.fold, 0 to 4: -m data.fold=0,1,2,3,4 runs them all$"),
        ("data.folds=1 data.fold=0", "^data.folds=1: must be greater than or equal to 2$"),
        ("data.folds=5 data.fold=5", "^data.fold=5: must be 0 to 4, since data.folds=5$"),
        ("data.folds=5 data.fold=-1", "^data.fold=-1: must be"),
        ("data.folds=2.5 data.fold=1", "^data.folds=2.5: must be"),
    ],
)
def test_folds_out_of_range_are_refused(overrides: str, message: str) -> None:
    refused_with(overrides, message)


def test_a_fold_is_evaluated_and_does_not_change_at_a_resume(run_train: Program, tmp_path: Path) -> None:
    """Its bits on other layouts and after a kill: the row `folds` of test_promise_4_same_result.py."""
    run = run_train(*RUN)
    summary, metrics = run.summary, run.summary["metrics"]
    assert summary["samples"] == {"train": 120, "val": 30, "test": 30}
    assert (metrics["val/count"], metrics["test/count"]) == (30, 30)

    evaluate = Program(tmp_path / "evaluated", "src/evaluate.py")
    tested = evaluate(f"checkpoint={run.folder}/checkpoints/last.ckpt", "split=val", "logger=none").summary["metrics"]
    for key in ("loss", "correct"):
        assert tested[f"test/{key}"] == pytest.approx(metrics[f"val/{key}"])

    refused = run_train(f"resume={run.folder}", "max_epochs=3", "data.fold=2", ok=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused
    assert re.match("error: data.fold=2, but .* was trained with 1: give data.fold=1; init_from=", refused.stderr)
    resumed = run_train(f"resume={run.folder}", "max_epochs=3", "strategy=ddp", "devices=2").summary
    assert (resumed["epochs"], resumed["samples_seen"], resumed["samples"]["val"]) == (3, 360, 30)
