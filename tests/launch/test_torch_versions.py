"""What older versions of torch call by another name."""

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server import api

from lockstep.launch.torch_versions import end_wait_for_lost_agents, set_group_timeout


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


@pytest.mark.parametrize("lost", [2, 1])
def test_an_agent_of_torchrun_does_not_wait_for_lost_ones(lost: int) -> None:
    """One of three is left, which ends as all agents do, by a method of torch's own; the control waits for another."""
    store: Any = dist.HashStore()
    end_wait_for_lost_agents(store, "none", lost)
    agent = SimpleNamespace(
        _worker_group=SimpleNamespace(state="", group_world_size=3),
        _exit_barrier_timeout=0.5,
        _store=dist.PrefixStore("none", store),
    )
    began = time.monotonic()
    api.SimpleElasticAgent._exit_barrier(agent)  # type: ignore[arg-type]
    assert (time.monotonic() - began < 0.5) == (lost == 2)
