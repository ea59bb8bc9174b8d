"""The fast path is chosen by itself, said in the start-up line, and each part of it has a key that switches it off."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Program, composed
from user_runs import train

from lockstep.config import check as config
from lockstep.config.check import check
from lockstep.job.worker_setup import choose_tf32
from lockstep.launch import machine
from lockstep.launch.machine import cgroup_cpu_limits

POLICY = "OMP_WAIT_POLICY"
TASK = ["data=synthetic", "data.val_fraction=0", "threads=1", "callbacks=none", "logger=none"]
COUNTED = f"""
import resource, sys
sys.path.insert(0, {str(ROOT / "src")!r})
from functools import partial
from lockstep.commands import cli, project_programs
from train import train
code, said = cli.run_command(partial(project_programs.train, train), "train", sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt, flush=True)
sys.exit(said or code)
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
@pytest.mark.nightly
def test_freed_memory_stays_by_default(tmp_path: Path) -> None:
    script = tmp_path / "counted.py"
    script.write_text(COUNTED)

    def faults(*overrides: str) -> int:
        """Return the number of pages that the kernel had to give to a run's worker."""
        run = Program(tmp_path, str(script))(
            *TASK, "data.samples=512", "batch_size=512", "max_steps=6", "max_epochs=9", *overrides
        )
        return int(run.stdout.splitlines()[-1])

    default_faults, returned_faults = faults(), faults("speed.allocator=system")
    assert returned_faults - default_faults > 10_000, (default_faults, returned_faults)


def test_what_was_chosen_is_reported_and_can_be_switched_off(run_train: Program) -> None:
    chosen = run_train(*TASK, "data.samples=100", "max_steps=1")
    assert "| 32-true | channels_last, 1 thread\n" in chosen.stdout + chosen.stderr
    plain = run_train(*TASK, "data.samples=100", "max_steps=1", "speed.memory_format=contiguous", "threads=2")
    assert "| 32-true | 2 threads\n" in plain.stdout + plain.stderr


@pytest.mark.parametrize(("choice", "convolutions", "others"), [("auto", 1, 0), (True, 1, 1), (False, 0, 0)])
def test_tf32_is_set_whatever_was_set_before(choice: bool | str, convolutions: int, others: int) -> None:
    try:
        for before in (True, False):
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = before
            choose_tf32(choice)
            assert torch.backends.cudnn.allow_tf32 == bool(convolutions)
            assert torch.backends.cuda.matmul.allow_tf32 == bool(others)
            assert torch.get_float32_matmul_precision() == ("high" if others else "highest")  # Lightning reads this
    finally:
        choose_tf32("auto")


@pytest.mark.parametrize(
    ("report", "files", "actual"),
    [
        ("0::/box/run", {"box/cpu.max": "150000 100000", "box/run/cpu.max": "max 100000"}, [1.5]),
        ("0::/somewhere/else", {"cpu.max": "300000 100000"}, [3.0]),  # what a container is told, and what it sees
        ("3:cpu,cpuacct:/box", {"cpu/box/cpu.cfs_quota_us": "50000", "cpu/box/cpu.cfs_period_us": "100000"}, [0.5]),
        ("3:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, []),
        ("3:cpuset:/box\n0::/", {}, []),
    ],
)
def test_a_limit_on_cpu_time_is_a_number_of_cores(
    report: str, files: dict[str, str], actual: list[float], tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(f"{report}\n")
    for name, content in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{content}\n")
    assert cgroup_cpu_limits(str(tmp_path / "cgroup"), str(tmp_path / "fs")) == actual


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(sys.platform != "linux", reason="the threads are libgomp's")
def test_threads_wait_shortly_for_each_other_by_default(tmp_path: Path) -> None:
    def turns(**variables: str) -> list[str]:
        """Return the turns that libgomp waits in a process of `train.py`, as it prints them when it is loaded."""
        inherited = {name: value for name, value in os.environ.items() if name not in (POLICY, "GOMP_SPINCOUNT")}
        run = subprocess.run(
            [sys.executable, ROOT / "src" / "train.py", *TASK, "data.samples=64", "max_steps=1", f"outputs={tmp_path}"],
            env={**inherited, **variables, "OMP_DISPLAY_ENV": "verbose"},
            capture_output=True,
            text=True,
            check=True,
        )
        return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", run.stderr)

    assert set(turns()) == {"1000"}
    assert set(turns(GOMP_SPINCOUNT="77")) == {"77"}
    assert set(turns(OMP_WAIT_POLICY="PASSIVE")) == {"0"}


def test_a_worker_chooses_tf32_and_takes_numbers_below_the_normal_ones_for_zero(project: Path, tmp_path: Path) -> None:
    """Gradients of a loss near zero: a processor may take a hundred times as long for each. The control: as torch is
    left, they are not zero. By default convolutions are in TF32."""
    options = ("threads=2", "max_steps=1", "+callbacks.small._target_=mine.Small")
    run = train(project, tmp_path, "LitDigits", *options, "speed.tf32=false")
    assert "\n0 of 1048576 are left, TF32: False" in f"\n{run.stdout}"
    bits = torch.full((8,), 1 << 21, dtype=torch.int32)
    assert bool((bits.view(torch.float32) * 1.5).view(torch.int32).all())


@pytest.mark.parametrize(
    ("overrides", "cores", "flags", "threads"),
    [
        (["precision=bf16-mixed"], 2, "avx512_bf16 amx_bf16 amx_tile", 1),
        (["precision=auto"], 8, "amx_bf16", 1),
        (["precision=bf16-mixed", "threads=2"], 2, "amx_bf16", 2),
        (["precision=bf16-mixed"], 2, "avx512_bf16", 2),  # its kernels have no barriers without sleep
        (["precision=bf16-mixed"], 9, "amx_bf16", 9),
        ([], 2, "amx_bf16", 2),
        (["exact=true"], 2, "", 1),
    ],
)
def test_one_thread_computes_bf16_with_amx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str], cores: int, flags: str, threads: int
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\n")
    monkeypatch.setattr(machine.computes_bf16, "__defaults__", (str(tmp_path / "cpuinfo"),))
    monkeypatch.setattr(machine.has_amx, "__defaults__", (str(tmp_path / "cpuinfo"),))
    monkeypatch.setattr(config, "cores_per_worker", lambda workers: cores)
    assert check(composed("accelerator=cpu", *overrides)).worker_threads == threads
