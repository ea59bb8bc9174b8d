"""Layouts by their numbers, and generated data orders: what tests of the order and of its loaders share."""

from hypothesis import strategies as st

from lockstep.arithmetic.layout import Layout, resolve
from lockstep.arithmetic.order import DataOrder


def layout(batch_size: int, pieces: int, devices: int = 1, strategy: str = "ddp") -> Layout:
    return resolve(
        strategy=strategy, accelerator="cpu", devices=devices, num_nodes=1, batch_size=batch_size, pieces=pieces
    )


@st.composite
def orders(draw: st.DrawFn) -> DataOrder:
    pieces = draw(st.integers(1, 9))
    samples = draw(st.integers(1, 200))
    return DataOrder(samples, layout(pieces * draw(st.integers(1, 12)), pieces), draw(st.integers(0, 2**63)))
