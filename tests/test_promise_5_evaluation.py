"""Metrics that don't depend on who evaluated what, in which order."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.step.metrics import Count, ExactMean


def evaluated(chunks: list[Tensor]) -> tuple[ExactMean, Count]:
    mean, total = ExactMean(), Count()
    for chunk in chunks:
        mean.update(chunk)
        total.update(chunk > 1)
    return mean, total


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 60), scale=st.floats(-8, 8))
def test_any_order_any_chunks_any_devices_same_numbers(seed: int, n: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.exponential(10.0**scale, n))
    mean, total = (metric.compute() for metric in evaluated([values]))

    order = torch.from_numpy(rng.permutation(n))
    cuts = sorted(rng.integers(0, n + 1, 5).tolist())
    chunks = [values[order[a:b]] for a, b in zip([0, *cuts], [*cuts, n], strict=True) if a < b]
    for whole, other in zip(evaluated(chunks[:2]), evaluated(chunks[2:]), strict=True):
        merged = copy.deepcopy(whole)
        merged.merge_state(other)  # what torchmetrics makes of several devices
        assert merged.compute() == (mean if isinstance(whole, ExactMean) else total)

    assert float(mean) == pytest.approx(math.fsum(values.tolist()) / n, abs=2.0**-33, rel=1e-15)
    assert int(total) == sum(value > 1 for value in values.tolist())


def test_a_share_of_samples_is_rounded_once() -> None:
    mean = ExactMean()
    mean.update(torch.arange(359) < 123)
    assert float(mean.compute()) == 123 / 359


def test_the_sum_forgets_no_small_one() -> None:
    """Added up in floats, in either precision, the small ones would be lost beside the large one."""
    mean = ExactMean()
    mean.update(torch.tensor([2.0**36] + [2.0**-20] * 64, dtype=torch.float64))
    assert float(mean.compute()) == (2**36 * 2**20 + 64) / (65 * 2**20)


@pytest.mark.filterwarnings("ignore:.*compute.*before.*update:UserWarning")
def test_broken_values_and_none_are_no_number() -> None:
    for bad in (math.nan, math.inf, -math.inf, 1e30):
        assert evaluated([torch.tensor([0.5, bad])])[0].compute().isnan()
    mean, total = evaluated([])
    assert mean.compute().isnan()
    assert total.compute() == 0
