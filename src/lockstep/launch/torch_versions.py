"""What older versions of torch call by another name (tests/launch/test_torch_versions.py pins both names)."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def set_group_timeout(timeout: timedelta) -> None:
    """Set the time that a collective of the default process group waits for the other ranks."""
    public: Any = getattr(dist, "set_timeout", None)  # since torch 2.14
    (public or dist.distributed_c10d._set_pg_timeout)(timeout)
