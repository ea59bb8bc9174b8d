"""Layouts by their numbers, and generated data orders: what tests of the order and of its loaders share."""

import numpy as np
from hypothesis import strategies as st

from lockstep.arithmetic.layout import Layout, resolve
from lockstep.arithmetic.order import DataOrder
from lockstep.arithmetic.streams import StreamOrder


def layout(batch_size: int, pieces: int, devices: int = 1, strategy: str = "ddp") -> Layout:
    return resolve(
        strategy=strategy, accelerator="cpu", devices=devices, num_nodes=1, batch_size=batch_size, pieces=pieces
    )


@st.composite
def orders(draw: st.DrawFn) -> DataOrder:
    pieces = draw(st.integers(1, 9))
    samples = draw(st.integers(1, 200))
    return DataOrder(samples, layout(pieces * draw(st.integers(1, 12)), pieces), draw(st.integers(0, 2**63)))


def borders(sizes: list[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int64)


@st.composite
def stream_orders(draw: st.DrawFn) -> StreamOrder:
    """Draw shards of any sizes, also empty ones and fewer than pieces, and steps that are larger than the set."""
    pieces = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(any))
    on = layout(pieces * draw(st.integers(1, 12)), pieces)
    seed, window = draw(st.integers(0, 2**63)), draw(st.integers(1, 6))
    return StreamOrder(sum(sizes), on, seed, shard_borders=borders(sizes), window=window)
