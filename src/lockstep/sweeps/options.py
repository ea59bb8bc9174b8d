"""What a sweep can be told: the keys of conf/sweep/, checked."""

from __future__ import annotations

from typing import Any

from lockstep.arithmetic.layout import Refusal
from lockstep.run.checks import Check, choice, optional_node, text, unknown, whole

CHECKS: dict[str, Check] = {
    "jobs": whole(1),
    "resume": text,
    "metric": text,
    "mode": choice("max", "min"),
    "trials": whole(1),
    "seed": whole(0),
    "prune": choice("median", "none"),
    "storage": text,
}
ABSENT: dict[str, Any] = {
    "jobs": 1,
    "resume": None,
    "metric": "val/acc",
    "mode": "max",
    "trials": 20,
    "seed": 0,
    "prune": "median",
    "storage": None,
}


def check(key: str, value: Any) -> dict[str, Any]:
    """The `sweep` group with every key; what a grid does not have takes the search's values.

    Raises:
        Refusal: the first thing that is wrong.
    """
    given = optional_node(key, value)
    for name in given:
        if name not in CHECKS:
            raise Refusal(f"{key}.{name}: there is no such key; {unknown(str(name), sorted(CHECKS))}")
    return {name: CHECKS[name](f"{key}.{name}", given.get(name, ABSENT[name])) for name in CHECKS}
