"""exact=portable: what it needs, what it can't be combined with, and the recorded weights of experiment=golden."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, Program, python, summary_of
from refusals import checked, refused

from lockstep.config import check as config
from lockstep.config.arguments import exact_of
from lockstep.launch import machine
from lockstep.launch.portable import VARIABLES, missing_instructions

LACKING = missing_instructions()
here = pytest.mark.skipif(bool(LACKING), reason=f"this processor has no {', '.join(LACKING)}")
OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)  # a newer one must fail: record the weights again
recorded = pytest.mark.skipif(OLDER, reason=f"the weights were recorded with torch 2.15, this is {torch.__version__}")
GOLDEN = ("experiment=golden", "logger=none")
PAGE = ROOT / "src" / "lockstep" / "conf" / "experiment" / "golden.yaml"
SHA256 = yaml.safe_load(PAGE.read_text())["callbacks"]["golden"]["sha256"]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1")


@pytest.mark.parametrize(
    ("cpuinfo", "missing"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx fma avx2\nbugs\t\t: none\n", []),
        ("processor\t: 0\nflags\t\t: fpu sse2 avx avx2x\nbugs\t\t: fma\n", ["avx2", "fma"]),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", ["avx2", "fma"]),
        (None, ["avx2", "fma"]),  # no Linux
    ],
)
def test_a_processor_without_the_instructions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, missing: list[str]
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert missing_instructions(str(tmp_path / "cpuinfo")) == missing
    monkeypatch.setattr(config, "missing_instructions", lambda: missing)
    if missing:
        assert refused("exact=portable", "accelerator=cpu") == (
            "exact=portable: this processor has no avx2 and fma: give exact=true"
        )
    else:
        assert checked("exact=portable", "accelerator=cpu").layout.exact == "portable"
    assert checked("exact=true").layout.exact is True  # the control


@pytest.mark.parametrize(
    ("override", "reads"),
    [
        ("precision=bf16-mixed", "precision=bf16-mixed and exact=portable don't go together: give precision=32-true"),
        ("precision=auto", "precision=auto and exact=portable don't go together: give precision=32-true"),
        (
            "compile=true",
            "compile=true and exact=portable don't go together: compiled code differs between processors; "
            "give compile=false",
        ),
        ("exact=maybe", "exact=maybe: must be a valid boolean or 'portable'"),
    ],
)
def test_what_it_cannot_be_combined_with(monkeypatch: pytest.MonkeyPatch, override: str, reads: str) -> None:
    monkeypatch.setattr(config, "missing_instructions", list)
    assert refused("accelerator=cpu", "exact=portable", override) == reads


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "missing_instructions", list)
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    message = refused("exact=portable")
    assert message == "accelerator=gpu and exact=portable don't go together: it works on CPUs only; give exact=true"


def test_a_command_line_asks_for_it_itself_or_by_its_experiment() -> None:
    assert exact_of(["seed=1", "exact=portable"]) == exact_of(["experiment=golden"]) == "portable"
    assert exact_of(["experiment=golden", "exact=true"]) == "true"
    assert exact_of(["experiment=mnist_cnn", "model=resnet18"]) is None
    assert exact_of(["exact=true,portable", "-m"]) == "true,portable", "each job sees to it"


PROCESS = """
import sys, torch
from lockstep.launch.portable import choose_kernels
if sys.argv[1] == "computes":
    torch.ones(3).add(1).sum()
choose_kernels("portable")
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.usefixtures("processes")
@here
def test_a_process_that_has_computed_by_other_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    late = python(PROCESS, "computes")
    assert "UserError: exact=portable: this process has already computed with other kernels" in late.stderr
    assert python(PROCESS, "only imports").stdout == "AVX2\n"  # the control


