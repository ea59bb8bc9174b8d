"""exact=portable on processors of other kinds, which qemu-user emulates: about three minutes each."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT, Program

from lockstep.config.portable import missing_instructions

QEMU = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.proof,
    pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64: Debian's package qemu-user"),
    pytest.mark.skipif(bool(missing_instructions()), reason="this processor has no AVX2 and FMA"),
]
PROCESSORS = ("Haswell", "EPYC", "Skylake-Client")  # of Intel, AMD, Intel
MINUTES = 30  # that an emulated program may take on a busy machine


@cache
def lines(processor: str | None, *options: str, isa: str = "") -> list[str]:
    """What portable_cases.py prints on a processor; None: this one."""
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


def test_a_run_on_another_processor_comes_to_the_recorded_weights(tmp_path: Path) -> None:
    """All of it: a parent that forks, a worker, validation and test."""
    program = Program(tmp_path / "outputs")
    command = [str(QEMU), "-cpu", PROCESSORS[0], sys.executable, "src/train.py", "experiment=golden", "logger=none"]
    done = subprocess.run(
        ["nice", *command, f"outputs={program.outputs}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=MINUTES * 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "weights_sha256 is the recorded one" in done.stdout + done.stderr
