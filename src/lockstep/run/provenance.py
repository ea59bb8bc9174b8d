"""What made a run: `provenance.json` and, where its code is not what was committed, `git.diff` in its folder."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep.launch.environment import environment
from lockstep.launch.watchdog import patient
from lockstep.run.checks import ROOT
from lockstep.run.config import Config
from lockstep.run.summary import git_info, untracked, versions, write_summary

LARGEST = 1 << 20  # bytes of a file that is kept

LOG = logging.getLogger("lockstep")
SECONDS = 10.0  # that git may take


@patient()
def record(config: Config, fingerprint: str, folder: Path) -> None:
    """Writes them; rank zero calls it when a run starts or goes on."""
    git = git_info()
    write_summary(
        folder / "provenance.json",
        {
            "command": sys.argv,
            "slurm_job": environment().slurm_job,
            "config": config.raw,
            "data_fingerprint": fingerprint,
            "git": git,
            "versions": versions(),
            "machine": _machine(config),
        },
    )
    (folder / "git.diff").unlink(missing_ok=True)  # of an earlier start
    if patches := b"".join(_patches()) if git["dirty"] else b"":
        (folder / "git.diff").write_bytes(patches)


def _patches() -> Iterator[bytes]:
    """What is not committed, for `git apply`: changes of tracked files, and files of src/ and conf/ that git does not
    know; of a large one, which is no code, its name in the log."""
    diff = ["git", "-C", str(ROOT), "diff", "--no-ext-diff"]
    commands = [[*diff, "HEAD"]]
    for name in untracked():
        if (ROOT / name).stat().st_size > LARGEST:
            LOG.warning("%s: untracked, and too large for git.diff", name)
        else:
            commands.append([*diff, "--no-index", "--", os.devnull, name])
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            LOG.warning("git.diff is not complete: %s", error)
            return
        if done.returncode > 1:  # 1: there are differences
            LOG.warning("git.diff is not complete: %s", done.stderr.decode(errors="replace").strip())
        yield done.stdout


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
