"""What torch 2.15's DistributedDataParallel does otherwise than a run that is resumed needs. Its private names stand in
this file only; tests/test_promise_6_nothing_lost.py fails when they change."""

from typing import Any

from torch import nn
from torch.nn import Module


class FixedBucketsDDP(nn.parallel.DistributedDataParallel):
    """Its buckets are from the first step on what they stay. torch makes a start's first backward pass with one bucket,
    and new ones from what it has seen; a ring adds an element's parts in the order that its place in a bucket gives, so
    on three or more ranks a run that goes on would make its first step with other bits.

    Private, since nothing public settles them: here they follow from the parameters, last to first, as gradients come.
    """

    def __init__(self, module: Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]
