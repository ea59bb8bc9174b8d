"""The buffers after a step: the same bits however the pieces are shared, and what can't follow the rule is named."""

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lockstep.arithmetic.exact_sum import ExactSum
from lockstep.callbacks import ReplicaConsistencyCheck
from lockstep.errors import UserError
from lockstep.step.buffers import StepBuffers

FEATURES = 4
Values = dict[str, Tensor]


class Layer(nn.Module):
    """For mypy, which does not know the buffers of a layer."""

    center: Any
    mask: Any
    late: Any

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class Center(Layer):
    """A buffer that is replaced in each step, and a large one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(FEATURES))
        self.register_buffer("table", torch.randn(10))

    def forward(self, x: Tensor) -> None:
        self.center = 0.9 * self.center + 0.1 * x.mean(0)


class Hidden(Center):
    def forward(self, x: Tensor) -> None:
        self.center.data.mul_(0.9).add_(0.1 * x.mean(0))


class CustomNorm(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("var", torch.ones(FEATURES), persistent=False)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> None:
        self.mean.lerp_(x.mean(0), 0.1)
        self.var.lerp_(x.var(0, unbiased=False), 0.1)
        self.steps += 1
        self.ready.fill_(True)


class Spectral(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = (
            wrap(nn.Linear(FEATURES, 3)) for wrap in (nn.utils.spectral_norm, parametrizations.spectral_norm)
        )

    def forward(self, x: Tensor) -> None:
        self.new(x), self.old(x)


class Dtypes(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        for name in ("bfloat16", "float16", "float64", "complex64", "complex128"):
            self.register_buffer(f"of_{name}", torch.zeros(2, dtype=getattr(torch, name)))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> None:
        for name, buffer in self.named_buffers():
            buffer.add_(x.mean().to(buffer.dtype) * (1j if buffer.is_complex() else 1))
            if name == "empty":
                self.empty = buffer.clone()


class Infinite(Layer):
    """The smallest values seen, by column; a column of which a sample is nan."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.full((3,), torch.inf))

    def forward(self, x: Tensor) -> None:
        self.least[0] = torch.minimum(self.least[0], x[:, 0].min())
        self.least[2] = x.mean() if x[0, 0] < 0.3 else torch.nan


class EqualNumbers(Layer):
    """Numbers that a sum of several pieces would round: of an inexact sum the first, of an exact one the second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> None:
        self.scale.copy_(torch.tensor([0.1, 1e-30], dtype=torch.float64))


class Rare(Layer):
    """A buffer that changes late and in some pieces only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rare", torch.ones(FEATURES))

    def forward(self, x: Tensor) -> None:
        if x.max() > 0.97:
            self.rare.mul_(x.mean())


