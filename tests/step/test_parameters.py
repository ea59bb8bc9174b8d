"""What hangs on a module's parameters: hooks on gradients, `on_after_backward`, dtypes, tensors without data."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_fits import Net, fits
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer.small import BATCH, QUIET, samples
from trainer.small import Net as SmallNet

import lockstep
from lockstep.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(folder: Path, module: Any, **options: Any) -> Any:
    """Fit for two steps."""
    trainer = lockstep.Trainer(**{**QUIET, "default_root_dir": folder, "max_steps": 2, **options})
    trainer.fit(module, DataLoader(samples(), batch_size=BATCH))
    return trainer


# --- hooks on parameters ---


def with_hook(register: str, moment: str) -> Any:
    class Hooked(SmallNet):
        pass

    def act(self: Any, *_: Any, **options: Any) -> None:
        getattr(self.net[0].weight, register)(lambda _: None)

    if moment == "__init__":
        module = Hooked()
        act(module)
        return module
    setattr(Hooked, moment, act)
    return Hooked()


@pytest.mark.parametrize(
    ("register", "moment", "options"),
    [
        ("register_hook", "__init__", {}),
        ("register_hook", "on_fit_start", {"exact": True}),
        ("register_hook", "on_fit_start", {"strategy": "dp", "devices": 2}),
        ("register_post_accumulate_grad_hook", "setup", {}),
        ("register_post_accumulate_grad_hook", "setup", {"exact": True}),
        ("register_hook", "on_train_epoch_start", {}),
        ("register_hook", "on_train_epoch_start", {"strategy": "dp", "devices": 2}),
    ],
)
def test_a_hook_on_a_parameter_is_refused(tmp_path: Path, register: str, moment: str, options: Any) -> None:
    with pytest.raises(UserError, match=r"^register_hook or .* on net.0.weight: it would .* of a piece.*: change"):
        fit(tmp_path, with_hook(register, moment), pieces=2, **options)


def test_a_hook_on_ranks_is_refused(ranks: Ranks) -> None:
    class Hooked(Net):
        def on_fit_start(self) -> None:
            weight: Any = self.net[0].weight
            weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))

    with pytest.raises(UserError, match="weighted gradient of a piece"):
        fits(ranks, Hooked(), 2, exact=False, pieces=2)


def test_with_one_piece_a_hook_gets_the_gradient_of_the_step(tmp_path: Path) -> None:
    """As with Lightning. One that was removed is none."""
    seen: list[Tensor] = []
    module: Any = SmallNet()
    removed: Any = SmallNet()
    module.net[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    expected: list[Any] = []

    class Reads(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            expected.append(pl_module.net[0].weight.grad.clone())

    fit(tmp_path, module, callbacks=[Reads()])
    assert len(seen) == len(expected) == 2
    assert all(map(torch.equal, seen, expected))
    removed.net[0].weight.register_hook(lambda gradient: gradient * 0).remove()
    fit(tmp_path, removed, pieces=2)


# --- functions in the backward pass ---


class ClampedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].clamp(-1e-3, 1e-3)


class Clamps(SmallNet):
    net: Any

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.net[1](self.net[0](batch[0]))
        return F.cross_entropy(self.net[2:](ClampedGradient.apply(h)), batch[1])


class HooksActivations(SmallNet):
    net: Any

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.net[0](batch[0])
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / gradient.norm())
        return F.cross_entropy(self.net[1:](h), batch[1])


def signs(layer: Any, inputs: Any, outputs: Any) -> Any:
    return (inputs[0].sign(),)


class HooksALayer(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_full_backward_hook(signs)


class Reverses(SmallNet):
    """Its gradients stay in proportion."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.net[0](batch[0])
        if h.requires_grad:
            h.register_hook(lambda gradient: -0.5 * gradient)
        return F.cross_entropy(self.net[1:](h), batch[1])


PROPORTION = "is not in proportion to the loss, so it depends on the weight of a piece: let no hook"


@pytest.mark.parametrize("kind", [Clamps, HooksActivations, HooksALayer])
def test_a_backward_pass_that_clips_is_refused_or_named(
    tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=PROPORTION):
        fit(tmp_path, kind(), pieces=2, exact=True)
    assert PROPORTION not in caplog.text
    fit(tmp_path, kind(), pieces=2)
    assert caplog.text.count(PROPORTION) == 1
    fit(tmp_path, kind(), exact=True)  # the control: one piece has no weight
    assert caplog.text.count(PROPORTION) == 1


@pytest.mark.parametrize("kind", [SmallNet, Reverses])
def test_gradients_in_proportion_are_right(tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, kind(), pieces=2, exact=True, precision="bf16-mixed")
    fit(tmp_path, kind(), pieces=3)
    assert PROPORTION not in caplog.text


# --- on_after_backward ---


class AfterBackward(Net):
    def __init__(self) -> None:
        super().__init__(norm=False, dropout=0.0)
        self.gradients: list[list[Tensor]] = []

    def on_after_backward(self) -> None:
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])


