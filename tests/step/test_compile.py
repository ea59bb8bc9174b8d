"""`compile`: the same weights to rounding, under exact the same bits on every layout."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from conftest import Run, apart, composed
from refusals import refused_with
from step.test_loop import Net, fit
from torch import nn
from user_runs import DDP, go_on, same_bits, train

from lockstep.config.check import check
from lockstep.errors import StepRefused, UserError
from lockstep.job import build
from lockstep.launch import machine
from lockstep.step.compile import CudaGraphs, EagerEvaluation, compile_networks
from lockstep.step.network_parts import networks

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile with")


@pytest.fixture(scope="module", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile kernels once for this file, and here: nothing is left behind. They are plain loops, since to find
    out which vectors the compiler knows takes longer than all else; so would headers that few share."""
    import torch._inductor.config

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
    """Check configs as with two GPUs, and all that is needed to compile for them."""
    monkeypatch.setattr(machine, "gpu_count", lambda: 2)
    monkeypatch.setattr("lockstep.launch.machine.find_spec", lambda name: name)
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
        compile_networks(pl.LightningModule(), exact=False)


# --- CUDA graphs, on a machine without a GPU --------------------------------------------------------------------------

GRAPHS = "speed.cuda_graphs=true"


@pytest.mark.parametrize("chosen", [False, True])
def test_the_key_chooses_graphs(chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    request: list[dict[str, Any]] = []

    def record(network: nn.Module, options: dict[str, Any], dynamic: bool) -> None:
        torch._TorchCompileInductorWrapper(None, options, dynamic)  # torch refuses an option that it does not have
        request.append(options)

    for name in ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):  # torch sets them for graphs
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(nn.Module, "compile", record)
    compile_networks(Parts(), exact=False, cuda_graphs=chosen)
    assert [options.get("triton.cudagraphs", False) for options in request] == [chosen] * 3
    # else torch would go on without graphs where it can't record one
    assert all(options.get("triton.cudagraph_or_error", False) == chosen for options in request)


@pytest.mark.usefixtures("whole_run")
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("accelerator=cpu", "and accelerator=cpu .*a CPU has no CUDA graphs"),
        ("compile=false", "and compile=false .*give compile=true"),
        ("exact=true", "and exact=true .*give speed.cuda_graphs=false"),
        ("pieces=2", "and 2 pieces on one device .*give as many pieces as devices"),
        ("strategy=ddp devices=2 pieces=3 batch_size=48", "and 2 pieces on one device"),
        ("extras=[ledger]", r"and extras=\[ledger\] .*an extra may keep a gradient"),
    ],
)
def test_graphs_are_refused_where_they_can_not_work(overrides: str, message: str) -> None:
    refused_with(f"compile=true {GRAPHS} {overrides}", f"{GRAPHS} {message}")
    devices = ("strategy=ddp", "devices=2", "pieces=2", "batch_size=48")
    assert check(composed("compile=true", GRAPHS, *devices)).speed.cuda_graphs  # the control: one piece on each device


@pytest.mark.parametrize("chosen", [False, True])
def test_each_step_of_a_run_with_graphs_frees_the_memory_of_the_last_one(
    chosen: bool, tmp_path: Path, gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = check(composed("compile=true", *[GRAPHS] * chosen, "logger=none"))
    monkeypatch.setattr(build, "Trainer", lambda hooks, **options: Mock(hooks=hooks))
    hooks: Any = build.make_trainer(config, tmp_path, []).hooks  # type: ignore[attr-defined]
    marked = Mock()
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", marked)
    graphs = [hook for hook in hooks if isinstance(hook, CudaGraphs)]
    for hook in graphs:
        hook.before_step(Mock())
    assert (len(graphs), marked.call_count) == (chosen, chosen)


def test_of_an_error_about_a_graph_one_line_is_left_and_others_stay() -> None:
    graphs = CudaGraphs()
    text = "Error: accessing tensor output of CUDAGraphs that has been overwritten. Stack trace: File x\nmore"
    line = "accessing tensor output of CUDAGraphs that has been overwritten"
    with pytest.raises(StepRefused, match=f"^speed.cuda_graphs=true: {line}: give speed.cuda_graphs=false$"):
        graphs.on_error(Mock(), RuntimeError(text))
    with pytest.raises(StepRefused, match=r"^speed.cuda_graphs=true: skipping cudagraphs: give "):
        graphs.on_error(Mock(), RuntimeError("first\nskipping cudagraphs"))
    graphs.on_error(Mock(), RuntimeError("out of memory"))
    graphs.on_error(Mock(), ValueError("cudagraphs"))


@pytest.mark.usefixtures("whole_run")  # importing torch's compiler takes seconds
def test_what_torch_can_not_record_is_refused_in_a_line(tmp_path: Path) -> None:
    import torch._inductor.config
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}), pytest.raises(RuntimeError) as raised:
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to cpu device (cpu:0). Found from:\n  x = y.cpu()")
    overwritten = RuntimeError(CUDAGraphTreeManager.format_dealloc_msg("File 'x.py'"))
    for error, message in (
        (raised.value, "skipping cudagraphs due to cpu device (cpu:0). Found from:"),
        (overwritten, "accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run"),
    ):
        with pytest.raises(StepRefused) as refused:
            CudaGraphs().on_error(Mock(), error)
        assert str(refused.value) == f"{GRAPHS}: {message}: give speed.cuda_graphs=false"
    CudaGraphs().on_error(Mock(), RuntimeError("out of memory"))  # another error stays


