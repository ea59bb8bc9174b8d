"""Private names of torch 2.15: of its DDP, and of the number of collectives.

They are used in this file only; tests/test_promise_6_nothing_lost.py and tests/step/test_collectives.py fail when they
change.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import Module


class FixedBucketsDDP(nn.parallel.DistributedDataParallel):
    """DDP whose buckets are the same from the first step on.

    torch runs the first backward pass with other buckets than the later ones, which it builds in the order of the
    gradients. A ring all-reduce adds the parts of an element in an order that depends on its place in a bucket. So on
    three or more ranks, the first step after a resume would have other bits than in an uninterrupted run.

    No public option fixes the buckets. Here they follow the parameters from last to first, as gradients usually come.
    """

    def __init__(self, module: Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]


def number_of_collectives() -> int:
    """Return how many collectives this process has started in the default group."""
    group: Any = dist.group.WORLD
    return 0 if group is None else int(group._get_sequence_number_for_group())
