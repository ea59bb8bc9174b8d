"""Ways to sum a vector over workers, written as sends and receives.

Every worker calls the same function with its own vector [n]; afterwards each has the sum. With N workers and vectors of
K bytes, this much crosses the busiest worker's link, one after the other (a link carries both directions at once):

| way | messages | bytes |
|---|---|---|
| parameter server | 2 (N - 1), the server's | 2 (N - 1) K |
| ring | 2 (N - 1) | 2 (N - 1) / N K |
| halving and doubling, N a power of two | 2 log2 N | 2 (N - 1) / N K |
| the same, P the power of two below N | 2 log2 P + 2 | 2 (P - 1) / P K + 2 K |
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Sum = Callable[[Tensor, "Channel"], None]


class Channel:
    """This worker's sends and receives, with counts.

    `bytes` and `messages` count what crosses the link one after the other.
    """

    def __init__(self) -> None:
        self.bytes = self.messages = 0

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Send and receive all pairs of (tensor, other worker) at once. Return when all have arrived."""
        works = [dist.irecv(tensor, other) for tensor, other in receives]
        works += [dist.isend(tensor, other) for tensor, other in sends]
        for work in works:
            assert work is not None
            work.wait()
        self.bytes += max(sum(tensor.nbytes for tensor, _ in way) for way in (sends, receives))
        self.messages += max(len(sends), len(receives))

    def send(self, tensor: Tensor, other: int) -> None:
        self.exchange([(tensor, other)], [])

    def receive(self, tensor: Tensor, other: int) -> Tensor:
        self.exchange([], [(tensor, other)])
        return tensor


def parameter_server(vector: Tensor, channel: Channel) -> None:
    """Sum by a server: worker 0 receives all vectors, adds them, and sends the sum to all (Li et al., 2014)."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    if rank:
        channel.send(vector, 0)
        channel.receive(vector, 0)
        return
    received = [torch.empty_like(vector) for _ in range(1, workers)]
    channel.exchange([], list(zip(received, range(1, workers), strict=True)))
    for other in received:
        vector += other
    channel.exchange([(vector, other) for other in range(1, workers)], [])


def ring(vector: Tensor, channel: Channel) -> None:
    """Sum by a ring: each worker exchanges messages with its two neighbours only.

    The vector is cut into N chunks. In N - 1 rounds each chunk travels round the ring, and every worker adds its part.
    In N - 1 more rounds the complete chunks travel on (Patarasuk and Yuan, 2009).
    """
    rank, workers = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % workers, (rank + 1) % workers
    chunks = vector.tensor_split(workers)
    for step in range(workers - 1):
        give, take = chunks[(rank - step) % workers], chunks[(rank - step - 1) % workers]
        received = torch.empty_like(take)
        channel.exchange([(give, right)], [(received, left)])
        take += received
    for step in range(workers - 1):
        give, take = chunks[(rank + 1 - step) % workers], chunks[(rank - step) % workers]
        channel.exchange([(give, right)], [(take, left)])


def halving_doubling(vector: Tensor, channel: Channel) -> None:
    """Sum by halving and doubling.

    In log2 N rounds partners swap halves of their current part and add them. In log2 N more rounds they swap the
    complete parts back (Rabenseifner, in Thakur et al., 2005). Workers beyond a power of two first send their vectors
    to another.
    """
    rank, workers = dist.get_rank(), dist.get_world_size()
    paired = 1 << (workers.bit_length() - 1)
    if rank >= paired:
        channel.send(vector, rank - paired)
        channel.receive(vector, rank - paired)
        return
    extra = rank + paired if rank + paired < workers else None
    if extra is not None:
        vector += channel.receive(torch.empty_like(vector), extra)
    mine, swapped, distance = vector, [], paired // 2
    while distance:
        lower, upper = mine.tensor_split(2)
        keep, give = (upper, lower) if rank & distance else (lower, upper)
        received = torch.empty_like(keep)
        channel.exchange([(give, rank ^ distance)], [(received, rank ^ distance)])
        keep += received
        swapped.append((keep, give, rank ^ distance))
        mine, distance = keep, distance // 2
    for keep, give, partner in reversed(swapped):
        channel.exchange([(keep, partner)], [(give, partner)])
    if extra is not None:
        channel.send(vector, extra)


def backend(vector: Tensor, channel: Channel) -> None:
    """Sum by gloo's all-reduce, a ring, as ddp does. Its counts come from the formula."""
    dist.all_reduce(vector)
    workers = dist.get_world_size()
    channel.bytes += 2 * (workers - 1) * vector.nbytes // workers
    channel.messages += 2 * (workers - 1)


SUMS: dict[str, Sum] = {
    "parameter server": parameter_server,
    "ring": ring,
    "halving and doubling": halving_doubling,
    "gloo's all-reduce": backend,
}
