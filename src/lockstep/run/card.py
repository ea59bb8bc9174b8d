"""What must be the same wherever a run computes: its config, code, data and versions."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.group import of_ranks
from lockstep.launch.wire import difference
from lockstep.run.checks import ROOT
from lockstep.run.config import Config
from lockstep.run.provenance import versions

# Keys that each machine may have its own way.
OWN = ("outputs", "data_dir", "rdzv_endpoint", "resume", "threads", "num_workers")


def card(config: Config, splits: Any) -> dict[str, str]:
    """It, as text by name."""
    record = {key: value for key, value in config.record.items() if key not in OWN}
    found = {"the code in src/": code_sha256()[:12], "the data's fingerprint": splits.fingerprint[:12]}
    return found | {f"the version of {name}": version for name, version in versions().items()} | _flat(record)


def code_sha256() -> str:
    """Over names and contents of all Python files in src/."""
    code = hashlib.sha256()
    for file in sorted((ROOT / "src").rglob("*.py")):
        code.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return code.hexdigest()


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in config.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": str(value)}
    return found


def must_be_alike(own: Mapping[str, str]) -> None:
    """Compares what the ranks of workers that exist already have. Each of them calls it.

    Raises:
        Refusal: one differs from rank zero, on all ranks.
    """
    found = of_ranks((platform.node(), dict(own)))
    for rank, (name, theirs) in enumerate(found):
        if odd := difference(found[0][1], theirs, f"{name} (rank {rank})", found[0][0]):
            raise Refusal(odd)