@pytest.mark.usefixtures("processes")
@compiles
def test_training_is_compiled_and_evaluation_is_not(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    plain, compiled = Net(norm=True, dropout=0.3).double(), Net(norm=True, dropout=0.3).double()
    compile_networks(compiled, exact=False)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    counters.clear()
    fit(tmp_path, compiled, ours=True, pieces=2, callbacks=[EagerEvaluation()])
    assert counters["stats"]["unique_graphs"] == 2  # pieces of 4, and of 3 in the tail; not the 22 of the validation
    fit(tmp_path, plain, ours=True, pieces=2)
    for (name, one), other in zip(plain.state_dict().items(), compiled.state_dict().values(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14, msg=name)


@compiles
@pytest.mark.nightly
def test_whole_runs_agree_to_rounding_and_under_exact_in_every_bit(project: Path, tmp_path: Path) -> None:
    """Also one that goes on uncompiled, in the middle of an epoch."""

    def run(name: str, *overrides: str) -> Run:
        options = ("data.samples=80", *overrides)  # epochs of three steps
        actual = train(project, tmp_path / name, "LitDigits", *options)
        assert ("compiled, 1 thread" in actual.stderr + actual.stdout) == ("compile=true" in overrides)
        return actual

    plain = run("plain", "exact=true")
    alone, ddp = (run(f"exact{len(on)}", "compile=true", "exact=true", "max_steps=4", *on) for on in ((), DDP))
    assert same_bits(alone, ddp)
    ended = go_on(project, ddp, "compile=false", "max_steps=6")
    assert plain.summary["steps"] == ended.summary["steps"] == 6
    assert apart(ended, plain) < 1e-13


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("whole_run")
def test_exact_needs_a_torch_that_can_choose_kernels_without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["fallback_random"])  # as torch 2.9
    with pytest.raises(UserError, match=r"^compile=true exact=true: .*use torch 2\.10 or newer"):
        compile_networks(Parts(), exact=True)
    compile_networks(Parts(), exact=False)


@pytest.mark.usefixtures("gpus")
def test_a_gpu_needs_triton_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "ccache-without no-such-compiler")
    with pytest.raises(
        UserError, match=r"compile=true needs a C compiler.*the PATH has no ccache-without: .*set CC to"
    ):
        check(dict(composed(*["compile=true"])))
    monkeypatch.setattr("lockstep.launch.machine.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"compile=true needs triton, which is not installed"):
        check(dict(composed(*["compile=true"])))


def test_a_machine_without_a_compiler_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        UserError, match=r"compile=true needs a C\+\+ compiler.*the PATH has no no-such-compiler: .*set CXX to"
    ):
        check(dict(composed(*["compile=true", "accelerator=cpu"])))
    monkeypatch.setenv("CXX", f"{sys.executable} -I")
    monkeypatch.setattr("sysconfig.get_path", lambda name: os.devnull)
    with pytest.raises(UserError, match=r"compile=true needs Python's headers"):
        check(dict(composed(*["compile=true", "accelerator=cpu"])))
