"""Facts of this machine."""

import os
import platform
import subprocess
from pathlib import Path

from lockstep.launch.machine import available_cores, gpu_count
from lockstep.report.summary import versions


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def facts() -> list[str]:
    """Return lines of text: software, cores, GPUs and how they are linked."""
    software = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [software, f"{available_cores()} cores of {cpu_name()}, load {os.getloadavg()[0]:.1f}"]
    if not gpu_count():
        return lines
    query = "--query-gpu=name,memory.total,driver_version"
    for command in ([query, "--format=csv,noheader"], ["topo", "-m"]):
        done = subprocess.run(["nvidia-smi", *command], capture_output=True, text=True, check=False)
        lines += [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines
