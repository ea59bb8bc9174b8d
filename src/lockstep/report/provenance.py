"""Record where a run comes from, and check that all its machines have the same.

`provenance.json` has the command, the config, the versions, the commit and the machine. `git.diff` has the changes
since the commit. Each checkpoint has a record, too.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.record import make_record
from lockstep.config.check import Config
from lockstep.config.schema import CACHE_KEYS
from lockstep.errors import UserError
from lockstep.files import write
from lockstep.launch.environment import environment
from lockstep.launch.process_group import gather_objects
from lockstep.project import LIBRARY, LIBRARY_PACKAGES, project

if TYPE_CHECKING:  # the parent imports this module, and must not import torch
    from lockstep.data import Splits

PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "torchmetrics",
    "hydra-core",
    "numpy",
    "tensorboard",
    "pytorch-lockstep",
)
SECONDS = 10.0  # timeout of a git command
MACHINE_KEYS = (  # keys that may differ between machines
    *("outputs", "data_dir", "resume", "threads", "num_workers"),
    *(f"data.{key}" for key in ("index_dir", *CACHE_KEYS)),
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results, without importing them."""
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return by_package


def git_info(folder: Path | None = None) -> dict[str, Any]:
    """Return the commit of the code, and whether it is `dirty`. It never raises.

    The code is dirty if a tracked file has changed, or if `src/` or `conf/` has an untracked file. Outside of a
    repository both values are None.

    Args:
        folder: a folder of the repository; None: the project's.
    """
    folder = folder or project().root
    described = _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    commit, _, dirty = described.decode().strip().partition("-")
    return {"commit": commit, "dirty": bool(dirty or untracked(folder))} if commit else {"commit": None, "dirty": None}


def untracked(folder: Path) -> list[str]:
    """Return the files in the project's `src/` and `conf/` that git neither tracks nor ignores."""
    names = _git(folder, "ls-files", "-z", "--others", "--exclude-standard", "src", "conf")
    return [os.fsdecode(name) for name in names.split(b"\0") if name]


def _git(folder: Path, *command: str) -> bytes:
    """Return the output of a git command; empty if it fails or takes too long."""
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


def write_provenance(config: Config, splits: "Splits", folder: Path) -> None:
    """Write `provenance.json` and `git.diff`. Rank zero calls this when a run starts or continues."""
    content = {
        "command": sys.argv,
        "slurm_job": environment().slurm_job,
        "config": config.record,
        "data_fingerprint": splits.fingerprint,
        "data_content": splits.content,
        "git": git_info(),
        "untracked": untracked(project().root),
        "versions": versions(),
        "machine": _machine(config),
    }
    write(folder / "provenance.json", json.dumps(content, indent=2, default=str).encode() + b"\n")
    (folder / "git.diff").unlink(missing_ok=True)  # from an earlier start
    if changes := _git(project().root, "diff", "--no-ext-diff", "HEAD"):
        (folder / "git.diff").write_bytes(changes)


def checkpoint_record(config: Config, splits: "Splits") -> dict[str, Any]:
    """Return the entry `lockstep` of a run's checkpoints, without metrics, as plain data."""
    facts = {"samples": len(splits.train), "fingerprint": splits.fingerprint, "content": splits.content}
    others = {"config": config.record, "versions": versions(), "spec": asdict(splits.spec)}
    return make_record(splits.split("train"), config.layout, config.seed, config.precision, facts, **others)


def _machine(config: Config) -> dict[str, Any]:
    """Return the facts about this machine that affect speed and rounding."""
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


def code_sha256() -> str:
    """Return the SHA-256 over the names and contents of the Python files in src/ and of Lockstep."""
    code = hashlib.sha256()
    files = {file: f"src/{file.relative_to(LIBRARY)}" for package in LIBRARY_PACKAGES for file in package.rglob("*.py")}
    files |= {file: f"{file.relative_to(project().root)}" for file in project().source.rglob("*.py")}
    for file in sorted(files):
        code.update(f"{files[file]}\n".encode() + file.read_bytes())
    return code.hexdigest()


def check_same_on_all_ranks(config: Config, splits: Any) -> None:
    """Check, on the workers of an engine, that all have rank zero's config, code, data and package versions.

    Every rank must call it.

    Raises:
        UserError: A rank differs. All ranks raise the same error.
    """
    record = {**config.record, "accelerator": config.layout.accelerator}  # the resolved value of `auto`
    shared_keys = {key: value for key, value in _flat(record).items() if key.partition(".")[0] not in MACHINE_KEYS}
    facts = {"the code": code_sha256()[:12], "the data's fingerprint": splits.fingerprint[:12]}
    facts |= {f"the version of {name}": version for name, version in versions().items()} | {
        key: value for key, value in shared_keys.items() if key not in MACHINE_KEYS
    }
    by_rank = gather_objects((platform.node(), facts, splits.content))
    first_name, first, _ = by_rank[0]
    for rank, (name, other, _) in enumerate(by_rank):
        for key in sorted(first.keys() | other.keys()):
            first_value, value = first.get(key, "missing"), other.get(key, "missing")
            if value != first_value:
                raise UserError(
                    f"machines differ: {key} is {value} on {name} (rank {rank}), but {first_value} on {first_name}"
                )
    # Of images in a folder the content is unknown: such a machine may read the same.
    known = [(rank, name, content) for rank, (name, _, content) in enumerate(by_rank) if content]
    for rank, name, content in known:
        if content != known[0][2]:
            is_here = f"is {content[:12]} on {name} (rank {rank}), but {known[0][2][:12]} on {known[0][1]}"
            raise UserError(f"machines differ: the SHA-256 of the data's shards {is_here}")


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return the leaves of a config as text, by dotted key."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": str(value)}
    return flat
