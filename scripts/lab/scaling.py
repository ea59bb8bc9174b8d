"""Predict the time of a ddp step on several machines with one device each, from one device and a link:

    python scripts/lab/advise.py model=resnet18 batch_size=128 link=[1gbit,10gbit]    # measured here, then predicted
    python scripts/lab/scaling.py 1.19 44.7 1gbit 400gbit@5us    # from seconds of a step and MB of its gradient

Each of n machines computes one n-th of the step's samples; this time is measured here on one device. DDP sends
gradients in buckets, last layer first. The all-reduce of a bucket (a ring) starts when backward has made its last
gradient and the earlier bucket is complete. A step is therefore longer only by the communication after its backward
pass.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from network.link import Link

from lockstep.config.check import Config
from lockstep.errors import UserError
from lockstep.programs.common.showing import markdown

MOST = 10_000  # largest number of machines to predict
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: torch's defaults
COMPRESSED_SIZE = {"none": 1.0, "bf16": 0.5, "fp16": 0.5}


@dataclass
class Computed:
    """The times of a step on one device, in seconds."""

    step: float
    ready: list[float]  # seconds from the start of the step to each parameter's gradient
    sizes: list[int]  # of each parameter, in bytes


@dataclass
class Several:
    """The times of a step on several machines, in seconds."""

    link: str
    machines: int
    samples: int  # of each
    computing: float
    reducing: float
    step: float


def links(names: Any, outputs: str) -> dict[str, Link]:
    """Return links by name.

    Args:
        names: a rate (200mbit, 400gbit@5us), a folder or file of communication.py, `newest` for the latest of these, or
            a list.
        outputs: where `newest` searches.

    Raises:
        UserError: a name is none of these.
    """
    by_name = {}
    for name in names if isinstance(names, list) else [names]:
        if name == "newest":
            results = sorted(Path(outputs).glob("*/*/communication.json"), key=lambda path: path.stat().st_mtime)
            if not results:
                raise UserError(
                    f"link=newest: no */*/communication.json in {outputs}: run scripts/lab/communication.py first"
                )
            by_name[str(results[-1].parent)] = Link.measured(results[-1])
        elif Path(str(name)).exists():
            by_name[str(name)] = Link.measured(Path(str(name)))
        else:
            by_name[str(name)] = Link.of_rate(str(name))
    return by_name


def numbers(config: Config) -> list[int]:
    """Return the numbers of machines: 1, 2, 4, ... while each has two samples of a step or more."""
    batch = config.layout.batch_size
    return [count for bit in range(batch.bit_length()) if batch % (count := 1 << bit) == 0 and batch >= 2 * count]


def predict(
    config: Config, compression: str, by_name: dict[str, Link], measure: Callable[[int], Computed]
) -> list[Several]:
    """Return the predicted steps for all numbers of machines and all links.

    Args:
        measure: returns the times of one machine from its number of samples.
    """
    if compression not in COMPRESSED_SIZE:
        raise UserError(
            f"link: the size of strategy.compression={compression}'s messages is unknown: use none, bf16 or fp16"
        )
    batch, rows = config.layout.batch_size, []
    for count in numbers(config):
        one = measure(batch // count)
        for name, link in by_name.items():
            reducing, step = steps(one, link, count, COMPRESSED_SIZE[compression], bool(config.layout.exact))
            rows.append(Several(name, count, batch // count, one.step, reducing, step))
    return sorted(rows, key=lambda row: list(by_name).index(row.link))


def steps(one: Computed, link: Link, machines: int, compressed_size: float, exact: bool) -> tuple[float, float]:
    """Return the seconds of all-reduce and of the step.

    Under exact, integers of 64 bits are sent after backward.
    """
    if machines == 1:
        return 0.0, one.step
    end = max(one.ready)
    sent = [(end, 2 * sum(one.sizes))] if exact else [(at, compressed_size * size) for at, size in buckets(one)]
    reducing, left = 0.0, -end  # when the last bucket arrives, in seconds after the backward pass
    for ready, size in sent:
        seconds = link.cost("ring", machines, int(size)).seconds
        reducing += seconds
        left = max(left, ready - end) + seconds
    return reducing, one.step + max(left, 0.0)


def buckets(one: Computed) -> list[tuple[float, int]]:
    """Return when each of DDP's buckets is ready, and its bytes."""
    complete: list[tuple[float, int]] = []
    ready, size, limit = 0.0, 0, FIRST_BUCKET
    for at, bytes_ in zip(reversed(one.ready), reversed(one.sizes), strict=True):
        ready, size = max(ready, at), size + bytes_
        if size >= limit:
            complete.append((ready, size))
            ready, size, limit = 0.0, 0, BUCKET
    return [*complete, (ready, size)] if size else complete


def table(rows: list[Several]) -> str:
    names = (
        "link",
        "machines",
        "samples of each",
        "computes, ms",
        "all-reduce, ms",
        "step, ms",
        "times as fast as one",
    )
    alone = {row.link: row.step for row in rows if row.machines == 1}
    cells = []
    for row in rows:
        times = (f"{1000 * seconds:.1f}" for seconds in (row.computing, row.reducing, row.step))
        cells.append((row.link, row.machines, row.samples, *times, f"{alone[row.link] / row.step:.2f}"))
    return markdown(names, cells)


def conclusion(rows: list[Several]) -> str:
    """Return for each link the fastest number of machines, and the number at which half of a step is waiting."""
    sentences = []
    for name in dict.fromkeys(row.link for row in rows):
        mine = [row for row in rows if row.link == name]
        best, alone = min(mine, key=lambda row: row.step), mine[0].step
        eaten = [row.machines for row in mine if row.step > 2 * row.computing]
        half = f"from {eaten[0]} on a machine waits for more than half of it" if eaten else "none waits for half"
        slower = [row.machines for row in mine[1:] if row.step > alone]
        worse = f"; {', '.join(map(str, slower))} are slower than one" if slower else ""
        sentences.append(f"{name}: fastest on {best.machines} ({alone / best.step:.2f} times one); {half}{worse}.")
    return "\n".join(sentences)


def eaten(step: float, size: int, link: Link, way: str) -> tuple[int | None, int, float, float, float]:
    """Predict machines that share the `step` seconds equally and then sum `size` bytes.

    Returns:
        the number of machines from which sending takes longer than computing; the fastest number; how many times as
        fast as one machine that number and 2 are; the part of the time that `MOST` machines compute if each takes
        `step` seconds.
    """

    def sending(count: int) -> float:
        return link.cost(way, count, size).seconds if count > 1 else 0.0

    def seconds(count: int) -> float:
        return step / count + sending(count)

    half = next((count for count in range(2, MOST) if sending(count) > step / count), None)
    best = min(range(1, MOST + 1), key=seconds)
    return half, best, step / seconds(best), step / seconds(2), step / (step + sending(MOST))


def main(seconds: str, megabytes: str, *names: str) -> int:
    try:
        rows = []
        for name, link in links(list(names), "outputs").items():
            for way in ("ring", "halving and doubling"):
                half, best, gain, two, busy = eaten(float(seconds), int(1e6 * float(megabytes)), link, way)
                rows.append((name, way, half or "", best, f"{gain:.1f}", f"{two:.2f}", f"{busy:.1%}"))
    except UserError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    columns = ["link", "way", "sends longer than it computes, from", "fastest on", "times one machine", "2 machines"]
    print(markdown([*columns, f"{MOST:,} with such a step each: computing"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 3 else __doc__)
