"""Ways to sum a vector over workers, in sends and receives: who talks to whom, and how much.

Every worker calls the same function with its own vector [n]; afterwards each has the sum. With N workers and K bytes a
vector, the busiest worker sends and receives:

| | messages, one after the other | bytes |
|---|---|---|
| parameter server | 2, of which the server's N - 1 at a time share its link | 2 (N - 1) K |
| ring | 2 (N - 1) | 2 (N - 1) K / N |
| halving and doubling | 2 log2 N | 2 (N - 1) K / N; 2 K more where N is no power of two |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """This worker's sends and receives, counted. `messages` counts those that follow one another."""

    def __init__(self) -> None:
        self.sent = self.received = self.messages = 0

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """All of (tensor, other worker) at once; returns when they are done."""
        works = [dist.irecv(tensor, other) for tensor, other in receives]
        works += [dist.isend(tensor, other) for tensor, other in sends]
        for work in works:
            assert work is not None
            work.wait()
        self.sent += sum(tensor.nbytes for tensor, _ in sends)
        self.received += sum(tensor.nbytes for tensor, _ in receives)
        self.messages += 1


def parameter_server(vector: Tensor, wire: Wire) -> None:
    """Worker 0 receives all vectors, adds them, and sends the sum to everyone (Li et al., 2014)."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    if rank:
        wire.exchange([(vector, 0)], [])
        wire.exchange([], [(vector, 0)])
        return
    received = [torch.empty_like(vector) for _ in range(1, workers)]
    wire.exchange([], list(zip(received, range(1, workers), strict=True)))
    for other in received:
        vector += other
    wire.exchange([(vector, other) for other in range(1, workers)], [])


def ring(vector: Tensor, wire: Wire) -> None:
    """Each worker talks to its two neighbours only. The vector is cut into N chunks: in N - 1 rounds a chunk travels
    round the ring and is added to, in N - 1 more the finished one travels on (Patarasu and Yuan, 2009)."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % workers, (rank + 1) % workers
    chunks = vector.tensor_split(workers)
    for step in range(workers - 1):
        give, take = chunks[(rank - step) % workers], chunks[(rank - step - 1) % workers]
        received = torch.empty_like(take)
        wire.exchange([(give, right)], [(received, left)])
        take += received
    for step in range(workers - 1):
        give, take = chunks[(rank + 1 - step) % workers], chunks[(rank - step) % workers]
        wire.exchange([(give, right)], [(take, left)])


def halving_doubling(vector: Tensor, wire: Wire) -> None:
    """In log2 N rounds partners swap halves of what they still have and add them; in log2 N more they swap back what
    is finished (Rabenseifner, 2004). Workers beyond a power of two hand theirs to another one first."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    paired = 1 << (workers.bit_length() - 1)
    if rank >= paired:
        wire.exchange([(vector, rank - paired)], [])
        wire.exchange([], [(vector, rank - paired)])
        return
    extra = rank + paired if rank + paired < workers else None
    if extra is not None:
        received = torch.empty_like(vector)
        wire.exchange([], [(received, extra)])
        vector += received
    mine, swapped, distance = vector, [], paired // 2
    while distance:
        lower, upper = mine.tensor_split(2)
        keep, give = (upper, lower) if rank & distance else (lower, upper)
        received = torch.empty_like(keep)
        wire.exchange([(give, rank ^ distance)], [(received, rank ^ distance)])
        keep += received
        swapped.append((keep, give, rank ^ distance))
        mine, distance = keep, distance // 2
    for keep, give, partner in reversed(swapped):
        wire.exchange([(keep, partner)], [(give, partner)])
    if extra is not None:
        wire.exchange([(vector, extra)], [])


def backend(vector: Tensor, wire: Wire) -> None:
    """What ddp uses: gloo's own all-reduce, a ring in segments."""
    dist.all_reduce(vector)
    workers = dist.get_world_size()
    wire.sent += 2 * (workers - 1) * vector.nbytes // workers
    wire.received += 2 * (workers - 1) * vector.nbytes // workers
    wire.messages += 2 * (workers - 1)


SUMS: dict[str, Callable[[Tensor, Wire], None]] = {
    "parameter server": parameter_server,
    "ring": ring,
    "halving and doubling": halving_doubling,
    "gloo's all-reduce": backend,
}
