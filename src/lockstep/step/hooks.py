"""Who implements a hook."""

from __future__ import annotations

from typing import Any


def overrides(owner: Any, name: str, base: type) -> bool:
    """Whether `owner`, or its class, has a method `name` other than that of `base`."""
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)
