"""Measure `strategy=fsdp`: what each device keeps, what a step sends and how long it takes, beside plain `fully_shard`.

    python scripts/lab/sharding.py --devices 1 2 4
    python scripts/lab/sharding.py --devices 2 --width 256 --layers 4 --rounds 4

The network is a transformer of 86 million parameters by default, on random samples, trained by AdamW. The ranks are
processes of this machine (gloo). Lockstep's strategy, with exact=true and without, and torch's `fully_shard` of the
same blocks in a plain loop train in turns, each time in new processes. Times are those of rank zero: the median step
after the first of each turn, and the median of the rounds; ratios are to the plain loop of the same round. The peak is
what the process had at most (RSS) above what it had before the network was made. The last column is the hash of the
trained weights: one hash with exact=true, on any number of devices.
"""

import argparse
import functools
import hashlib
import logging
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.strategies import FSDP

CLASSES, TOKENS, SEED = 10, 8, 0
# of torch.distributed; torch renames some of them
SENT = (
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_reduce", "gather", "scatter"),
)


class Turn(NamedTuple):
    """What rank zero of one side measured in its turn."""

    seconds: float
    cpu_seconds: float
    sent: int
    peak: int
    memory: dict[str, int]
    sha256: str  # of the trained weights


class Net(nn.Module):
    """Transformer blocks on a few tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        make = functools.partial(nn.TransformerEncoderLayer, width, 8, 4 * width, 0.0, batch_first=True)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x.mean(1))
        return result


class Module(pl.LightningModule):
    """Trains the network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Times(pl.Callback):
    """Records the seconds and the bytes of each step, and what the strategy keeps after the last one."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.bytes: list[int] = []
        self.memory: dict[str, int] = {}
        self.sha256 = ""

    def on_train_batch_start(self, *args: Any) -> None:
        self.before = self.counts.total()
        self.began = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began[0])
        self.cpu_seconds.append(time.process_time() - self.began[1])
        self.bytes.append(self.counts.total() - self.before)
        if hasattr(getattr(trainer, "strategy", None), "bytes_by_kind"):
            self.memory = trainer.strategy.bytes_by_kind(trainer.optimizers[0])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the bytes of the messages that this process gives to collectives."""
    counts: Counter[str] = Counter()
    functions = {name: getattr(dist, name) for name in SENT if hasattr(dist, name)}

    def wrap(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            counts[name] += max((each.numel() * each.element_size() for each in tensors), default=0)
            return function(*args, **kwargs)

        return counting

    for name, function in functions.items():
        setattr(dist, name, wrap(name, function))
    try:
        yield counts
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


def samples(number: int, width: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(number, TOKENS, width, generator=generator)
    return TensorDataset(x, torch.arange(number) % CLASSES)


def lockstep_side(args: argparse.Namespace, devices: int, exact: bool, reshard: bool) -> Times:
    """Train with Lockstep."""
    torch.manual_seed(SEED)
    with counted() as counts:
        times = Times(counts)
        trainer = lockstep.Trainer(
            strategy=FSDP(reshard=reshard) if devices > 1 else "auto",
            accelerator="cpu",
            pieces=args.pieces,
            exact=exact,
            max_steps=args.steps,
            max_epochs=1,
            precision="32-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[times],
        )
        loader = DataLoader(samples(args.steps * args.pieces, args.width), batch_size=args.pieces)
        module = Module(Net(args.width, args.layers))
        trainer.fit(module, loader)
    states = trainer.strategy.lightning_module_state_dict()
    times.sha256 = sha256({name.removeprefix("net."): weight for name, weight in states.items()})
    return times


def plain_side(args: argparse.Namespace, devices: int, reshard: bool) -> Times:
    """Train with torch's `fully_shard` alone, in a loop that accumulates as many micro-batches."""
    torch.manual_seed(SEED)
    net = Net(args.width, args.layers)
    if devices > 1:
        mesh = init_device_mesh("cpu", (devices,))
        for layer in [*net.layers, net]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard and layer is not net)
            layer.set_force_sum_reduction_for_comms(True)
            layer.set_gradient_divide_factor(1.0)
            if not reshard:
                layer.set_reshard_after_backward(False, recurse=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    data = samples(args.steps * args.pieces, args.width)
    rank = dist.get_rank() if devices > 1 else 0
    with counted() as counts:
        times = Times(counts)
        for step in range(args.steps):
            times.on_train_batch_start()
            optimizer.zero_grad()
            for piece in range(rank, args.pieces, devices):
                x, y = data[step * args.pieces + piece : step * args.pieces + piece + 1]
                (nn.functional.cross_entropy(net(x), y) / args.pieces).backward()
            if devices > 1 and not reshard:
                for layer in [*net.layers, net]:
                    layer.reshard()
            optimizer.step()
            times.on_train_batch_end(None)
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in net.state_dict().items()}
    times.sha256 = sha256(whole)
    return times


def sha256(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def sides(devices: int) -> list[tuple[str, bool, bool, bool]]:
    """Return what is compared: a name, whether it is plain, exact, and resharded. Each follows its plain loop."""
    if devices == 1:
        return [("plain loop", True, False, False), ("lockstep", False, False, False), ("exact", False, True, False)]
    return [
        (f"{name}, reshard={str(reshard).lower()}", plain, exact, reshard)
        for reshard in (False, True)
        for name, plain, exact in (("plain", True, False), ("lockstep", False, False), ("exact", False, True))
    ]


def measured(args: argparse.Namespace, devices: int, plain: bool, exact: bool, reshard: bool) -> Turn:
    """Train one side in this process."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = plain_side(args, devices, reshard) if plain else lockstep_side(args, devices, exact, reshard)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return Turn(
        median(times.seconds[1:]), median(times.cpu_seconds[1:]), times.bytes[-1], peak, times.memory, times.sha256
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if uneven := [str(devices) for devices in args.devices if args.pieces % devices]:
        parser.error(f"--pieces {args.pieces} is no multiple of {', '.join(uneven)}, which the plain loop needs")
    count = sum(p.numel() for p in Net(args.width, args.layers).parameters())
    print(f"{count:,} parameters, {args.pieces} pieces of one sample; seconds and bytes of a step (ratio to plain)")
    for devices in args.devices:
        turns: dict[str, list[Turn]] = {}
        for _ in range(args.rounds):
            for name, *side in sides(devices):
                turn = lockstep.launch(
                    measured, args, devices, *side, devices=devices, accelerator="cpu", hang_timeout=600
                )
                turns.setdefault(name, []).append(turn)
        for name, plain, *_ in sides(devices):
            if plain:
                theirs = turns[name]
            mine = turns[name]
            wall = median(a.seconds / b.seconds for a, b in zip(mine, theirs, strict=True))
            cpu = median(a.cpu_seconds / b.cpu_seconds for a, b in zip(mine, theirs, strict=True))
            memory = mine[-1].memory
            parts = ", ".join(f"{kind} {size / count:.2f}" for kind, size in memory.items())
            print(
                f"devices={devices}  {name:24} {median(t.seconds for t in mine):6.2f} s ({wall:.2f})"
                f"  {median(t.cpu_seconds for t in mine):6.2f} CPU s ({cpu:.2f})  {mine[-1].sent / 2**20:6.0f} MiB sent"
                f"  peak {max(t.peak for t in mine) / count:5.1f} bytes a parameter"
                + (f", keeps {sum(memory.values()) / count:.2f} ({parts})" if memory else "")
                + f"  {mine[-1].sha256[:8]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
