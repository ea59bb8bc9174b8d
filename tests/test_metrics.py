"""Metrics that don't depend on who evaluated what, in which order."""

from __future__ import annotations

import copy
import math
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_confusion_matrix

from lockstep.step.metrics import Evaluation, ExactMean

Chunk = tuple[Tensor, Tensor, Tensor]  # losses, logits, labels


def evaluated(chunks: list[Chunk], classes: int) -> Evaluation:
    found = Evaluation(classes)
    for chunk in chunks:
        found.update(*chunk)
    return found


def merged(parts: list[Evaluation]) -> Evaluation:
    """What torchmetrics makes of several devices: states are added."""
    whole = copy.deepcopy(parts[0])
    for part in parts[1:]:
        for mine, other in zip(whole.children(), part.children(), strict=True):
            assert isinstance(mine, Metric)
            mine.merge_state(cast(Metric, other))
    return whole


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 60), classes=st.sampled_from([2, 5, 10, 17]), scale=st.floats(-8, 8)
)
def test_any_order_any_chunks_any_devices_same_numbers(seed: int, n: int, classes: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    losses = torch.from_numpy(rng.exponential(10.0**scale, n))
    logits = torch.from_numpy(rng.normal(size=(n, classes)))
    labels = torch.from_numpy(rng.integers(0, classes, n))
    found, matrix = evaluated([(losses, logits, labels)], classes).compute()

    order = torch.from_numpy(rng.permutation(n))
    cuts = sorted(rng.integers(0, n + 1, 5).tolist())
    pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True) if a < b]
    chunks = [(losses[i], logits[i], labels[i]) for i in pieces]
    two_devices = merged([evaluated(chunks[:2], classes), evaluated(chunks[2:], classes)])
    for other, other_matrix in (evaluated(chunks, classes).compute(), two_devices.compute()):
        assert other == found
        assert torch.equal(other_matrix, matrix)

    assert found["loss"] == pytest.approx(math.fsum(losses.tolist()) / n, abs=2.0**-33, rel=1e-15)
    oracle = multiclass_confusion_matrix(logits, labels, classes)
    assert torch.equal(matrix, oracle)
    assert (found["correct"], found["count"]) == (int(oracle.trace()), n)
    assert isinstance(found["correct"], int)
    assert ("acc_top5" in found) == (classes > 10)
    if classes > 10:
        top = multiclass_accuracy(logits, labels, classes, top_k=5, average="micro")
        assert found["acc_top5"] == pytest.approx(float(top))


def test_the_sum_of_losses_forgets_no_small_one() -> None:
    """Added up in floats, in either precision, the small ones would be lost beside the large one."""
    mean = ExactMean()
    mean.update(torch.tensor([2.0**36] + [2.0**-20] * 64, dtype=torch.float64))
    assert mean.compute() == (2**36 * 2**20 + 64) / (65 * 2**20)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_broken_loss_is_seen_and_the_accuracy_stays(bad: float) -> None:
    losses, logits = torch.tensor([0.5, bad], dtype=torch.float64), torch.eye(2)
    found, _ = evaluated([(losses, logits, torch.tensor([0, 1]))], 2).compute()
    assert math.isnan(found["loss"])
    assert found["acc"] == 1.0


@pytest.mark.filterwarnings("ignore:.*compute.*before.*update:UserWarning")
def test_no_sample_is_no_number() -> None:
    found, matrix = Evaluation(3).compute()
    assert math.isnan(found["acc"])
    assert math.isnan(found["loss"])
    assert not matrix.any()


def test_reset_forgets_everything() -> None:
    evaluation = evaluated([(torch.ones(2), torch.eye(17)[:2], torch.tensor([0, 1]))], 17)
    evaluation.reset()
    evaluation.update(torch.full((1,), 3.0), -torch.arange(17.0)[None], torch.tensor([16]))
    found, _ = evaluation.compute()
    assert found == {"loss": 3.0, "acc": 0.0, "correct": 0, "count": 1, "acc_top5": 0.0}
