"""What a run says about itself: `summary.json` and its parts. For a parent too, which must not import torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.launch.atomic import replacing
from lockstep.run.checks import ROOT

PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "hydra-core", "numpy", "tensorboard")


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """SHA-256 over the names and contiguous bytes of all tensors, by sorted name: equal exactly when the bits are.

    It does not depend on memory format, device or insertion order. Extra state that is no tensor is left out.
    """
    sha256 = hashlib.sha256()
    for name in sorted(state_dict):
        value = state_dict[name]
        if not hasattr(value, "detach"):
            continue
        sha256.update(name.encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        sha256.update(memoryview(flat.view(_uint8()).numpy()))  # through uint8, since numpy knows no bfloat16
    return sha256.hexdigest()


def _uint8() -> Any:
    import torch

    return torch.uint8


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
    command = ["git", "-C", str(folder or ROOT), *describe]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    commit, _, dirty = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(dirty or untracked(folder))}


def untracked(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Files in the project's `src/` and `conf/` that git neither tracks nor ignores. Never fails."""
    command = ["git", "-C", str(folder or ROOT), "ls-files", "-z", "--others", "--exclude-standard", "src", "conf"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def summary_of(folder: Path) -> dict[str, Any]:
    """A run's summary; empty where there is none that can be read."""
    try:
        found = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write a summary atomically as JSON; what is not finite becomes null, since JSON has no word for it."""
    text = json.dumps(_plain(summary), indent=2, allow_nan=False)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) or value is None else str(value)
