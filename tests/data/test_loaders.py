"""What the loaders of all ranks read: the pieces of the one order, each at the device that owns it."""

from dataclasses import replace
from functools import partial

import pytest
from data_orders import layout, orders, stream_orders
from hypothesis import given
from hypothesis import strategies as st
from small_data import arrays

from lockstep.arithmetic.layout import Assignment, Layout
from lockstep.arithmetic.order import DataOrder
from lockstep.data.augment import Augment
from lockstep.data.loaders import StepDataset, StepSampler
from lockstep.data.splits import Splits
from lockstep.data.step_data import StepData
from lockstep.launch import machine


@given(orders() | stream_orders(), st.integers(0, 3), st.integers(1, 6), st.sampled_from(["ddp", "dp"]))
def test_what_the_ranks_load_is_the_order_on_every_layout(
    order: DataOrder, epoch: int, devices: int, strategy: str
) -> None:
    """The loader's own path: each piece, as it is loaded, is the order's, and lies with the device that owns it."""
    alone = order.layout
    on = layout(alone.batch_size, alone.pieces, min(devices, alone.pieces), strategy)
    dataset = arrays(order.samples, size=2)
    order_on, assignment = replace(order, layout=on), Assignment(on)
    loaded = [StepDataset(dataset, order_on, rank, Augment(), assignment) for rank in range(on.world_size)]
    for index in range(order.steps_per_epoch):
        at_once = [each.__getitems__((epoch, index)) for each in loaded]
        pieces = {piece: ids.tolist() for piece, ids in enumerate(order.pieces(epoch, index)) if len(ids)}
        actual: dict[int, list[int]] = {}
        for step_batch in at_once:
            step = epoch * order.steps_per_epoch + index
            assert (step_batch.epoch, step_batch.step) == (epoch, step)
            assert (step_batch.num_nonempty, step_batch.samples) == (len(pieces), sum(map(len, pieces.values())))
            assert step_batch.all_ranks_have_data == all(other.micro_batches for other in at_once)
            for micro_batch in step_batch.micro_batches:
                _, labels = micro_batch.batch  # which are ids here
                assert labels.tolist() == micro_batch.ids.tolist()
                assert micro_batch.piece in on.owned(micro_batch.device)
                assert micro_batch.piece not in actual
                actual[micro_batch.piece] = labels.tolist()
        assert actual == pieces


@pytest.mark.parametrize(("taken", "epoch", "first"), [(0, 0, 0), (3, 0, 3), (5, 1, 0), (14, 2, 4)])
def test_an_epoch_continues_at_the_step_of_the_run(taken: int, epoch: int, first: int) -> None:
    order = DataOrder(40, layout(8, 2), 3)
    assert list(StepSampler(order, partial(int, taken))) == [(epoch, index) for index in range(first, 5)]


def test_new_shares_hold_from_their_step_on() -> None:
    """Also for steps that were fetched before, with those that came first."""

    class Moving(Assignment):
        first_step = 99

        def layout_at(self, step: int) -> Layout:
            return self.layout if step < self.first_step else later

    on = layout(8, 4, 2)
    later = replace(on, shares=(3.0, 1.0))
    moving = Moving(on)
    loaded = StepDataset(arrays(80, size=2), DataOrder(80, on, 3), 0, Augment(), moving)
    counts = [len(loaded.__getitems__((0, index)).micro_batches) for index in range(3)]
    moving.first_step = 4
    counts += [len(loaded.__getitems__((0, index)).micro_batches) for index in range(3, 7)]
    assert counts == [2, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(("devices", "wanted", "most"), [(1, 1000, 8), (2, 5, 4), (8, 2, 1), (1, 8, 8), (2, 0, 0)])
def test_loader_processes_are_bounded_by_the_cores(
    devices: int, wanted: int, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    sets = Splits(arrays(16, size=2), None, None)
    for rank in (0, devices - 1):
        made = StepData(sets, layout(16, devices, devices, "ddp"), 0, rank, wanted)
        assert made.num_workers == most
    line = f"num_workers={wanted}: more than this machine's cores can use, so each worker has {most}"
    assert caplog.messages == [line] * (wanted > most) * (1 + (devices == 1))
