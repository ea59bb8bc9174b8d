"""What made a run: versions, commit, machine, in `provenance.json`; and, where the code is not what was committed,
`git.diff`."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.launch.atomic import replacing
from lockstep.launch.environment import environment
from lockstep.launch.watchdog import patient
from lockstep.run.checks import ROOT
from lockstep.run.config import Config

PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "hydra-core", "numpy", "tensorboard")
LARGEST = 1 << 20  # bytes of a file that is kept
SECONDS = 10.0  # that git may take

LOG = logging.getLogger("lockstep")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide about the numbers, read without importing them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_info(folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Commit of the code, and whether it is not all of it: tracked files were changed since, or files in `src/` and
    `conf/` are not tracked. Both None outside a repository. Never fails."""
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = _git(folder or ROOT, *describe)
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    commit, _, dirty = done.stdout.decode().strip().partition("-")
    return {"commit": commit, "dirty": bool(dirty or untracked(folder))} if commit else {"commit": None, "dirty": None}


def untracked(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Files in the project's `src/` and `conf/` that git neither tracks nor ignores. Never fails."""
    try:
        done = _git(folder or ROOT, "ls-files", "-z", "--others", "--exclude-standard", "src", "conf")
    except (OSError, subprocess.SubprocessError):
        return []
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _git(folder: str | os.PathLike[str], *command: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    return subprocess.run(
        ["git", "-C", str(folder), *command], capture_output=True, timeout=SECONDS, check=False, env=environment
    )


@patient()
def record(config: Config, fingerprint: str, folder: Path) -> None:
    """Writes them; rank zero calls it when a run starts or goes on."""
    git = git_info()
    content = {
        "command": sys.argv,
        "slurm_job": environment().slurm_job,
        "config": config.record,
        "data_fingerprint": fingerprint,
        "git": git,
        "versions": versions(),
        "machine": _machine(config),
    }
    with replacing(folder / "provenance.json") as file:
        file.write(json.dumps(content, indent=2, default=str).encode() + b"\n")
    (folder / "git.diff").unlink(missing_ok=True)  # of an earlier start
    if patches := b"".join(_patches()) if git["dirty"] else b"":
        (folder / "git.diff").write_bytes(patches)


def _patches() -> Iterator[bytes]:
    """What is not committed, for `git apply`: changes of tracked files, and files of src/ and conf/ that git does not
    know; of a large one, which is no code, its name in the log."""
    commands = [["HEAD"]]
    for name in untracked():
        if (ROOT / name).stat().st_size > LARGEST:
            LOG.warning("%s: untracked, and too large for git.diff", name)
        else:
            commands.append(["--no-index", "--", os.devnull, name])
    for command in commands:
        try:
            done = _git(ROOT, "diff", "--no-ext-diff", *command)
        except (OSError, subprocess.SubprocessError) as error:
            LOG.warning("git.diff is not complete: %s", error)
            return
        if done.returncode > 1:  # 1: there are differences
            LOG.warning("git.diff is not complete: %s", done.stderr.decode(errors="replace").strip())
        yield done.stdout


def _machine(config: Config) -> dict[str, Any]:
    import torch

    gpus = range(torch.cuda.device_count()) if config.layout.accelerator == "gpu" else ()
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
    }
