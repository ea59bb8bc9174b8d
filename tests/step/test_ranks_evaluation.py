"""What an evaluation logs and counts on several ranks: every sample once, also on ranks with unequal parts."""

from collections.abc import Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_fits import CLASSES, Net, layout_of, splits, trainer_and_data
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import CatMetric, MeanMetric, R2Score
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lockstep.errors import UserError
from lockstep.launch.process_group import TensorHeader, gather_objects
from lockstep.lightning.logged_values import EPOCH, Key, Logged, reduced
from lockstep.lightning.results import EvaluationLogs
from lockstep.step.collectives import MetricStates, StateGather, find_metrics, gather_tensors
from lockstep.step.metrics import Count, ExactMean

pytestmark = pytest.mark.filterwarnings("ignore")

# --- EvaluationLogs.reduce --------------------------------------------------------------------------------------------

VALUES = torch.tensor([0.5, 3.0, -1.0, 2.0, 8.0, 0.25, 1.0])
PARTS = [[[0, 1, 2, 3, 4, 5, 6]], [[0, 1, 2], [3, 4, 5, 6]], [[0, 1, 2, 3], [4], [5, 6]], [[0, 1, 2, 3, 4], [], [5, 6]]]


def batches(samples: Sequence[int], size: int = 2) -> list[Tensor]:
    """Return a rank's batches. A rank without a sample evaluates one that does not count."""
    return [VALUES[samples[at : at + size]] for at in range(0, len(samples), size)] if samples else []


META: dict[str, Any] = {
    "prog_bar": False,
    "logger": True,
    "on_step": False,
    "on_epoch": True,
    "enable_graph": False,
    "sync_dist": False,
}


def test_values_are_summed_in_float64() -> None:
    """In float32, ones would be lost beside 2**24."""
    logs = EvaluationLogs()
    logs.batch_size = 1
    for value in (2.0**24, 1.0, 1.0, 1.0, 1.0):
        logs.log("validation_step", "value", torch.tensor(value), reduce_fx="sum", batch_size=1, **META)
    logs.reduce(lambda local: [local], 5, lambda tensor, **options: tensor)
    assert float(logs["validation_step.value"].compute()) == 2**24 + 4


def end_logs(value: Any, parts: Any, rank: int, **options: Any) -> Any:
    """Return what is left of a value that each rank logs once, at the end of the evaluation."""
    logs, samples = EvaluationLogs(), len(parts[rank])
    logs.batch_size = 1
    meta = {**META, "reduce_fx": "mean", **options}
    logs.log("on_validation_epoch_end", "value", torch.tensor(float(value(rank))), **meta)
    logs.reduce(gather_objects, samples, lambda tensor, **options: tensor)
    return float(logs["on_validation_epoch_end.value"].compute())


def test_a_value_of_the_epochs_end(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """The same on all ranks: taken as it is. Else the mean by samples, with a line; a rank without a sample is out."""
    parts = PARTS[3]  # 5, 0 and 2 samples
    assert ranks(3, lambda rank: end_logs(lambda r: 4.0, parts, rank)) == [4.0] * 3
    assert not caplog.records
    assert ranks(3, lambda rank: end_logs(lambda r: 4.0 if r != 1 else 99.0, parts, rank)) == [4.0] * 3
    assert not caplog.records, "the rank without a sample has no part in it"
    mean = pytest.approx((5 * 1.0 + 2 * 3.0) / 7)
    assert ranks(3, lambda rank: end_logs(lambda r: r + 1, parts, rank)) == [mean] * 3
    assert "value, logged in on_validation_epoch_end, differs between ranks" in caplog.text


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 1.0 + 3.0), ("max", 3.0), ("min", 1.0)])
def test_a_value_of_the_epochs_end_that_asks_for_a_reduction(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, reduction: str, expected: float
) -> None:
    of_rank: Any = lambda rank: end_logs(lambda r: r + 1, PARTS[3], rank, reduce_fx=reduction, sync_dist=True)  # noqa: E731
    assert ranks(3, of_rank) == [expected] * 3
    assert not caplog.records


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", PARTS[1:])
def test_our_metrics_count_each_sample_once(ranks: Ranks, parts: Any) -> None:
    def of_rank(rank: int) -> tuple[float, int]:
        mean, count = ExactMean(), Count()
        for batch in batches(parts[rank], 3):
            mean.update(batch)
            count.update(batch > 0.3)
        return float(mean.compute()), int(count.compute())

    assert ranks(len(parts), of_rank) == [(float(VALUES.double().mean()), int((VALUES > 0.3).sum()))] * len(parts)


