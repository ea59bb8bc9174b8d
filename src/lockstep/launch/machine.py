"""What this machine has for a run; asked in the parent, without torch where there is no GPU."""

import glob
import math
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePath

from lockstep.launch.environment import environment

BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Linux's names for a processor's instructions: of x86, x86, ARM


def available_cores() -> int:
    """Of the CPU, that this process may use; of a container that is limited to 1.5 of them, 2."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([available, *cgroup_cpu_limits()])))


def cgroup_cpu_limits(cgroup_file: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> list[float]:
    """Cores that each control group of this process limits its time to, see cgroups(7); none, where none does."""
    quotas: list[float] = []
    with suppress(OSError):
        for line in Path(cgroup_file).read_text().splitlines():
            _, kinds, path = line.split(":", 2)  # no kinds: version 2
            for group in (PurePath(path), *PurePath(path).parents) if not kinds or "cpu" in kinds.split(",") else ():
                folder = Path(root, "cpu" * bool(kinds), str(group).lstrip("/"))  # a container sees only its own, as /
                files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if kinds else ("cpu.max",)
                with suppress(OSError, ValueError):  # max: as much as there is
                    quota, period = map(int, " ".join((folder / file).read_text() for file in files).split())
                    quotas += [quota / period] if quota > 0 else []
    return quotas


def cores_per_worker(workers: int) -> int:
    """Cores for each of this machine's workers. A task of SLURM's with cores of its own has these."""
    return available_cores() if environment().dedicated_cores else max(1, available_cores() // workers)


def cpu_cap() -> int:
    """Workers that one machine is asked to carry on its CPU: 4 a core, and 8 on any machine."""
    return max(8, 4 * available_cores())


def gpu_count() -> int:
    """CUDA devices that this process may use."""
    if not glob.glob("/dev/nvidia[0-9]*") and not glob.glob("/dev/dxg"):
        return 0
    import torch

    return _call_in_child(torch.cuda.device_count)


def hide_gpu(index: int) -> None:
    """Processes that this one starts from here on do not see this one of the GPUs that those before saw."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpu_count())))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for at, gpu in enumerate(seen.split(",")) if at != index)


def computes_bf16(accelerator: str, cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether `cpu`, or each CUDA device (`gpu`) that this process may use, has instructions for bf16. Without them it
    is emulated: on a CPU `experiment=mnist_fast` takes 121 s instead of 17 s in float32."""
    if accelerator == "gpu":
        return _gpus_compute_bf16()
    with suppress(OSError):
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE)
        return flags is not None and not BF16.isdisjoint(flags[1].split())
    return False  # no Linux: nothing says so


@cache
def _gpus_compute_bf16() -> bool:
    import torch

    def all_support_bf16() -> bool:
        return all(torch.cuda.get_device_capability(device) >= (8, 0) for device in range(torch.cuda.device_count()))

    return bool(_call_in_child(all_support_bf16))


def _call_in_child(question: Callable[[], int]) -> int:
    """A small number that torch knows of CUDA, 0 where it fails to answer: the question may touch CUDA, which would
    forbid the launcher to fork. NVML can tell the number of GPUs without, but not that of a GPU's parts (MIG)."""
    import torch

    if torch.cuda.is_initialized():
        return question()
    child = os.fork()
    if not child:
        code = 0
        try:
            code = int(question())
        finally:
            os._exit(code)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def compiler_lacking(accelerator: str) -> str | None:
    """What this machine lacks to compile: otherwise torch would tell in the first step, on a page."""
    if accelerator == "gpu":
        if find_spec("triton") is None:
            return "triton, which is not installed: pip install triton"
        kind, key, usual = "C", "CC", ["gcc", "clang"]  # as triton looks for it
    else:
        kind, key, usual = "C++", "CXX", [{"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")]
    named = shlex.split(os.environ.get(key, ""))[:1] or usual
    if not any(map(shutil.which, named)):
        return f"a {kind} compiler, and there is no {' or '.join(named)} on the PATH; {key} names another"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return None if headers.is_file() else f"Python's headers, {headers} (the package python3-dev, say)"
