"""What made a run: versions, commit, machine, in `provenance.json`; and what was changed since the commit, in
`git.diff`. Of it, config, code, data and versions must be the same wherever a run computes: its card."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.config.check import Config
from lockstep.config.value_checks import ROOT
from lockstep.errors import UserError
from lockstep.files import replacing
from lockstep.launch.environment import environment
from lockstep.launch.process_group import gather_objects

PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "hydra-core", "numpy", "tensorboard")
SECONDS = 10.0  # that git may take


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide about the numbers, read without importing them."""
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return by_package


def git_info(folder: Path = ROOT) -> dict[str, Any]:
    """Commit of the code, and whether it is not all of it: tracked files were changed since, or files in `src/` and
    `conf/` are not tracked. Both None outside a repository. Never fails."""
    described = _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    commit, _, dirty = described.decode().strip().partition("-")
    return {"commit": commit, "dirty": bool(dirty or untracked(folder))} if commit else {"commit": None, "dirty": None}


def untracked(folder: Path = ROOT) -> list[str]:
    """Files in the project's `src/` and `conf/` that git neither tracks nor ignores."""
    names = _git(folder, "ls-files", "-z", "--others", "--exclude-standard", "src", "conf")
    return [os.fsdecode(name) for name in names.split(b"\0") if name]


def _git(folder: Path, *command: str) -> bytes:
    """What git says; nothing where it can't, or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command],
            capture_output=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout


def record(config: Config, fingerprint: str, folder: Path) -> None:
    """Writes them; rank zero calls it when a run starts or goes on."""
    content = {
        "command": sys.argv,
        "slurm_job": environment().slurm_job,
        "config": config.record,
        "data_fingerprint": fingerprint,
        "git": git_info(ROOT),
        "untracked": untracked(ROOT),
        "versions": versions(),
        "machine": _machine(config),
    }
    with replacing(folder / "provenance.json") as file:
        file.write(json.dumps(content, indent=2, default=str).encode() + b"\n")
    (folder / "git.diff").unlink(missing_ok=True)  # of an earlier start
    if changes := _git(ROOT, "diff", "--no-ext-diff", "HEAD"):
        (folder / "git.diff").write_bytes(changes)


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


# --- wherever it computes ---

# Keys that each machine may have its own way.
MACHINE_KEYS = ("outputs", "data_dir", "resume", "threads", "num_workers")


def machine_fingerprint(config: Config, splits: Any) -> dict[str, str]:
    """What must be the same, as text by name."""
    record = {key: value for key, value in config.record.items() if key not in MACHINE_KEYS}
    record |= {"accelerator": config.layout.accelerator}  # what `auto` came to
    facts = {"the code in src/": code_sha256()[:12], "the data's fingerprint": splits.fingerprint[:12]}
    return facts | {f"the version of {name}": version for name, version in versions().items()} | _flat(record)


def code_sha256() -> str:
    """Over names and contents of all Python files in src/."""
    code = hashlib.sha256()
    for file in sorted((ROOT / "src").rglob("*.py")):
        code.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return code.hexdigest()


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": str(value)}
    return flat


def difference(first: Mapping[str, str], other: Mapping[str, str], name: str, first_name: str) -> str:
    """What two machines don't have alike, as a line; empty: nothing."""
    for key in sorted(first.keys() | other.keys()):
        first_value, other_value = first.get(key, "missing"), other.get(key, "missing")
        if first_value != other_value:
            return f"machines differ: {key} is {other_value} on {name}, {first_value} on {first_name}"
    return ""


def check_same_on_all_ranks(facts: Mapping[str, str]) -> None:
    """Refuses, on all ranks of workers that exist already, one that differs from rank zero. Each of them calls it."""
    by_rank = gather_objects((platform.node(), dict(facts)))
    for rank, (name, theirs) in enumerate(by_rank):
        if odd := difference(by_rank[0][1], theirs, f"{name} (rank {rank})", by_rank[0][0]):
            raise UserError(odd)