@pytest.mark.parametrize("sizes", [(1, 2), (0, 3, 1), (2, 0, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_tensors_of_any_size_are_gathered(ranks: Ranks, sizes: Sequence[int], dtype: torch.dtype) -> None:
    """The shapes first, then the contents; an empty state gets the dtype and the dimensions of the others."""

    def of_rank(rank: int) -> list[Tensor]:
        state = torch.full((sizes[rank], 2), rank + 1).to(dtype) if sizes[rank] else torch.tensor([])
        return gather_tensors(state, "a state")

    for parts in ranks(len(sizes), of_rank):
        for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            assert (part.dtype, part.shape) == (dtype, (size, 2))
            assert torch.equal(part, torch.full((size, 2), rank + 1).to(dtype))


def test_only_the_ranks_of_a_group_send_their_parts(ranks: Ranks) -> None:
    def of_rank(rank: int) -> list[int]:
        group = torch.distributed.new_group([0, 2])
        return [len(part) for part in gather_tensors(torch.ones(rank + 1), "a state", group)] if rank != 1 else []

    assert ranks(3, of_rank) == [[1, 3], [], [1, 3]]


def test_metrics_are_seen_in_callbacks_too() -> None:
    class HasMetrics(pl.Callback):
        def __init__(self) -> None:
            self.metric, self.more = MeanMetric(), {"sums": [CatMetric()]}

    module, callback = Net(), HasMetrics()
    module.accuracy = MulticlassAccuracy(CLASSES)
    trainer: Any = SimpleNamespace(lightning_module=module, callbacks=[callback])
    assert find_metrics(trainer) == [
        ("accuracy", module.accuracy),
        ("HasMetrics.metric", callback.metric),
        ("HasMetrics.more.sums.0", callback.more["sums"][0]),
    ]


def test_values_are_weighted_by_any_number_of_samples() -> None:
    """Float32 would round these numbers to the same one."""
    count = 2**25
    key = Key("", "", "mean", EPOCH, torch.float64, {}, True)
    logged = [Logged(key, value, 1.0) for value in (1.0, 0.0)]
    numbers = reduced([(count + 1, logged[0]), (count, logged[1])])[0]
    assert numbers == (count + 1) / (2 * count + 1) != 0.5


def test_a_gathered_tensor_keeps_its_gradient(ranks: Ranks) -> None:
    def of_rank(rank: int) -> list[bool]:
        mine = torch.ones(rank + 1, requires_grad=True)
        return [part is mine for part in gather_tensors(mine, "a tensor")]

    assert ranks(3, of_rank) == [[rank == other for other in range(3)] for rank in range(3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: torch.zeros(2, dtype=torch.float64 if rank else torch.float32), "[2] of torch.float32, [2] of"),
        (lambda rank: torch.zeros((1,) * (rank + 1)), "[1], [1, 1], [1, 1, 1]: they must have the same dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_on_all_ranks(ranks: Ranks, make: Any, message: str) -> None:
    errors = ranks(3, lambda rank: gather_tensors(make(rank), "a state"), errors=UserError)
    assert len({str(error) for error in errors}) == 1
    assert message in str(errors[0])


def test_ranks_that_gather_different_things_are_refused_on_all_ranks(ranks: Ranks) -> None:
    def of_rank(rank: int) -> Any:
        return gather_objects(TensorHeader("x", (), torch.float32) if rank == 2 else None)

    errors = ranks(4, of_rank, errors=UserError)
    assert {str(error).partition(":")[0] for error in errors} == {"rank 2 is in x, and rank 0 is not"}


@pytest.mark.parametrize("make", [CatMetric, MeanMetric, lambda: MulticlassAUROC(CLASSES)])
def test_a_metric_of_torchmetrics_on_ranks_without_a_sample(ranks: Ranks, make: Any) -> None:
    """Its empty list of states would be sent as float32 of no dimension, and the group would abort."""
    numbers = torch.Generator().manual_seed(0)
    p, y = torch.rand(9, CLASSES, generator=numbers), torch.arange(9) % CLASSES

    def value(metric: Any, samples: Any) -> Any:
        if len(samples):
            metric.update(*((p[samples], y[samples]) if isinstance(metric, MulticlassAUROC) else (p[samples, 0],)))
        return sorted(torch.as_tensor(metric.compute()).flatten().tolist())

    expected = value(make(), list(range(9)))
    parts: list[list[int]] = [[0, 1, 2, 3, 4], [], [5, 6, 7, 8], []]

    def of_rank(rank: int) -> Any:
        metric = make()
        metric.dist_sync_fn = StateGather("metric")
        return value(metric, parts[rank])

    for result in ranks(4, of_rank):
        assert result == pytest.approx(expected)


def test_states_on_ranks_without_a_sample_have_the_form_of_the_others(ranks: Ranks) -> None:
    """A sum begins without dimensions, in float32, and is what the batches are. One of a sample may have fewer, too."""
    numbers = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 9, 1, generator=numbers, dtype=torch.float64)
    parts: list[list[int]] = [[0, 1, 2, 3, 4], [], [5, 6, 7, 8], []]

    def of_rank(rank: int) -> float:
        module: Any = Net()
        module.r2 = R2Score()
        trainer: Any = SimpleNamespace(lightning_module=module, callbacks=[])
        states = MetricStates(trainer)
        module.r2.update(*((x[parts[rank]], y[parts[rank]]) if parts[rank] else (x[0], y[0])))
        if not parts[rank]:
            states.restore(trainer)
        module.r2.dist_sync_fn = StateGather("metric")
        return float(module.r2.compute())

    whole = R2Score()
    whole.update(x, y)
    assert ranks(4, of_rank) == [pytest.approx(float(whole.compute()))] * 4


def test_a_batch_that_does_not_count_leaves_no_trace_in_a_metric() -> None:
    """But its lists then have the dtype and the dimensions of the others."""
    module: Any = Net()
    module.auroc, module.mean = MulticlassAUROC(CLASSES), MeanMetric()
    module.mean.update(torch.tensor(3.0))
    assert float(module.mean.compute()) == 3.0
    trainer: Any = SimpleNamespace(lightning_module=module, callbacks=[])
    states = MetricStates(trainer)
    module.auroc.update(torch.rand(1, CLASSES).softmax(1), torch.tensor([0]))
    module.mean.update(torch.tensor(99.0))
    states.restore(trainer)
    assert module.mean._computed is None, "with it, compute() would take no part in the collective of the others"
    assert float(module.mean.compute()) == 3.0
    assert [(part.shape, part.dtype) for part in module.auroc.preds] == [((0, CLASSES), torch.float32)]
    assert [(part.shape, part.dtype) for part in module.auroc.target] == [((0,), torch.int64)]


# --- whole evaluations by our Trainer ---------------------------------------------------------------------------------


class Scores(Net):
    def __init__(self) -> None:
        super().__init__(norm=False)
        self.accuracy, self.auroc = MulticlassAccuracy(CLASSES), MulticlassAUROC(CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        p = self(x).softmax(1)
        self.accuracy(p, y)
        self.auroc(p, y)
        self.log("acc", self.accuracy)
        self.log("auroc", self.auroc)
        self.log("loss", F.cross_entropy(p, y))
        self.log("largest", p.max(), reduce_fx="max")
        self.log("smallest", p.min(), reduce_fx="min")
        self.log("right", (p.argmax(1) == y).sum(), reduce_fx="sum")
        self.log("nan", p.mean() / (y != 1).all() * 0)  # of some batches, so of all ranks
        if (p.argmax(1) == 2).any():
            self.log("sometimes", p[:, 2].mean(), batch_size=len(x))

    test_step = validation_step


def evaluate(rank: int, module: pl.LightningModule, world: int, samples: int, stage: str = "validate") -> Any:
    trainer, data = trainer_and_data(rank, layout_of(world), splits(evaluated=samples))
    [numbers] = getattr(trainer, stage)(deepcopy(module), datamodule=data, verbose=False)
    return numbers


@pytest.mark.parametrize(
    ("stage", "world", "samples"),
    [("validate", 3, 10), ("validate", 4, 9), ("validate", 4, 1), ("validate", 2, 30), ("test", 4, 9)],
)
def test_an_evaluation_has_the_numbers_of_one_device(ranks: Ranks, stage: str, world: int, samples: int) -> None:
    """Nine samples leave one of four ranks without a batch, one sample three of them."""
    module = Scores()
    expected = evaluate(0, module, 1, samples, stage)
    x, y = splits(evaluated=samples).val[:]
    p = module.eval()(x).softmax(1)
    by_hand = {
        "loss": F.cross_entropy(p, y),
        "largest": p.max(),
        "smallest": p.min(),
        "right": (p.argmax(1) == y).sum(),
    }
    assert {name: expected[name] for name in by_hand} == pytest.approx({n: float(v) for n, v in by_hand.items()})
    for numbers in ranks(world, lambda rank: evaluate(rank, module, world, samples, stage)):
        assert numbers == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert expected != pytest.approx(evaluate(0, module, 1, samples % 30 + 3, stage), rel=1e-5), "the control"


class Acts(Net):
    """Does something with its output in each batch of an evaluation, and with all samples at its end."""

    def __init__(self, in_batch: Any = None, at_end: Any = None) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, dist_sync_on_step=in_batch is not None)
        self.in_batch, self.at_end = in_batch, at_end

    def on_validation_epoch_start(self) -> None:
        self.seen: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0])
        if self.in_batch:
            self.in_batch(self, self(batch[0]))
        else:
            self.accuracy.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        if self.at_end:
            self.at_end(self)


def classes(y: Tensor) -> Tensor:
    return torch.zeros(len(y), dtype=torch.int64)


IN_BATCH: list[tuple[Any, str]] = [
    (lambda module, y: module.all_gather(y.sum()), "gather from other ranks"),
    (lambda module, y: module.trainer.strategy.barrier(), "wait for other ranks"),
    (
        lambda module, y: module.log("y", y.sum(), on_step=True, on_epoch=False, sync_dist=True),
        "log with sync_dist=True",
    ),
    (lambda module, y: module.accuracy(y, classes(y)), "gather the metric accuracy"),
    (
        lambda module, y: (module.accuracy.update(y, classes(y)), module.accuracy.compute()),
        "gather the metric accuracy",
    ),
    (lambda module, y: module.trainer.strategy.reduce_boolean_decision(True), "reduce a decision"),
    (lambda module, y: module.trainer.strategy.broadcast(1), "broadcast"),
    (lambda module, y: torch.distributed.all_reduce(y.sum()), "communicate with other ranks"),
]


@pytest.mark.parametrize(("action", "message"), IN_BATCH)
def test_a_collective_in_a_batch_is_refused_on_all_ranks_where_some_have_more(
    ranks: Ranks, action: Any, message: str
) -> None:
    module = Acts(in_batch=action)
    errors = ranks(2, lambda rank: evaluate(rank, module, 2, 9), errors=UserError)
    for error in errors:
        assert str(error).startswith(f"strategy=ddp: validation_step can't {message}, since the ranks have 2 and 3 ")
        assert ("leave out dist_sync_on_step, and log the metric" in str(error)) == ("accuracy" in message)
    even = ranks(2, lambda rank: evaluate(rank, module, 2, 8), errors=UserError)
    assert not any(isinstance(result, UserError) for result in even), "the control"


def gather_all(module: Any) -> None:
    module.all_gather(torch.cat(module.seen))


def gather_means(module: Any) -> None:
    module.all_gather(torch.cat(module.seen).mean())


def reduce_sum(module: Any) -> None:
    module.trainer.strategy.reduce(torch.cat(module.seen).sum(), reduce_op="sum")


def gather_on_zero(module: Any) -> None:
    if module.global_rank == 0:
        module.all_gather(torch.zeros(()))


def compute_on_zero(module: Any) -> None:
    if module.global_rank == 0:
        module.accuracy.compute()


@pytest.mark.parametrize(
    ("action", "samples", "message"),
    [
        (gather_all, 9, "all_gather in on_validation_epoch_end: the ranks have tensors of different sizes, "),
        (gather_means, 1, "all_gather in on_validation_epoch_end: 1 sample on 2 ranks leave a rank without one: "),
        (gather_on_zero, 8, "rank 0 is in all_gather in on_validation_epoch_end, and rank 1 is not: all ranks must "),
        (
            lambda module: module.all_gather(module.seen),  # a list of batches
            9,
            "rank 1 is in all_gather in on_validation_epoch_end, and rank 0 is not: all ranks must ",
        ),
        (
            compute_on_zero,
            8,
            "rank 0 is in the gathering of the metric accuracy, and rank 1 is not: all ranks must gather",
        ),
        (reduce_sum, 1, "strategy.reduce in on_validation_epoch_end: 1 sample on 2 ranks leave a rank without one"),
        (gather_all, 8, ""),
        (gather_means, 9, ""),
    ],
)
def test_what_a_hook_gathers_fits_or_is_refused_on_all_ranks(
    ranks: Ranks, action: Any, samples: int, message: str
) -> None:
    module = Acts(at_end=action)
    for result in ranks(2, lambda rank: evaluate(rank, module, 2, samples), errors=UserError):
        assert isinstance(result, UserError) == bool(message)
        assert not message or message in str(result)


def test_a_mean_of_unequal_parts_is_named_once(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    module = Acts(at_end=gather_means)
    ranks(2, lambda rank: evaluate(rank, module, 2, 9))
    assert caplog.text.count("the ranks have 4 and 5 samples, so the mean of their means is not the mean") == 2


class LogsMetric(Net):
    def __init__(self) -> None:
        super().__init__(norm=False)
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        p = self(batch[0])
        self.accuracy(p, batch[1])
        self.log("train/acc", self.accuracy, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(p, batch[1])


def test_a_rank_without_a_sample_in_training_joins_the_metric_of_the_epoch(ranks: Ranks) -> None:
    module = LogsMetric()

    def of_rank(rank: int, world: int = 4) -> float:
        trainer, data = trainer_and_data(rank, layout_of(world), splits(2, 1), limit_val_batches=0)
        trainer.fit(deepcopy(module), datamodule=data)
        return float(trainer.callback_metrics["train/acc"])

    assert ranks(4, of_rank) == [pytest.approx(of_rank(0, 1))] * 4


class Predicts(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self(batch[0]))


def test_predicting_refuses_a_collective_where_a_rank_has_no_batch(ranks: Ranks) -> None:
    def of_rank(rank: int) -> Any:
        trainer, data = trainer_and_data(rank, layout_of(2), splits(evaluated=1))
        return trainer.predict(Predicts(), datamodule=data)

    results = ranks(2, of_rank, errors=UserError)
    assert any("predict_step can't gather from other ranks, since the ranks have 0 and 1 b" in str(r) for r in results)