class Tied(Layer):
    """Two layers with one buffer, which one of them replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Center(), Center()
        self.two.center = self.one.center

    def forward(self, x: Tensor) -> None:
        self.one(x)


class TiedInPlace(Tied):
    def forward(self, x: Tensor) -> None:
        self.one.center.lerp_(x.mean(0), 0.1)


KINDS = [Center, Hidden, CustomNorm, Spectral, Dtypes, Infinite, Rare, Tied]


def step_buffers(
    module: Any,
    exact: bool,
    replicas: int,
    state: dict[str, Any],
    rank: int = 0,
    holds: Callable[[Any], bool] = lambda thing: True,
) -> StepBuffers:
    trainer = SimpleNamespace(datamodule=SimpleNamespace(layout=SimpleNamespace(replicas=replicas, pieces=3)))
    vars(module)["trainer"] = trainer
    strategy = SimpleNamespace(
        lightning_module=module,
        holds=holds,
        gather_dicts=lambda values: values,
        weights="whole",
        is_global_zero=rank == 0,
        root_device=torch.device("cpu"),
    )
    gradients: Any = SimpleNamespace(strategy=strategy, exact=exact, exact_sum=ExactSum)
    return StepBuffers(gradients, state)


def step(
    after: StepBuffers, number: int, pieces: Sequence[Tensor], nonempty: int, ends_epoch: bool = True, first: int = 0
) -> None:
    """Take one step of this process, whose forward passes are calls of the module; its first piece is `first`."""
    batch: Any = SimpleNamespace(step=number, num_nonempty=nonempty)
    after.begin(batch, ends_epoch)
    for piece, samples in enumerate(pieces, first):
        after.before_forward()
        after.strategy.lightning_module(samples)
        after.after_forward(piece)
        after.before_backward()
        after.after_backward()
    after.finish(batch)


def data(number: int) -> list[Tensor]:
    """Return the pieces of a step, of unequal size; every fourth step has one piece."""
    generator = torch.Generator().manual_seed(number)
    pieces = list(torch.rand(8, FEATURES, generator=generator).split(3))
    return pieces[: 1 if number % 4 == 3 else 3]


def values_of(module: nn.Module) -> Values:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def trained(
    kind: type[nn.Module],
    ranks: Ranks | None = None,
    exact: bool = True,
    counts: Sequence[int] = (3,),
    stop: int | None = None,
    steps: int = 8,
) -> Any:
    """Return the buffers of each rank after some steps, where rank r computes `counts[r]` of the pieces.

    After step `stop` the run is stopped, and continues from a checkpoint.
    """

    torch.manual_seed(0)
    original = kind()

    def of_rank(rank: int) -> Values:
        module = deepcopy(original)
        objects = dict(module.named_buffers())
        after = step_buffers(module, exact, len(counts), {}, rank)
        first = sum(counts[:rank])
        for number in range(steps):
            if number == stop:
                after = step_buffers(module, exact, len(counts), after.state_dict(), rank)
            pieces = data(number)
            step(after, number, pieces[first : first + counts[rank]], len(pieces), first=first)
        same = [name for name, buffer in module.named_buffers() if buffer is objects.get(name)]
        assert set(same) >= objects.keys() - {"one.center", "last"}, "others may have references to a buffer"
        return values_of(module)

    return of_rank(0) if ranks is None else ranks(len(counts), of_rank, errors=UserError)


@cache
def alone(kind: type[nn.Module], steps: int = 8) -> Values:
    """Return the buffers on one rank, with which several tests compare theirs."""
    result: Values = trained(kind, steps=steps)
    return result


def equal(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a.view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8)) for name, a in one.items()
    )


# --- what follows the rule ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(0, 3), (1, 1, 1)])
def test_the_same_bits_on_every_layout(ranks: Ranks, kind: Any, counts: tuple[int, ...]) -> None:
    one = alone(kind)
    assert all(equal(rank, one) for rank in trained(kind, ranks, counts=counts))
    assert not equal(alone(kind, steps=2), one), "the control"


@pytest.mark.parametrize(("kind", "stop"), [*((kind, 5) for kind in KINDS), (CustomNorm, 1), (Rare, 1)])
def test_the_same_bits_after_a_stop_on_another_layout(ranks: Ranks, kind: Any, stop: int) -> None:
    one = alone(kind)
    assert equal(trained(kind, stop=stop), one)
    assert all(equal(rank, one) for rank in trained(kind, ranks, counts=(1, 2), stop=stop))


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_exact_sum_all_ranks_have_the_same_buffers(ranks: Ranks, kind: Any) -> None:
    first, second = trained(kind, ranks, exact=False, counts=(2, 1))
    one = trained(kind, exact=False)
    assert equal(first, second)
    for name, value in one.items():
        torch.testing.assert_close(first[name], value, equal_nan=True)


def mean_center(exact: bool) -> Tensor:
    center = torch.zeros(FEATURES, dtype=torch.float64)
    for number in range(8):
        center = torch.stack([0.9 * center + 0.1 * piece.mean(0).double() for piece in data(number)]).mean(0)
    return center


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", [Center, Hidden])
def test_a_mean_is_that_over_the_pieces_and_what_does_not_change_keeps_its_bits(kind: Any, exact: bool) -> None:
    torch.manual_seed(0)
    table = kind().table
    values = trained(kind, exact=exact)
    torch.testing.assert_close(values["center"].double(), mean_center(exact), rtol=1e-5, atol=0)
    assert torch.equal(values["table"], table)


def test_numbers_that_are_the_same_in_all_pieces_are_taken_as_they_are() -> None:
    values = trained(CustomNorm)
    assert (int(values["steps"]), bool(values["ready"])) == (8, True)
    equal = [trained(EqualNumbers, exact=exact, steps=7) for exact in (True, False)]  # the last step has three pieces
    assert [each["scale"].tolist() for each in equal] == [[0.1, 1e-30]] * 2
    infinite = trained(Infinite)
    assert infinite["least"].isfinite().tolist()[0]
    assert infinite["least"].isinf().tolist() == [False, True, False]


def test_layers_that_share_a_buffer_share_it_until_one_of_them_replaces_it() -> None:
    values = trained(Tied)
    assert torch.equal(values["two.center"], torch.zeros(FEATURES))
    assert values["one.center"].all()
    assert "two.center" not in trained(TiedInPlace), "they are one tensor still"


@pytest.mark.parametrize("dtype", [torch.uint64, torch.int64, torch.uint8])
def test_a_counter_of_any_kind_of_integer(dtype: torch.dtype) -> None:
    class Counts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor([[7], [200]], dtype=dtype))

        def forward(self, x: Tensor) -> None:
            self.count.copy_((self.count.to(torch.int64) + 1).to(dtype))

    values = trained(Counts)
    assert values["count"].dtype == dtype
    assert values["count"].tolist() == [[15], [208]]


def test_statistics_of_another_stage_stay_as_they_are() -> None:
    """This process computes the first layer only. A mean over its pieces would round what it does not compute."""

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.BatchNorm1d(FEATURES))
            for layer in self.net:
                layer.running_mean.fill_(1e-30)  # type: ignore[operator]

        def forward(self, x: Tensor) -> None:
            self.net[0](x)

    module: Any = Stages()

    def is_first(thing: Any) -> bool:
        return thing is module.net[0]

    def everything(thing: Any) -> bool:
        return True

    for holds, expected in ((is_first, True), (everything, False)):  # the control: it is said to compute both
        step(step_buffers(module, True, 1, {}, holds=holds), 0, data(0), 3)
        assert bool((module.net[1].running_mean == torch.tensor(1e-30)).all()) == expected
    assert not (module.net[0].running_mean == torch.tensor(1e-30)).any()


def test_what_a_piece_begins_with() -> None:
    """Each forward pass, and activation checkpointing in a backward pass, sees the buffers before the step."""
    seen: list[float] = []

    class Sees(Center):
        def forward(self, x: Tensor) -> None:
            seen.append(float(self.center.sum()))
            super().forward(x)

    module = Sees()
    after: Any = step_buffers(module, True, 1, {})
    batch = SimpleNamespace(step=0, num_nonempty=2)
    after.begin(batch)
    for number, piece in enumerate(data(0)[:2]):
        after.before_forward()
        module(piece)
        after.after_forward(number)
        after.before_backward()
        module(piece)
    after.finish(batch)
    assert seen == [0, 0, 0, 0]
    expected = torch.stack([0.1 * piece.mean(0) for piece in data(0)[:2]]).mean(0)
    torch.testing.assert_close(module.center, expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("pieces", [1, 2])
def test_activation_checkpointing_updates_batch_norm_once(exact: bool, pieces: int, reentrant: bool) -> None:
    def statistics(checkpointing: bool) -> Values:
        norm = nn.BatchNorm1d(FEATURES)
        after: Any = step_buffers(norm, exact, 1, {})
        batch = SimpleNamespace(step=0, num_nonempty=pieces)
        after.batch_norm.leaves_one_to_torch = True
        after.begin(batch)
        for piece in data(0)[:pieces]:
            after.before_forward()
            x = piece.clone().requires_grad_()
            y = checkpoint(norm, x, use_reentrant=reentrant) if checkpointing else norm(x)
            after.after_forward(0)
            after.before_backward()
            y.square().sum().backward()
        after.finish(batch)
        return values_of(norm)

    assert equal(statistics(True), statistics(False))


def test_what_never_changes_is_not_copied_after_the_first_steps() -> None:
    module = Center()
    after = step_buffers(module, True, 1, {})
    for number in range(4):
        step(after, number, data(number), len(data(number)), ends_epoch=False)
    copy = after.buffers["table"].start
    step(after, 4, data(4), 3, ends_epoch=False)
    assert after.buffers["table"].start is copy
    assert after.changing == ["center"]


def test_a_change_through_data_is_seen_in_the_first_steps() -> None:
    """It is hidden from the version, so contents are compared. That takes time: later, only at an epoch's end."""

    class Late(Hidden):
        changes = False

        def forward(self, x: Tensor) -> None:
            if self.changes:
                super().forward(x)

    def is_seen(first: int, end: int | None = None) -> bool:
        module = Late()
        after = step_buffers(module, True, 1, {})
        for number in range(5):
            module.changes = number >= first
            step(after, number, data(number), len(data(number)), ends_epoch=number == end)
        return "center" in after.changing

    assert [is_seen(first) for first in range(4)] == [True, True, True, False]
    assert is_seen(3, end=3)


