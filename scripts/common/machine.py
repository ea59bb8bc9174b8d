"""What this machine is, and what is wrong with it for training."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from lockstep.launch.machine import cores, gpu_count
from lockstep.run.summary import versions

GIB = float(1 << 30)
SHARED_GIB = 1.0  # /dev/shm below which loader processes and NCCL have failed people (Docker's default is 64 MiB)


def cpu_name() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def facts() -> list[str]:
    """Lines for people: software, cores, GPUs and how they are linked."""
    software = ", ".join(f"{name} {version}" for name, version in versions().items())
    found = [software, f"{cores()} cores of {cpu_name()}, load {os.getloadavg()[0]:.1f}"]
    query = "name,memory.total,driver_version"
    found += [f"GPU {line}" for line in _said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")]
    if gpu_count() > 1:
        found += [line for line in _said("nvidia-smi", "topo", "-m") if line.lstrip().startswith("GPU")]
    return found


def problems() -> list[str]:
    """A line for each thing that would slow training down or end it, and what helps."""
    found, own, quota = [], cores(), _quota()
    if quota is not None and quota < own - 0.5:
        found.append(f"{own} cores are seen, but this container may use {quota:g}: threads={max(1, int(quota))}")
    if (load := os.getloadavg()[0]) > own / 4:
        found.append(f"other programs are busy here (load {load:.1f} on {own} cores): times will be off")
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if threads.isdecimal() and int(threads) > own:
        found.append(f"OMP_NUM_THREADS={threads} on {own} cores: unset it")
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free / GIB) < SHARED_GIB:
        cure = "docker run --shm-size=8g (or --ipc=host), or num_workers=0"
        found.append(f"{free:.2f} GiB are free in {shared}, {SHARED_GIB:g} are needed: {cure}")
    listed = len(_said("nvidia-smi", "--list-gpus"))
    if listed > (seen := gpu_count()):
        cure = "CUDA_VISIBLE_DEVICES, or a torch for this driver"
        found.append(f"nvidia-smi lists {listed} GPUs, torch sees {seen}: {cure}")
    return found


def _said(*command: str) -> list[str]:
    """The lines that a program prints; none where there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if not done.returncode else []


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _quota() -> float | None:
    """Cores that a container's quota allows (cgroup v2); None: no quota."""
    quota, period = (*" ".join(_lines("/sys/fs/cgroup/cpu.max")).split(), "max", "max")[:2]
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
