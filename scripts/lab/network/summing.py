"""Run a worker of communication.py. The workers sum their gradients: first 2 of them, then 3, and so on:

    summing.py check|measure <folder with gradient_<rank>.npy> <rank> <workers> <host:port of worker 0> <rounds>

Rank zero writes the results into check.json or measure.json: a dict for each number of workers.
"""

import hashlib
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from network.collectives import SUMS, Channel, Sum
from torch import Tensor

from lockstep.arithmetic.exact_sum import AllReduce, ExactSum, reduce_alone

# the small sizes measure the latency, the large ones the rate
PING_BYTES = [64, 256, 1024, 4096, 1 << 21, 1 << 22, 1 << 23]
PINGS = 7  # of each size


def main(what: str, folder: Path, rank: int, workers: int, endpoint: str, rounds: int) -> None:
    torch.set_num_threads(1)
    host, port = endpoint.split(":")
    store = dist.TCPStore(host, int(port), workers, is_master=rank == 0, timeout=timedelta(minutes=2))
    results = []
    for count in range(max(2, rank + 1), workers + 1):
        group_store = dist.PrefixStore(str(count), store)
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=count, timeout=timedelta(minutes=10))
        results.append(checked(folder) if what == "check" else measured(folder, rounds))
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        (folder / f"{what}.json").write_text(json.dumps(results))


def gradient(folder: Path, rank: int) -> Tensor:
    return torch.from_numpy(np.load(folder / f"gradient_{rank}.npy"))


# --- do all ways give the same sum? -----------------------------------------------------------------------------------


def checked(folder: Path) -> dict[str, Any]:
    """Count the different sums that all ways, and one process alone, gave on all workers.

    Returns:
        `exact`: of integers. `wrong`: the same, if one worker leaves out one number. `float`: of float32, whose sum
        depends on the order of three or more.
    """
    vector, size = gradient(folder, dist.get_rank()), dist.get_world_size()
    changed = vector.clone()
    if dist.get_rank() == size - 1:
        changed[vector.abs().argmax()] = 0.0
    reference = digest(exact([gradient(folder, rank) for rank in range(size)], reduce_alone))  # all in this process
    ways = list(SUMS.values())
    return {
        "exact": different([reference, *(digest(exact([vector], over(way))) for way in ways)]),
        "float": different([digest(summed(vector, way)) for way in ways]),
        "wrong": different([reference, digest(exact([changed], over(ways[0])))]),
    }


def exact(gradients: list[Tensor], all_reduce: AllReduce) -> Tensor:
    """Return the sum as a run with exact=true computes it."""
    total = ExactSum(gradients[:1])
    for each in gradients:
        total.add([each])
    return total.total(all_reduce)[0]


def over(way: Sum) -> AllReduce:
    def all_reduce(tensor: Tensor, op: str) -> None:
        if op == "sum":
            way(tensor, Channel())
        else:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    return all_reduce


def summed(vector: Tensor, way: Sum) -> Tensor:
    total = vector.clone()
    way(total, Channel())
    return total


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def different(digests: list[str]) -> int:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digests)
    return len({each for worker in everyone for each in worker})


# --- what they take ---------------------------------------------------------------------------------------------------


def measured(folder: Path, rounds: int) -> dict[str, Any]:
    """Time all ways in turns.

    Returns:
        `sums`: seconds, bytes and messages of each way. With two workers also `pings` and `adding`.
    """
    vector = gradient(folder, dist.get_rank())
    results: dict[str, Any] = {"sums": {name: {"seconds": []} for name in SUMS}}
    if dist.get_world_size() == 2:
        results |= {"pings": pings(), "adding": adding(vector)}
    for way in SUMS.values():
        way(vector[: 1 << 16].clone(), Channel())  # opens the connections
    for _ in range(rounds):
        for name, way in SUMS.items():
            seconds, size, messages = timed(way, vector.clone())
            row = results["sums"][name]
            row["seconds"].append(seconds)
            row |= {"bytes": int(size), "messages": int(messages)}
    return results


def pings() -> list[tuple[int, float]]:
    """Return (bytes, seconds one way) of messages that worker 1 sends back. The first ones don't count."""
    other, times = 1 - dist.get_rank(), []
    for size in PING_BYTES[:1] * PINGS + PING_BYTES * PINGS:
        message = torch.zeros(size, dtype=torch.uint8)
        began = time.perf_counter()
        for sends in (dist.get_rank() == 0, dist.get_rank() == 1):
            if sends:
                dist.send(message, other)
            else:
                dist.recv(message, other)
        times.append((size, (time.perf_counter() - began) / 2))
    return times[PINGS:]


def adding(vector: Tensor) -> float:
    """Return the seconds per byte of adding one vector to another."""
    total, times = torch.zeros_like(vector), []
    for _ in range(5):
        began = time.perf_counter()
        total += vector
        times.append(time.perf_counter() - began)
    return median(times) / vector.nbytes


def timed(way: Sum, vector: Tensor) -> list[float]:
    """Return the seconds until the last worker has the sum, and bytes and messages of the busiest worker."""
    channel = Channel()
    dist.barrier()
    began = time.perf_counter()
    way(vector, channel)
    maxima = torch.tensor([time.perf_counter() - began, channel.bytes, channel.messages], dtype=torch.float64)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima.tolist()


if __name__ == "__main__":
    what, folder, rank, workers, endpoint, rounds = sys.argv[1:]
    main(what, Path(folder), int(rank), int(workers), endpoint, int(rounds))