def test_a_checkpoint_has_the_grids_of_statistics() -> None:
    norm = nn.BatchNorm1d(FEATURES)
    norm.train()
    after = step_buffers(norm, True, 1, {})
    step(after, 0, data(0), 3)
    state = after.state_dict()
    assert state.keys() == {"statistics"}
    restored: Any = step_buffers(norm, True, 1, state).batch_norm.exact_sum
    assert restored.exponents == state["statistics"]


# --- what can't follow it ---


class Pointer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ptr", torch.tensor(0))

    def forward(self, x: Tensor) -> None:
        self.ptr += len(x)


class Sizes(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: Tensor) -> None:
        self.last = x[:, 0].clone()


class Appears(Layer):
    """A buffer that the first forward pass registers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = nn.Module()

    def forward(self, x: Tensor) -> None:
        if not hasattr(self.inner, "late"):
            self.inner.register_buffer("late", torch.zeros(FEATURES))


class MadeWhenNeeded(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> None:
        if self.mask is None:
            self.mask = torch.triu(torch.full((3, 3), -torch.inf), 1)


DIFFERS = "buffer ptr of Pointer differs"
REFUSED = [
    (Sizes, "buffer last of Sizes changes its shape or dtype in training_step"),
    (Appears, "buffer inner.late of Module appears in training_step"),
    (MadeWhenNeeded, "buffer mask of MadeWhenNeeded appears in training_step"),
]


@pytest.mark.parametrize(("kind", "text"), REFUSED)
@pytest.mark.parametrize("exact", [True, False])
def test_what_can_not_follow_the_rule_is_refused_on_every_layout(
    ranks: Ranks, kind: Any, text: str, exact: bool
) -> None:
    with pytest.raises(UserError, match=f"^{text}.*: "):
        trained(kind, exact=exact)
    for error in trained(kind, ranks, exact=exact, counts=(2, 1)):
        assert str(error).startswith(text)


def test_an_integer_that_differs_is_refused_with_an_exact_sum(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=f"^exact=true: {DIFFERS}.*: "):
        trained(Pointer)
    for error in trained(Pointer, ranks, counts=(2, 1)):
        assert str(error).startswith(f"exact=true: {DIFFERS}")
    with caplog.at_level(logging.WARNING, "lockstep"):
        trained(Pointer, ranks, exact=False, counts=(2, 1))
    assert [record.message.startswith(DIFFERS) for record in caplog.records] == [True]


def test_a_change_in_the_backward_pass_is_refused() -> None:
    module = Center()
    after: Any = step_buffers(module, True, 1, {})
    batch = SimpleNamespace(step=0, num_nonempty=1)
    after.begin(batch)
    after.after_forward(0)
    module.table.add_(1)
    with pytest.raises(UserError, match="buffer table of Center changes in the backward pass"):
        after.after_backward()


# --- buffers that differ between ranks ---


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_validated_is_what_is_saved(ranks: Ranks, caplog: pytest.LogCaptureFixture, exact: bool) -> None:
    """A hook has changed the buffers of one rank only."""

    def of_rank(rank: int) -> Any:
        module: Any = nn.Sequential(nn.Linear(2, 2), Center())
        module[0].requires_grad_(False).weight.zero_()
        module[0].bias.zero_()
        module[1].table.fill_(0)
        module[1].center += rank
        trainer = SimpleNamespace(
            datamodule=SimpleNamespace(layout=SimpleNamespace(replicas=2, exact=exact)),
            strategy=SimpleNamespace(
                weights="whole",
                root_device=torch.device("cpu"),
                replicated_parameters=lambda: list(module.parameters()),
            ),
            optimizers=[],
            is_global_zero=rank == 0,
            state=SimpleNamespace(fn="fit"),
            sanity_checking=False,
            global_step=3,
        )
        ReplicaConsistencyCheck().on_validation_start(trainer, module)
        return float(module[1].center.sum())

    with caplog.at_level(logging.WARNING, "lockstep"):
        results = ranks(2, of_rank, errors=UserError)
    text = "after step 3 buffer 1.center differs between the ranks"
    if exact:
        assert [str(result).startswith(f"{text}: ") for result in results] == [True, True]
    else:
        assert results == [0, 0]
        assert [record.message.startswith(text) for record in caplog.records] == [True]
