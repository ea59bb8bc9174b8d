"""One of two processes that all-reduce together; rank zero prints the median of each size, in seconds:

python scripts/checkup/worker.py <backend> <a file that both can reach> <rank> <bytes> ...
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist


def main(backend: str, file: str, rank: int, sizes: list[int]) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=2)
    medians = []
    for size in sizes:
        tensor, times = torch.ones(size // 4, device=device), []
        for _ in range(12):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        medians.append(statistics.median(times[2:]))
    dist.destroy_process_group()
    if rank == 0:
        print(*medians)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), [int(size) for size in sys.argv[4:]])
