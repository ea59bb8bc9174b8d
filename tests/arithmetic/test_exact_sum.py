"""Sums that neither the order of addends nor their distribution over processes can change."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import HostReads, Kernels
from torch import Tensor

from lockstep.arithmetic import exact_sum
from lockstep.arithmetic.exact_sum import (
    BITS,
    CHUNK,
    HEAD,
    SMALL,
    CheckedSum,
    CorruptMessage,
    ExactSum,
    dense,
    reduce_alone,
)
from lockstep.arithmetic.layout import MAX_PIECES_EXACT

SHAPES = [(3,), (4, 2, 3, 3), (1,), (2 * CHUNK + 8_928,)]
Addend = list[Tensor]


def addends(count: int, seed: int, spread: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Addend]:
    """Return `count` lists of float32 tensors, whose sizes differ by up to 2**spread among themselves."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-spread, spread + 1, (count, len(shapes)), generator=generator).tolist()
    return [[torch.randn(s, generator=generator) * 2.0**e for s, e in zip(shapes, row, strict=True)] for row in scales]


def zeros(shapes: Sequence[tuple[int, ...]] = SHAPES) -> Addend:
    return [torch.zeros(shape) for shape in shapes]


class Group:
    """An all-reduce between threads."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = Barrier(size), [torch.empty(0)] * size

    def all_reduce(self, rank: int, tensor: Tensor, op: str) -> None:
        self.parts[rank] = tensor.clone()
        self.barrier.wait(10)
        stacked = torch.stack(self.parts)
        self.barrier.wait(10)
        tensor.copy_(stacked.amax(0) if op == "max" else stacked.sum(0))


def steps_of(assigned: list[list[list[Addend]]], like: Addend) -> list[list[Addend]]:
    """Return the sums that each process gets, `[rank][step]`, from `assigned[step][rank]`, its addends."""
    size = len(assigned[0])
    group = Group(size)

    def process(rank: int) -> list[Addend]:
        exact, sums = ExactSum(like), []
        for step in assigned:
            exact.begin()
            for addend in step[rank]:
                exact.add(addend)
            sums.append(exact.total(lambda tensor, op: group.all_reduce(rank, tensor, op) if size > 1 else None))
        return sums

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(process, range(size)))


def same(actual: Addend, expected: Addend) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@given(st.data(), st.integers(1, 7), st.integers(1, 4), st.integers(0, 12))
def test_neither_order_nor_processes_change_a_bit(data: st.DataObject, count: int, size: int, spread: int) -> None:
    steps = [addends(count, seed, spread, SHAPES[:3]) for seed in (1, 2, 3)]
    for addend in (addend for step in steps for addend in step[1::2]):
        addend[1] = None  # type: ignore[call-overload] # some have no value of it
    like = zeros(SHAPES[:3])
    expected = steps_of([[step] for step in steps], like)[0]
    assigned = []
    for step in steps:
        order = data.draw(st.permutations(step))
        owners = data.draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count))
        assigned.append([[a for a, owner in zip(order, owners, strict=True) if owner == rank] for rank in range(size)])
    for rank in steps_of(assigned, like):
        for actual, wanted in zip(rank, expected, strict=True):
            assert same(actual, wanted)


def test_a_plain_sum_does_depend_on_order() -> None:
    """The control: without the grid these addends differ, so the test above could fail."""
    values = [addend[1] for addend in addends(7, 1, 6)]
    assert not torch.equal(sum(values), sum(reversed(values)))  # type: ignore[arg-type]


@pytest.mark.parametrize("spread", [0, 10])
def test_it_is_more_accurate_than_float32(spread: int) -> None:
    steps = [addends(8, seed, spread) for seed in range(3)]
    for actual, step in zip(steps_of([[step] for step in steps], zeros())[0], steps, strict=True):
        for index, total in enumerate(actual):
            true = torch.stack([addend[index].double() for addend in step]).sum(0)
            largest = max(float(addend[index].abs().max()) for addend in step)
            assert torch.all((total.double() - true).abs() <= true.abs() * 2.0**-24 + 8 * 2.0**-44 * largest)


@pytest.mark.parametrize("factor", [2.0**5, 2.0**7, 2.0**40, 2.0**-20])
def test_what_outgrows_the_head_room_or_shrinks_is_summed_all_the_same(factor: float) -> None:
    first, second = addends(6, 1), [[value * factor for value in addend] for addend in addends(6, 2)]
    second[3][1] *= 2.0**9  # one piece alone grows more than the others
    alone_ = steps_of([[first], [second]], zeros())[0]
    shared = steps_of([[first[::2], first[1::2]], [second[4:], second[:4]]], zeros())
    assert all(same(rank[1], alone_[1]) for rank in shared)
    for index, total in enumerate(alone_[1]):
        true = torch.stack([addend[index].double() for addend in second]).sum(0)
        assert torch.allclose(total.double(), true, rtol=1e-6, atol=1e-6 * float(true.abs().max()))


@pytest.mark.parametrize("which", [0, 3])
def test_one_element_that_outgrows_its_grid_in_a_last_chunk_takes_nothing_with_it(which: int) -> None:
    """All chunks before it have been rounded by then."""
    first, second = addends(6, 1), addends(6, 2)
    second[which][3][-1] *= 2.0**12
    alone_ = steps_of([[first], [second]], zeros())[0]
    shared = steps_of([[first[::2], first[1::2]], [second[which:], second[:which]]], zeros())
    assert all(same(rank[1], alone_[1]) for rank in shared)
    true = torch.stack([addend[3].double() for addend in second]).sum(0)
    assert torch.allclose(alone_[1][3].double(), true, rtol=1e-6, atol=1e-12 * float(true.abs().max()))


def test_zeros_stay_zero_and_what_comes_after_is_summed_as_before() -> None:
    step = addends(3, 1)
    actual = steps_of([[[zeros()]], [step], *[[[zeros()]]] * 30, [step]], zeros())[0]
    assert same(actual[0], zeros())
    assert same(actual[2], zeros())
    assert same(actual[1], actual[-1])


@pytest.mark.parametrize("exponent", [*range(BITS - HEAD - 2, BITS - HEAD + 3)])
@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_a_grid_of_whole_numbers_is_one_as_others_are(exponent: int, on_a_gpu: bool) -> None:
    """Its exponent is 0, as if there were none."""
    exact = (on_gpu if on_a_gpu else ExactSum)([torch.zeros(2)])
    for _ in range(2):  # the first sum chooses the grid
        exact.begin()
        for _ in range(3):
            exact.add([torch.full((2,), 2.0**exponent * 0.25)])
        assert exact.total()[0].tolist() == [2.0**exponent * 0.75] * 2
    assert exact.exponents == [exponent]


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_a_tensor_without_elements_is_summed_beside_others(on_a_gpu: bool) -> None:
    like = [torch.zeros(0), torch.zeros(CHUNK), torch.zeros(2, 0)]
    exact = (on_gpu if on_a_gpu else ExactSum)(like)
    for _ in range(2):
        exact.begin()
        exact.add([torch.zeros(0), torch.ones(CHUNK), torch.zeros(2, 0)])
        assert same(exact.total(), [torch.zeros(0), torch.ones(CHUNK), torch.zeros(2, 0)])


def test_a_step_sends_one_message_also_if_a_tensor_never_has_a_value() -> None:
    """The first step sends two more, since it has no grid yet."""
    like = [torch.zeros(size) for size in (SMALL + 2, SMALL + 1, 2)]
    exact, messages = ExactSum(like), [0] * 3
    for step in range(3):
        exact.begin(step)
        exact.add([torch.ones_like(like[0]), None, torch.ones_like(like[2])])
        exact.total(lambda tensor, op, step=step: messages.__setitem__(step, messages[step] + 1))  # type: ignore[misc]
        assert exact.present == [True, False, True]
    assert messages == [3, 1, 1]


def test_small_neighbours_of_one_kind_share_a_grid_up_to_a_limit() -> None:
    like = [torch.zeros(n) for n in (SMALL - 2, 1, 1, 1, SMALL, 1)]
    assert ExactSum(like).groups == [[0, 1, 2], [3], [4], [5]]
    assert ExactSum(like[1:4], segment_ids=[0, 1, 1]).groups == [[0], [1, 2]]
    assert ExactSum([like[1], like[2].double(), like[3].double()]).groups == [[0], [1, 2]]


def test_which_tensors_have_no_gaps() -> None:
    whole = torch.zeros(2, 4, 4)
    assert all(map(dense, (whole, whole.permute(2, 0, 1), whole[:1], whole[:1, 1:2], torch.zeros(()))))
    assert not any(map(dense, (whole[..., :3], whole[:, :3], whole[:, :1, :2], whole[0, :, 0], whole[..., 0])))


def test_a_sum_lies_where_its_tensors_are() -> None:
    exact = ExactSum([torch.zeros(3, device="meta")])
    assert exact.message.device.type == exact.scratch.device.type == "meta"


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("value", [0.99, 1.0 - 2.0**-24, -1.0 + 2.0**-24])
def test_as_many_addends_as_a_layout_may_have_do_not_overflow(value: float) -> None:
    """On the first step's grid, and on the one known from it, of which they use all of the head room."""
    exact = ExactSum([torch.zeros(3)])
    for step in range(2):
        exact.exponents = [-HEAD + 1] if step else [None]
        exact.begin()
        for _ in range(MAX_PIECES_EXACT):
            exact.add([torch.full((3,), value)])
        assert bool(exact.num_added[0]) == bool(step)
        (total,) = exact.total(reduce_alone)
        assert torch.allclose(total, torch.full((3,), MAX_PIECES_EXACT * value), rtol=1e-6)


