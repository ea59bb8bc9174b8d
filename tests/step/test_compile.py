"""`compile`: the same weights to rounding, under exact the same bits on every layout; and what CUDA graphs ask for."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
import torch._inductor.config
from conftest import Run, apart
from own_runs import DDP, go_on, same_bits, train
from step.test_loop import Net, fit
from torch import nn

from lockstep.config import check as config
from lockstep.config.check import check
from lockstep.config.schema import MODES
from lockstep.errors import UserError
from lockstep.run.api import compose
from lockstep.step.networks import EagerEvaluation, compile_networks, networks

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile with")


@pytest.fixture(scope="module", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kernels are compiled once for this file, and here: nothing is left behind. They are plain loops, since to find
    out which vectors the compiler knows takes longer than all else; so would headers that few share."""
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._inductor.config.patch(
            {"cpp.vec_isa_ok": False, "compile_threads": 1, "cpp_cache_precompile_headers": False}
        ),
    ):
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        patch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, and all that is needed to compile for them."""
    monkeypatch.setattr(config, "gpu_count", lambda: 2)
    monkeypatch.setattr("lockstep.step.compiled.find_spec", lambda name: name)
    monkeypatch.setenv("CC", sys.executable)


class Parts(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Linear(2, 2), nn.MaxPool2d(2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.ModuleDict({"head": nn.Linear(2, 2)})])


# --- what is compiled -------------------------------------------------------------------------------------------------


def test_networks_are_what_is_called_and_has_weights() -> None:
    parts: Any = Parts()
    assert list(networks(parts)) == [parts.stem, parts.blocks[0], parts.blocks[2]["head"]]
    with pytest.raises(UserError, match=r"LightningModule has no layer with parameters.*compile=false"):
        compile_networks(pl.LightningModule(), "default", exact=False)


@pytest.mark.parametrize("mode", get_args(MODES))
def test_torch_takes_every_mode(mode: str) -> None:
    for exact in (False, True):
        net = Net()
        compile_networks(net, mode, exact)  # it checks the options now, and compiles at the first call


@compiles
def test_training_is_compiled_and_evaluation_is_not(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    plain, compiled = Net(norm=True, dropout=0.3).double(), Net(norm=True, dropout=0.3).double()
    compile_networks(compiled, "default", exact=False)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    counters.clear()
    fit(tmp_path, compiled, ours=True, pieces=2, callbacks=[EagerEvaluation()])
    assert counters["stats"]["unique_graphs"] == 2  # pieces of 4, and of 3 in the tail; not the 22 of the validation
    fit(tmp_path, plain, ours=True, pieces=2)
    for (name, one), other in zip(plain.state_dict().items(), compiled.state_dict().values(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14, msg=name)


@compiles
@pytest.mark.slow
def test_whole_runs_agree_to_rounding_and_under_exact_in_every_bit(project: Path, tmp_path: Path) -> None:
    """Also one that goes on uncompiled, in the middle of an epoch."""

    def run(name: str, *overrides: str) -> Run:
        options = ("data.samples=80", *overrides)  # epochs of three steps
        found = train(project, tmp_path / name, "LitDigits", *options)
        assert ("compiled, 1 thread" in found.stderr + found.stdout) == ("compile=true" in overrides)
        return found

    plain = run("plain", "exact=true")
    alone, ddp = (run(f"exact{len(on)}", "compile=true", "exact=true", "max_steps=4", *on) for on in ((), DDP))
    assert same_bits(alone, ddp)
    ended = go_on(project, ddp, "compile=false", "max_steps=6")
    assert plain.summary["steps"] == ended.summary["steps"] == 6
    assert apart(ended, plain) < 1e-13


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpus")
def test_a_gpu_needs_triton_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "ccache-without no-such-compiler")
    with pytest.raises(UserError, match=r"compile=true needs a C compiler.*no ccache-without on the PATH; CC names"):
        check(dict(compose(*["compile=true"])))
    monkeypatch.setattr("lockstep.step.compiled.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"compile=true needs triton, which is not installed"):
        check(dict(compose(*["compile=true"])))


def test_a_machine_without_a_compiler_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"compile=true needs a C\+\+ compiler.*no no-such-compiler on the PATH; CXX"):
        check(dict(compose(*["compile=true", "accelerator=cpu"])))
    monkeypatch.setenv("CXX", f"{sys.executable} -I")
    monkeypatch.setattr("sysconfig.get_path", lambda name: os.devnull)
    with pytest.raises(UserError, match=r"compile=true needs Python's headers"):
        check(dict(compose(*["compile=true", "accelerator=cpu"])))


# --- CUDA graphs, played on the CPU -----------------------------------------------------------------------------------


class Replay(torch.autograd.Function):
    """A network and its loss as a CUDA graph would run them: what comes out, loss and gradient, lies in memory that
    the next run overwrites, and autograd takes the gradient as it is, without a copy."""

    loss: torch.Tensor = torch.zeros(())
    gradient: torch.Tensor = torch.zeros(3, 16)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with torch.no_grad():
            Replay.loss.copy_((x @ weight.T).square().mean())
        return Replay.loss.view(())

    @staticmethod
    def backward(ctx: Any, up: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        Replay.gradient.copy_(up * 2 * (x @ weight.T).T @ x / (len(x) * len(weight)))
        return None, Replay.gradient


@pytest.fixture
def shared_gradients() -> Any:
    """How cudagraph_trees.py tells autograd that its own reference to a gradient does not count."""
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(Replay.gradient)
    yield
    torch._C._remove_cached_tensor(Replay.gradient)
    torch._C._set_cached_tensors_enabled(False)


class Graphed(pl.LightningModule):
    def __init__(self, replayed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 16))
        self.replayed = replayed
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].flatten(1)
        loss: torch.Tensor = Replay.apply(x, self.weight) if self.replayed else (x @ self.weight.T).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.usefixtures("shared_gradients")
@pytest.mark.parametrize("exact", [False, True])
def test_what_a_graph_overwrites_is_kept_from_piece_to_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    marks: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))

    def trained(replayed: bool, careful: bool) -> Graphed:
        module = Graphed(replayed)
        fit(tmp_path, module, ours=True, pieces=2, exact=exact, graphs=careful, limit_val_batches=0)
        return module

    plain, kept, careless = trained(False, False), trained(True, True), trained(True, False)
    assert len(marks) == 2 * 3 * 2  # epochs, steps, pieces
    torch.testing.assert_close(kept.weight, plain.weight, rtol=1e-5, atol=1e-6)
    assert kept.losses == pytest.approx(plain.losses, rel=1e-5)
    assert careless.losses != pytest.approx(plain.losses, rel=1e-3)  # the control
    assert exact or not torch.allclose(careless.weight, plain.weight, rtol=1e-3)  # exact sums keep nothing of it