PRODUCTS = """
import torch
from lockstep.launch.portable import set_up_worker
generator = torch.Generator().manual_seed(0)
one, other, bias = (torch.rand(*shape, generator=generator) for shape in ((5, 70), (70, 9), (9,)))
mixed = one[:, ::2], other[::2], bias
whole = torch.arange(6).view(2, 3), torch.arange(6).view(3, 2), torch.arange(2)
empty = torch.ones(3, 0), torch.ones(0, 2), torch.ones(2)

def results():
    for a, b, c in ((one, other, bias), mixed, whole, empty, [each.double() for each in (one, other, bias)]):
        yield a @ b
        yield torch.addmm(c, a, b)
        yield torch.addmm(c, a, b, beta=2, alpha=3)
        yield torch.addmm(torch.ones(1, dtype=a.dtype), a, b)
        yield a.sqrt()
        yield a.t().clone().float().sqrt_()
    yield torch.tensor(9.0).sqrt()

before = [*results()]
set_up_worker("portable")
for old, new in zip(before, results(), strict=True):
    torch.testing.assert_close(new, old)
    assert new.stride() == old.stride()
wide = torch.rand(5, 7, requires_grad=True)
(wide @ wide.t()).sqrt().sum().backward()
print(torch.isfinite(wide.grad).all().item(), any(not a.equal(b) for a, b in zip(before, results())))
"""


@pytest.mark.usefixtures("processes")
@here
def test_products_and_square_roots_are_those_of_torch_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    done = python(PRODUCTS)
    assert done.stdout == "True True\n", done.stderr


LAYOUTS = ("strategy=ddp", "devices=3"), ("strategy=dp", "devices=2")


@recorded
@here
@pytest.mark.parametrize("layout", [(), *(pytest.param(each, marks=pytest.mark.nightly) for each in LAYOUTS)], ids=str)
def test_golden_has_the_recorded_weights(run_train: Program, layout: tuple[str, ...]) -> None:
    run = run_train(*GOLDEN, *layout)
    assert f"weights_sha256 is the recorded one: {SHA256}" in run.stdout + run.stderr
    assert run.summary["weights_sha256"] == SHA256
    assert run.summary["layout"]["exact"] == "portable"


@here
def test_golden_fails_on_other_weights(run_train: Program) -> None:
    run = run_train(*GOLDEN, "exact=true", ok=False)
    assert run.returncode == 1
    assert f": must be the recorded {SHA256}" in run.stderr
    assert run.summary["status"] == "failed"


@pytest.mark.nightly
@recorded
@here
def test_golden_resnet18_has_the_recorded_weights(run_train: Program) -> None:
    run_train("experiment=golden_resnet18", "logger=none")


@pytest.mark.nightly
@recorded
@here
def test_a_killed_and_resumed_run_has_the_recorded_weights(run_train: Program) -> None:
    process = run_train.start(*GOLDEN, "checkpoint_every=5", "checkpoint_keep=-1")
    folder = run_train.wait_for_checkpoint(process, "step_10")
    run_train.kill(process)
    run_train(f"resume={folder}", "strategy=ddp", "devices=2")
    assert summary_of(folder)["weights_sha256"] == SHA256


@pytest.mark.nightly
@recorded
@pytest.mark.usefixtures("processes")
@here
def test_golden_under_torchrun(tmp_path: Path) -> None:
    """The engine's ranks share objects, and so compute, before Hydra has composed."""
    program = Program(tmp_path / "outputs", launcher=TORCHRUN)
    assert program(*GOLDEN, "strategy=ddp").summary["weights_sha256"] == SHA256


@here
def test_a_sweep_has_portable_jobs_beside_others(run_train: Program) -> None:
    short: Mapping[str, str] = {"max_epochs": "null", "max_steps": "3", "callbacks.golden": "null"}
    run = run_train(*GOLDEN, *(f"{key}={value}" for key, value in short.items()), "exact=true,portable,true", "-m")
    one, portable, also_one = (summary_of(job)["weights_sha256"] for job in run.jobs)
    assert one == also_one != portable
