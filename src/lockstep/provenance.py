"""What made a run: `provenance.json` and, where tracked files were changed, `git.diff` in its folder."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lockstep import slurm
from lockstep.checks import ROOT
from lockstep.config import Config
from lockstep.summary import git_info, versions, write_summary


def record(config: Config, fingerprint: str, folder: Path) -> None:
    """Writes them; rank zero calls it when a run starts or goes on."""
    git = git_info()
    write_summary(
        folder / "provenance.json",
        {
            "command": sys.argv,
            "slurm_job": slurm.job(),
            "config": config.raw,
            "data_fingerprint": fingerprint,
            "git": git,
            "versions": versions(),
            "machine": _machine(config),
        },
    )
    if git["dirty"]:
        diff = subprocess.run(["git", "-C", str(ROOT), "diff", "HEAD"], capture_output=True, timeout=10, check=False)
        (folder / "git.diff").write_bytes(diff.stdout)


def _machine(config: Config) -> dict[str, Any]:
    gpus = range(torch.cuda.device_count()) if config.layout.accelerator == "gpu" else ()
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
    }
