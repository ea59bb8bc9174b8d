"""What this machine has for a run; asked in the parent, without torch where there is no GPU."""

from __future__ import annotations

import glob
import os


def cores() -> int:
    """Of the CPU, that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_cap() -> int:
    """Workers that one machine is asked to carry on its CPU: 4 a core, and 8 on any machine."""
    return max(8, 4 * cores())


def gpu_count() -> int:
    """CUDA devices that this process may use, asked through NVML: touching CUDA would forbid the launcher to fork."""
    if not glob.glob("/dev/nvidia[0-9]*") and not glob.glob("/dev/dxg"):
        return 0
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