class Reads(pl.Callback):
    def __init__(self, name: str) -> None:
        self.seen: list[list[Tensor]] = []
        setattr(self, name, lambda trainer, module, *_: self.read(module))

    def read(self, module: Any) -> None:
        self.seen.append([p.grad.clone() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("strategy", [None, "dp", "ddp"])
@pytest.mark.parametrize("exact", [False, True])
def test_on_after_backward_gets_the_gradient_of_the_step_once(ranks: Ranks, strategy: Any, exact: bool) -> None:
    """Of modules and of callbacks."""
    read: list[Any] = []

    def callbacks() -> list[pl.Callback]:
        read.extend([Reads("on_after_backward"), Reads("on_before_optimizer_step")])
        return read[-2:]

    world = 1 if strategy is None else 2
    for each in fits(ranks, AfterBackward(), world, exact, callbacks_of=callbacks, strategy=strategy or "single"):
        after = each.trainer.lightning_module.gradients
        assert len(after) == 2
        assert all(len(gradients) == 4 for gradients in after)
    for after, before in zip(read[::2], read[1::2], strict=True):
        assert len(after.seen) == len(before.seen) == 2
        for one, two in zip(after.seen, before.seen, strict=True):
            assert all(map(torch.equal, one, two))


# --- other backward passes ---


class Descends(SmallNet):
    """Lightning would drop these gradients; they would be added to the step's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        F.cross_entropy(self.net(x), batch[1]).backward()
        assert x.grad is not None
        return F.cross_entropy(self.net(batch[0] + 0.1 * x.grad.sign()), batch[1])


class DescendsRightly(SmallNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        F.cross_entropy(self.net(x), batch[1]).backward(inputs=[x])
        assert x.grad is not None
        return F.cross_entropy(self.net(batch[0] + 0.1 * x.grad.sign()), batch[1])


@pytest.mark.parametrize("options", [{}, {"pieces": 2}, {"pieces": 2, "exact": True}])
def test_a_backward_pass_in_training_step_is_refused(tmp_path: Path, options: Any) -> None:
    with pytest.raises(UserError, match=r"given a gradient to net.0.weight and 5 more|given a gradient to net.0"):
        fit(tmp_path, Descends(), **options)
    fit(tmp_path, DescendsRightly(), **options)


# --- dtypes and tensors without data ---


class OtherNumbers(SmallNet):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(3).to(dtype))
        self.large = nn.Parameter(torch.randn(130, 130).to(dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        added = self.scale.abs() + self.large.abs().mean()
        return F.cross_entropy(self.net(batch[0]) + added.float(), batch[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes_have_exact_sums(tmp_path: Path, dtype: torch.dtype) -> None:
    module = OtherNumbers(dtype)
    before = module.scale.detach().clone()
    fit(tmp_path, module, pieces=2, exact=True)
    assert module.scale.dtype == dtype
    assert module.scale.isfinite().all()
    assert not torch.equal(module.scale, before)


def test_complex_parameters_are_refused_with_exact_sums(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^exact=true: scale, large has complex numbers.*: keep real"):
        fit(tmp_path, OtherNumbers(torch.complex64), pieces=2, exact=True)
    fit(tmp_path, OtherNumbers(torch.complex64), pieces=2)


class Sparse(SmallNet):
    functional = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=not self.functional)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        indices = batch[1] % 10
        rows = F.embedding(indices, self.table.weight, sparse=True) if self.functional else self.table(indices)
        return F.cross_entropy(self.net(batch[0] + rows), batch[1])


class SparseByFunction(Sparse):
    functional = True


@pytest.mark.parametrize("kind", [Sparse, SparseByFunction])
def test_sparse_gradients_are_refused_with_exact_sums(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(UserError, match=r"^exact=true: the gradient of table.weight is sparse: leave out sparse=True"):
        fit(tmp_path, kind(), pieces=2, exact=True)
    module = kind()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    fit(tmp_path, module, pieces=2)


def meta() -> Any:
    with torch.device("meta"):
        return SmallNet()


class MadeOnMeta(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.more: Any = None

    def configure_model(self) -> None:
        if self.more is None:
            self.more = nn.BatchNorm1d(3, device="meta")


@pytest.mark.parametrize(
    ("make", "name", "options"),
    [(meta, "net.0.weight", {}), (MadeOnMeta, "more.weight", {}), (MadeOnMeta, "more.weight", {"exact": True})],
)
def test_tensors_without_data_are_refused(tmp_path: Path, make: Any, name: str, options: Any) -> None:
    with pytest.raises(
        UserError, match=f"^{re.escape(name)}, .* is on torch's device meta.*: make the module on a CPU"
    ):
        fit(tmp_path, make(), **options)


# --- buffers ---


class OtherShapes(Net):
    def configure_model(self) -> None:
        if not hasattr(self, "bank"):
            self.register_buffer("bank", torch.zeros(3 + self.trainer.global_rank))


def test_buffers_of_other_shapes_are_refused(ranks: Ranks) -> None:
    with pytest.raises(UserError, match="strategy=ddp: bank has not the same shape on all ranks: make the same"):
        fits(ranks, OtherShapes(), 2)
