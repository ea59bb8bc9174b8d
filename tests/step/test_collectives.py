"""Metrics of a user's module in evaluation, on ranks with unequal parts that talk by gloo.

Each test forks the ranks once. gloo aborts the processes where dtypes or sizes differ, which ranks that are threads
(test_ranks_evaluation.py) can't show.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from rank_fits import CLASSES, SAMPLES, Net, layout_of, splits, trainer_and_data
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, MinMetric, PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassPrecision,
    MulticlassPrecisionRecallCurve,
    MulticlassROC,
)
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from lockstep.arithmetic.layout import Layout
from lockstep.errors import UserError
from lockstep.launch.environment import environment
from lockstep.launch.process_group import TensorHeader
from lockstep.lightning.torch_ddp import number_of_collectives
from lockstep.step.collectives import StateGather, check_same_shapes
from lockstep.strategies import DDP

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")
SIZES = (1, 5, 9, 30)


def run_rank(rank: int, world: int, folder: Path, work: Callable[[], Any], answers: Any) -> None:
    """Run `work` as one rank of a group. Put its result, or its traceback, into `answers`."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test")
    os.environ["LOCKSTEP_LAUNCHER"] = "lockstep"
    environment.cache_clear()
    torch.set_num_threads(1)
    try:
        store, wait = dist.FileStore(str(folder / "store"), world), timedelta(seconds=20)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
        answers.put((rank, work()))
        dist.barrier()
    except BaseException:
        answers.put((rank, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    os._exit(0)


def on_ranks(world: int, folder: Path, work: Callable[[], Any]) -> list[Any]:
    """Return what `work` returns on each rank of a new group."""
    context = get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, world, folder, work, answers)) for rank in range(world)]
    for process in ranks:
        process.start()
    try:
        results = dict(answers.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
    return [results[rank] for rank in range(world)]


class Scores:
    """Metrics in a plain object."""

    def __init__(self) -> None:
        self.metrics = [MulticlassAUROC(CLASSES)]


class Metrics(Net):
    resets = True

    def __init__(self) -> None:
        super().__init__(norm=False)
        kinds = {"ap": MulticlassAveragePrecision, "auroc": MulticlassAUROC, "precision": MulticlassPrecision}
        self.each = MetricCollection({name: kind(CLASSES) for name, kind in kinds.items()}, prefix="each/")
        self.by_class = ClasswiseWrapper(MulticlassAUROC(CLASSES, average=None))
        self.roc, self.curve = MulticlassROC(CLASSES), MulticlassPrecisionRecallCurve(CLASSES)
        self.spearman, self.pearson = SpearmanCorrCoef(), PearsonCorrCoef()
        self.values, self.mean, self.least = CatMetric(), MeanMetric(), MinMetric()
        self.local_gather = MulticlassAUROC(CLASSES, dist_sync_fn=gather_all_tensors)
        self.extremes = MinMaxMetric(MulticlassAccuracy(CLASSES))
        self.plain = Scores()
        self.by_hand = MulticlassAUROC(CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        p, y = self(batch[0]).softmax(1), batch[1]
        for metric in (self.by_class, self.roc, self.curve, self.local_gather, self.extremes, self.by_hand):
            metric.update(p, y)
        self.plain.metrics[0].update(p, y)
        self.each(p, y)
        self.log_dict(self.each)
        for correlation in (self.spearman, self.pearson):
            correlation.update(p[:, 0], y.float())
        self.log("spearman", self.spearman)
        for summary in (self.values, self.mean, self.least):
            summary(p[:, 0])
        self.log("mean", self.mean, on_step=True, on_epoch=True)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        computed = {name: getattr(self, name).compute() for name in HAND}
        with self.by_hand.sync_context():  # without its `dist_sync_fn`
            computed["by_hand"] = torch.cat([values.flatten() for values in self.by_hand.preds]).sum()
        computed["plain"] = self.plain.metrics[0].compute()
        self.computed = computed
        if self.resets:
            for name in (*HAND, "by_hand"):
                getattr(self, name).reset()
            self.plain.metrics[0].reset()

    on_test_epoch_end = on_validation_epoch_end


HAND = ("by_class", "roc", "curve", "pearson", "values", "least", "local_gather", "extremes")


def evaluate_metrics() -> list[dict[str, list[float]]]:
    """Return the numbers of evaluations of each size, on all ranks of this process's group."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    numbers = []
    for samples in SIZES:
        for stage in ("validate", "test") if samples == 9 else ("validate",):
            module = Metrics()
            module.resets = stage == "test"
            trainer, data = trainer_and_data(rank, layout_of(world, batch_size=24, pieces=12), splits(SAMPLES, samples))
            for _ in range(1 + (samples == 9)):  # the second evaluation begins with what the first one has left
                [logged] = getattr(trainer, stage)(module, datamodule=data, verbose=False)
            logged = {name: value for name, value in logged.items() if not name.endswith("_step")}
            numbers.append(flat({"samples": samples, **logged, **module.computed}))
    return numbers


def flat(values: dict[str, Any]) -> dict[str, list[float]]:
    """Return tensors, and nested lists and dicts of them, as lists of numbers."""
    return {name: sorted(_numbers(value)) if name == "values" else _numbers(value) for name, value in values.items()}


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list | tuple):
        return [number for each in (value.values() if isinstance(value, dict) else value) for number in _numbers(each)]
    return torch.as_tensor(value).double().flatten().tolist()


@pytest.mark.usefixtures("processes")
@pytest.mark.filterwarnings("ignore")
def test_metrics_have_the_number_of_one_device(tmp_path: Path) -> None:
    """Those with lists of values, too, where a rank has no sample: 9 on 4, for example."""
    expected = evaluate_metrics()
    for rank in on_ranks(4, tmp_path, evaluate_metrics):
        assert isinstance(rank, list), rank
        for got, one in zip(rank, expected, strict=True):
            assert got.keys() == one.keys()
            for name in one.keys() - ({"pearson"} if one["samples"] == [1] else set()):
                assert got[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5, nan_ok=True), (name, one["samples"])


# --- what lies below --------------------------------------------------------------------------------------------------


def test_the_first_sizes_that_differ_are_named() -> None:
    headers = [TensorHeader("val/x", (size,), torch.float32) for size in (2, 2, 3, 4, 5, 6, 7)]
    check_same_shapes(headers[:2], "log it")
    with pytest.raises(UserError) as refused:
        check_same_shapes(headers, "log it")
    sizes = "[2], [3], [4], [5] and 2 more"
    assert str(refused.value) == f"val/x: the ranks have tensors of different sizes, {sizes}: log it"
    other = TensorHeader("val/x", (2,), torch.int64)
    with pytest.raises(UserError, match=r"sizes, \[2\] of torch.float32, \[2\] of torch.int64: log it$"):
        check_same_shapes([headers[0], other], "log it")


def test_a_metric_is_copied_and_pickled_without_the_strategy() -> None:
    metric = MulticlassAUROC(CLASSES, dist_sync_fn=StateGather("metric auroc", object()))
    assert metric.clone().dist_sync_fn is metric.dist_sync_fn
    unpickled = pickle.loads(pickle.dumps(metric)).dist_sync_fn
    assert (unpickled.name, unpickled.strategy) == ("metric auroc", None)


def counted_collectives() -> int:
    before = number_of_collectives()
    dist.all_reduce(torch.zeros(1))
    return number_of_collectives() - before


@pytest.mark.usefixtures("processes")
def test_gloo_counts_its_collectives(tmp_path: Path) -> None:
    """By the count, a collective that passes by the strategy is found in an evaluation batch."""
    assert on_ranks(2, tmp_path, counted_collectives) == [1, 1]


def test_ddp_is_built_on_the_stream_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buckets are filled with zeros there, before the first gradient."""
    strategy: Any = DDP().build(Layout("ddp", "cpu", 2, 1, 4, 2)).strategy
    strategy.model = nn.Linear(2, 2)
    strategy._lightning_module = Mock(named_buffers=dict)
    made = Mock()
    monkeypatch.setattr("lockstep.lightning.process_per_device.FixedBucketsDDP", made)
    monkeypatch.setattr(strategy, "determine_ddp_device_ids", lambda: [0])
    monkeypatch.setattr(torch.cuda, "Stream", Mock(side_effect=AssertionError("another stream")))
    strategy.configure_ddp()
    assert made.call_args.kwargs["device_ids"] == [0]
