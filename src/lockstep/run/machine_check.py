"""Check that all machines of a run have the same config, code, data and package versions."""

import platform
from collections.abc import Mapping
from typing import Any

from lockstep.config.check import Config
from lockstep.errors import UserError
from lockstep.launch.process_group import gather_objects
from lockstep.run.provenance import code_sha256, versions

# Keys whose values may differ between machines.
MACHINE_KEYS = ("outputs", "data_dir", "resume", "threads", "num_workers")


def machine_fingerprint(config: Config, splits: Any) -> dict[str, str]:
    """Return the facts that must be the same on all machines, as text by name."""
    record = {key: value for key, value in config.record.items() if key not in MACHINE_KEYS}
    record |= {"accelerator": config.layout.accelerator}  # the resolved value of `auto`
    facts = {"the code in src/": code_sha256()[:12], "the data's fingerprint": splits.fingerprint[:12]}
    return facts | {f"the version of {name}": version for name, version in versions().items()} | _flat(record)


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return the leaves of a config as text, by dotted key."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": str(value)}
    return flat


def difference(first: Mapping[str, str], other: Mapping[str, str], name: str, first_name: str) -> str:
    """Return a line about the first fact that differs between two machines; empty if none does."""
    for key in sorted(first.keys() | other.keys()):
        first_value, other_value = first.get(key, "missing"), other.get(key, "missing")
        if first_value != other_value:
            return f"machines differ: {key} is {other_value} on {name}, but {first_value} on {first_name}"
    return ""


def check_same_on_all_ranks(facts: Mapping[str, str]) -> None:
    """Check, on the workers of an engine, that all have the facts of rank zero. Every rank must call it.

    Raises:
        UserError: A rank differs. All ranks raise the same error.
    """
    by_rank = gather_objects((platform.node(), dict(facts)))
    for rank, (name, theirs) in enumerate(by_rank):
        if odd := difference(by_rank[0][1], theirs, f"{name} (rank {rank})", by_rank[0][0]):
            raise UserError(odd)
