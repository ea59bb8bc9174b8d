"""What two workers of this machine reach: the all-reduce of several sizes, measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checkup.machine import SECONDS, Found

from lockstep.launch.group import loopback
from lockstep.launch.machine import gpu_count

FEWEST_MB_PER_SECOND = 50.0  # an all-reduce slower than that makes two workers slower than one on most models
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)  # bytes that are all-reduced


def all_reduce() -> Found:
    """Seconds of an all-reduce between two workers of this machine, by size."""
    import torch

    backends = ["gloo"] + ["nccl"] * (gpu_count() > 1 and torch.distributed.is_nccl_available())
    facts, problems = [], []
    for backend in backends:
        rows = measure(backend)
        if isinstance(rows, str):
            cure = (
                "see NCCL_DEBUG=INFO" if backend == "nccl" else "is the loopback up, does a firewall stop local ports?"
            )
            problems.append((f"two workers can't all-reduce over {backend}: {rows}", cure))
            continue
        size, seconds = SIZES[-1], rows[-1]
        rate = size / seconds / 1e6
        shown = ", ".join(f"{_bytes(size)} {took * 1000:.2f} ms" for size, took in zip(SIZES, rows, strict=True))
        facts.append(f"2 workers over {backend}: {shown} ({rate:,.0f} MB/s)")
        if rate < FEWEST_MB_PER_SECOND:
            problems.append(
                (f"{backend} moves {rate:.0f} MB/s between two workers of one machine", "is it busy? ddp will not pay")
            )
    return facts, problems


def measure(backend: str) -> list[float] | str:
    """Median seconds by size, or what went wrong. The workers are processes of their own: this one needs no CUDA."""
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        environment = {"GLOO_SOCKET_IFNAME": loopback(), **os.environ, "OMP_NUM_THREADS": "1"}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        workers = [
            subprocess.Popen(
                worker_command(backend, Path(folder, "store"), rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        try:
            said = [worker.communicate(timeout=SECONDS) for worker in workers]
        except subprocess.TimeoutExpired:
            return f"no answer in {SECONDS} s"
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if any(worker.returncode for worker in workers):
        lines = [line for _, errors in said for line in errors.strip().splitlines() if "Error" in line]
        return lines[-1] if lines else "a worker died"
    return [float(number) for number in said[0][0].split()]


def worker_command(backend: str, store: Path, rank: int) -> list[str]:
    program = Path(__file__).with_name("worker.py").resolve()
    return [sys.executable, str(program), backend, str(store), str(rank), *map(str, SIZES)]


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
