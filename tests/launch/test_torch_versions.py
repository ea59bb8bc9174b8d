"""What older versions of torch call by another name."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.launch.torch_versions import set_group_timeout


@pytest.mark.filterwarnings("ignore:.*_set_pg_timeout")  # the newer versions still have the older name
@pytest.mark.parametrize("older_than_2_14", [False, True])
def test_the_timeout_of_a_process_group(monkeypatch: pytest.MonkeyPatch, older_than_2_14: bool) -> None:
    if older_than_2_14:
        monkeypatch.delattr(dist, "set_timeout", raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        backend = group._get_backend(torch.device("cpu"))
        before = backend.options._timeout
        set_group_timeout(timedelta(seconds=77))
        assert before != timedelta(seconds=77) == backend.options._timeout
    finally:
        dist.destroy_process_group()
