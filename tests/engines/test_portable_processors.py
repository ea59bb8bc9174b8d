"""exact=portable on processors of other kinds, which qemu-user emulates: about three minutes each."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT, Program, Run

from lockstep.launch.portable import missing_instructions

QEMU = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64: Debian's package qemu-user"),
    pytest.mark.skipif(bool(missing_instructions()), reason="this processor has no AVX2 and FMA"),
]
PROCESSORS = ("Haswell", "EPYC", "Skylake-Client")  # of Intel, AMD, Intel
MINUTES = 90  # that an emulated program may take on a busy machine


@cache
def lines(processor: str | None, *options: str, isa: str = "") -> list[str]:
    """Return what portable_cases.py prints on a processor; None: this one."""
    emulated = ["nice", str(QEMU), "-cpu", processor] if processor else []
    done = subprocess.run(
        [*emulated, sys.executable, "tests/portable_cases.py", *options],
        cwd=ROOT,
        env={**os.environ, **({"ONEDNN_MAX_CPU_ISA": isa} if isa else {})},
        capture_output=True,
        text=True,
        timeout=MINUTES * 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.nightly
@pytest.mark.parametrize("processor", PROCESSORS)
def test_networks_layers_and_optimizers_have_the_same_bits(processor: str) -> None:
    here = lines(None)
    assert len({line.partition(":")[0] for line in here}) == 5, "nets, convolutions, linear, layers, optimizers"
    assert lines(processor) == here


def test_by_other_kernels_they_have_not() -> None:
    """The control: an instruction set less."""
    portable = {line for line in lines(None) if line.startswith("nets: ")}
    assert portable
    assert not portable & {*lines(None, "--unset", "nets", isa="SSE41")}


SHORT = ("experiment=golden", "callbacks.golden=null", "max_epochs=null", "max_steps=3", "logger=none")
LITTLE = ("+debug.trainer.limit_val_batches=1", "+debug.trainer.limit_test_batches=1")


@pytest.mark.nightly
def test_a_whole_run_has_the_same_bits(tmp_path: Path) -> None:
    """A parent that forks, a worker, validation and test."""
    elsewhere = Program(tmp_path / "there")
    command = ["nice", str(QEMU), "-cpu", PROCESSORS[0], sys.executable, "src/train.py", f"outputs={elsewhere.outputs}"]
    done = subprocess.run(
        [*command, *SHORT, *LITTLE], cwd=ROOT, capture_output=True, text=True, timeout=MINUTES * 60, check=False
    )
    emulated = Run(done.returncode, done.stdout, done.stderr, elsewhere.outputs)
    assert emulated.returncode == 0, str(emulated)
    here = Program(tmp_path / "here")(*SHORT, *LITTLE)
    assert emulated.summary["weights_sha256"] == here.summary["weights_sha256"]
    assert emulated.summary["metrics"]["test/loss"] == here.summary["metrics"]["test/loss"]
