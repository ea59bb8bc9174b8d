"""What this machine has: software, cores, memory, GPUs, network. Each look returns facts, and problems with cures."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import lockstep.launch.machine
from lockstep.run.checks import ROOT

GIB = float(1 << 30)
SHARED_GIB = 1.0  # /dev/shm below which loader processes and NCCL have failed people (Docker's default is 64 MiB)
DISK_GIB = 5.0
SECONDS = 60  # until a worker that does not answer is given up

Problem = tuple[str, str]  # what is wrong, and its cure
Found = tuple[list[str], list[Problem]]


def software() -> Found:
    """Python and packages, against what pyproject.toml asks for."""
    import tomllib

    from packaging.requirements import Requirement

    problems: list[Problem] = []
    found = {}
    for asked in map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]):
        try:
            found[asked.name] = metadata.version(asked.name)
        except metadata.PackageNotFoundError:
            problems.append((f"{asked.name} is not installed", "make setup, or pip install -e ."))
            continue
        if not asked.specifier.contains(found[asked.name].partition("+")[0], prereleases=True):
            wrong = f"{asked.name} is {found[asked.name]}, {asked.specifier} is needed"
            problems.append((wrong, "make setup, or pip install -e ."))
    shown = ", ".join(f"{name} {found[name]}" for name in ("torch", "lightning", "hydra-core") if name in found)
    return [f"Python {platform.python_version()}, {shown}, {platform.system()} {platform.release()}"], problems


def cores() -> Found:
    """Cores, threads and load."""
    import torch

    own = lockstep.launch.machine.cores()
    load = os.getloadavg()[0]
    limit = _cgroup_cores()
    problems: list[Problem] = []
    if limit is not None and limit < own - 0.5:
        wrong = f"{own} cores are seen, but this container may use {limit:g}: threads would wait for each other"
        problems.append((wrong, f"threads={max(1, int(limit))} (over all workers), or give the container more"))
    if load > 1.5 * own:
        problems.append((f"load {load:.1f} on {own} cores: something else is computing", "wait, or end it: top"))
    if (set_to := os.environ.get("OMP_NUM_THREADS")) and int(set_to) > own:
        problems.append((f"OMP_NUM_THREADS={set_to} on {own} cores", "unset OMP_NUM_THREADS"))
    facts = f"{own} cores of {os.cpu_count()}, torch uses {torch.get_num_threads()} threads, load {load:.1f}"
    return [f"{facts}, {_cpu_name()}"], problems


def memory() -> Found:
    """Memory, shared memory, disk, open files."""
    free, total = _memory()
    problems: list[Problem] = []
    facts = [f"{free:.1f} GiB free of {total:.1f}"]
    if free < 2:
        problems.append((f"{free:.1f} GiB of memory are free", "end what uses it, or take fewer workers"))
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm")
        facts[0] += f", shared {shared.free / GIB:.1f} of {shared.total / GIB:.1f}"
        if shared.free < SHARED_GIB * GIB:
            wrong = f"/dev/shm has {shared.free / GIB:.2f} GiB free: loader processes and NCCL need {SHARED_GIB:g}"
            problems.append((wrong, "docker run --shm-size=8g (or --ipc=host), or num_workers=0"))
    for name, folder in (("outputs", ROOT), ("temporary files", Path(tempfile.gettempdir()))):
        space = shutil.disk_usage(folder).free / GIB
        facts.append(f"{space:.1f} GiB of disk for {name} in {folder}")
        if space < DISK_GIB:
            problems.append(
                (f"{space:.1f} GiB of disk are free for {name} in {folder}", "clear it, or outputs=<elsewhere>")
            )
        if not os.access(folder, os.W_OK):
            problems.append((f"{folder} can't be written ({name})", "outputs=<a folder of yours>, or set TMPDIR"))
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < 1024:
        problems.append((f"a process may open {files} files", "ulimit -n 4096"))
    return facts, problems


def gpus() -> Found:
    """CUDA devices and how they are linked; asked for in another process, which may initialise CUDA."""
    if shutil.which("nvidia-smi") is None:
        return ["none: accelerator=cpu simulates devices, a process each"], []
    query = "name,memory.total,memory.used,driver_version"
    done = _run("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    facts = [line.strip() for line in done.splitlines() if line.strip()]
    problems: list[Problem] = []
    seen = _run(sys.executable, "-c", "import torch; print(torch.cuda.device_count(), torch.version.cuda)").split()
    if not seen or seen[0] != str(len(facts)):
        count, cuda = seen if len(seen) == 2 else ("0", "?")
        wrong = f"nvidia-smi lists {len(facts)} GPUs, torch (CUDA {cuda}) sees {count}"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        cure = f"CUDA_VISIBLE_DEVICES={hidden} hides some" if hidden is not None else "install a torch for this driver"
        problems.append((wrong, cure))
    if len(facts) > 1:
        facts += [line for line in _run("nvidia-smi", "topo", "-m").splitlines() if line.startswith(("GPU", "\tGPU"))]
    return facts, problems


def network() -> Found:
    """A free port on the loopback, and this machine's own name, which torch looks up."""
    problems: list[Problem] = []
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
            fact = f"port {probe.getsockname()[1]} is free on 127.0.0.1"
        except OSError as error:
            return [], [
                (f"no port can be opened on 127.0.0.1 ({error.strerror})", "bring the loopback up: ip link set lo up")
            ]
    started = time.perf_counter()
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        name = socket.gethostname()
        problems.append((f"this machine can't find its own name {name}", f"add '127.0.1.1 {name}' to /etc/hosts"))
    if (took := time.perf_counter() - started) > 2:
        problems.append((f"looking up this machine's own name takes {took:.0f} s", "add it to /etc/hosts"))
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        if name in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
            problems.append((f"{name}={os.environ[name]} is set, though no launcher runs", f"unset {name}"))
    return [f"{fact}, host {socket.gethostname()}"], problems


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cgroup_cores() -> float | None:
    """Cores that a container's quota allows (cgroup v2); None: no quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _memory() -> tuple[float, float]:
    """GiB free and in all."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
        return pages, pages
    return tuple(int(lines[name].split()[0]) * 1024 / GIB for name in ("MemAvailable", "MemTotal"))  # type: ignore[return-value]