def test_what_falls_below_its_grid_is_detected_again() -> None:
    first, small = addends(3, 1), [[value * 2.0**-60 for value in addend] for addend in addends(3, 2)]
    actual = steps_of([[first], [small], [small], [small]], zeros())[0]
    assert same(actual[1], zeros())  # what the docs admit
    assert all(bool(value.any()) for value in actual[2])
    for index, total in enumerate(actual[3]):
        true = torch.stack([addend[index].double() for addend in small]).sum(0)
        assert torch.allclose(total.double(), true, rtol=1e-6, atol=1e-6 * float(true.abs().max()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_back_on_every_process_and_spoils_only_its_tensor(bad: float) -> None:
    good, broken = addends(4, 1), addends(4, 1)
    broken[2][1][0, 0, 0, 0] = bad
    expected = steps_of([[good], [good]], zeros())[0]
    for rank in steps_of([[broken[:1], broken[1:]], [good[:1], good[1:]]], zeros()):
        assert not torch.isfinite(rank[0][1]).all()
        for index in (0, 2, 3):
            assert torch.equal(rank[0][index], expected[0][index])
        assert same(rank[1], expected[1])


@pytest.mark.parametrize("before", [None, 1000])
def test_what_is_too_large_for_a_grid_of_float64_counts_as_not_finite(before: int | None) -> None:
    exact = ExactSum([torch.zeros(2, dtype=torch.float64) for _ in range(2)])
    exact.exponents = [before]
    for size in (2.0**1023, 1.0):
        exact.begin()
        for value in (1.0, size, -size):
            exact.add([torch.full((2,), value, dtype=torch.float64), torch.ones(2, dtype=torch.float64)])
        large, small = exact.total(reduce_alone)
        assert torch.isfinite(small).all()
        assert torch.isnan(large).all() == (size > 1)


def test_memory_format_and_strides_do_not_matter() -> None:
    shapes = [(4, 2, 3, 3), (5, 3)]
    step = addends(4, 1, shapes=shapes)
    expected = steps_of([[step]], zeros(shapes))[0][0]
    odd = [[a.to(memory_format=torch.channels_last), torch.stack([b, b], -1)[..., 0]] for a, b in step]
    like = [torch.zeros(shapes[0]).to(memory_format=torch.channels_last), torch.zeros(3, 5).t()]
    for addend in (step, odd):
        actual = steps_of([[addend]], like)[0][0]
        assert same(actual, expected)
        assert [value.stride() for value in actual] == [value.stride() for value in like]


def test_each_flipped_bit_of_a_message_is_seen() -> None:
    names, (one, other) = ["a", "b", "c"], addends(2, 0, 0, SHAPES[:3])
    mine, theirs = (CheckedSum(zeros(SHAPES[:3]), names=names) for _ in range(2))
    for exact, addend in ((mine, one), (theirs, other)):
        exact.add(one)
        exact.total()  # both have the same grids now
        exact.begin(6)
        exact.add(addend)
        exact.pack()
    arrived = mine.message + theirs.message
    for at in range(len(arrived)):
        mine.message.copy_(arrived)
        mine.message[at] ^= (1 << 7 * at % 63) if at % 5 else -(2**63)
        with pytest.raises(CorruptMessage, match=r"^step 7: the sums( of a to c)? do not match what the ranks sent"):
            mine.unpack(reduce_alone, 1)
    mine.message.copy_(arrived)
    sums, _ = mine.unpack(reduce_alone, 1)
    assert same(sums, [a + b for a, b in zip(one, other, strict=True)])


def test_a_damaged_message_of_what_outgrew_its_grid_is_seen() -> None:
    def all_reduce(tensor: Tensor, op: str) -> None:
        sent.append(op)
        if len(sent) == damaged:
            tensor[len(tensor) // 2] ^= 1

    for damaged in (3, 4):  # of `sum, max, sum` the last one, and of a control none
        sent: list[str] = []
        exact = ExactSum(zeros(SHAPES[:3]))
        exact.add(addends(1, 0, 0, SHAPES[:3])[0])
        with pytest.raises(CorruptMessage, match=r"^step 1: the sums do not match") if damaged == 3 else nullcontext():
            exact.total(all_reduce)
        assert sent == ["sum", "max", "sum"]


# --- on a GPU, whose way the CPU can go -------------------------------------------------------------------------------


def on_gpu(like: Addend) -> ExactSum:
    """Return a sum that computes on the CPU as it would on a GPU."""
    exact = ExactSum(like)
    exact.in_chunks, exact.scratch = False, torch.empty(0)
    return exact


@pytest.mark.parametrize("together", [exact_sum.TOGETHER, 10])
def test_a_gpus_way_has_the_same_bits_and_changes_no_addend(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_sum, "TOGETHER", together)
    steps = [addends(3, seed, spread=12) for seed in range(3)]  # the later ones outgrow the first one's grids
    steps = [[[part.double() for part in addend] for addend in step] for step in steps]
    like = [part.double() for part in zeros()]
    cpu, gpu = ExactSum(like), on_gpu(like)
    for step in steps:
        before = [[part.clone() for part in addend] for addend in step]
        for exact in (cpu, gpu):
            exact.begin()
            for addend in step:
                exact.add(addend)
        assert all(map(torch.equal, cpu.total(divisor=3), gpu.total(divisor=3)))
        assert all(
            torch.equal(a, b) for row, rows in zip(before, step, strict=True) for a, b in zip(row, rows, strict=True)
        )


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("factor", [2.0**20, math.inf, math.nan])
def test_a_gpu_takes_back_what_it_should_not_have_added(factor: float, which: int) -> None:
    """It has rounded and added an addend before the host knows that it outgrew its grid."""
    cpu, gpu = ExactSum(zeros()), on_gpu(zeros())
    for step in range(3):
        parts = addends(3, step)
        if step == 1:
            parts[which][-1][7] = parts[which][1][0, 0, 0, 0] = factor
        for exact in (cpu, gpu):
            exact.begin()
            for part in parts:
                exact.add(part)
        pairs = zip(cpu.total(divisor=3), gpu.total(divisor=3), strict=True)
        assert all(torch.equal(a.nan_to_num(5), b.nan_to_num(5)) for a, b in pairs)
        assert cpu.exponents == gpu.exponents


def test_a_gpu_copies_addends_that_may_change() -> None:
    """Running statistics do, in the next forward pass."""
    large, actual = 2.0**20, []
    for changes in (False, True):
        exact = on_gpu([torch.zeros(3)])
        for _ in range(2):
            exact.begin()
            exact.add([value := torch.ones(3)], unchanged=not changes)
            exact.add([other := torch.full((3,), large)], unchanged=not changes)
            if changes:
                value.zero_(), other.zero_()
            actual.append(exact.total()[0])
            large *= 2.0**20  # outgrows the grid
    assert all(map(torch.equal, actual[:2], [torch.full((3,), 2.0**20 + 1), torch.full((3,), 2.0**40 + 1)]))
    assert [float(each[0]) for each in actual[2:]] == [2.0**60, 2.0**80]


def test_the_host_reads_the_size_of_a_piece_when_the_next_one_exists() -> None:
    """In the meantime the next piece's passes are queued, so the GPU has work while the host waits."""
    exact = on_gpu(zeros())
    for part in addends(1, 0):
        exact.add(part)
    exact.total()  # chooses the grids
    exact.begin()
    reads = []
    for part in addends(3, 1):
        with HostReads() as seen:
            exact.add(part)
        reads.append(sum(seen.seen.values()))
    with HostReads() as last:
        exact.pack(alone=True)
    assert (reads, sum(last.seen.values())) == ([0, 1, 1], 1)


def test_a_gpu_starts_as_many_kernels_for_large_tensors_as_for_small_ones() -> None:
    def count(make: type[ExactSum] | Callable[[Addend], ExactSum], size: int) -> int:
        like = [torch.zeros(size), torch.zeros(size)]
        exact = make(like)
        for _ in range(2):  # the first sum chooses the grids
            exact.begin()
            exact.add([torch.ones(size), torch.ones(size)])
            with Kernels() as kernels:
                exact.total()
        return kernels.kernels

    assert count(on_gpu, 20_000) == count(on_gpu, 10 * CHUNK)
    assert count(ExactSum, 20_000) + 25 < count(ExactSum, 10 * CHUNK)  # the control: in chunks of a CPU's cache


def test_a_gpu_starts_as_many_kernels_for_many_tensors_as_for_few() -> None:
    def count(tensors: int) -> int:
        exact = on_gpu([torch.zeros(20_000)] * tensors)  # each has a grid of its own
        for _ in range(2):  # the first sum chooses the grids
            exact.begin()
            with Kernels() as kernels:
                for _ in range(2):
                    exact.add([torch.ones(20_000)] * tensors, unchanged=True)
                exact.total()
        return kernels.kernels

    assert count(9) == count(2)
