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


def check_same_on_all_ranks(config: Config, splits: Any) -> None:
    """Check, on the workers of an engine, that all have rank zero's config, code, data and package versions.

    Every rank must call it.

    Raises:
        UserError: A rank differs. All ranks raise the same error.
    """
    record = {key: value for key, value in config.record.items() if key not in MACHINE_KEYS}
    record |= {"accelerator": config.layout.accelerator}  # the resolved value of `auto`
    facts = {"the code in src/": code_sha256()[:12], "the data's fingerprint": splits.fingerprint[:12]}
    facts |= {f"the version of {name}": version for name, version in versions().items()} | _flat(record)
    by_rank = gather_objects((platform.node(), facts))
    first_name, first = by_rank[0]
    for rank, (name, other) in enumerate(by_rank):
        for key in sorted(first.keys() | other.keys()):
            first_value, value = first.get(key, "missing"), other.get(key, "missing")
            if value != first_value:
                raise UserError(
                    f"machines differ: {key} is {value} on {name} (rank {rank}), but {first_value} on {first_name}"
                )


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return the leaves of a config as text, by dotted key."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": str(value)}
    return flat
