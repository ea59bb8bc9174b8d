"""Two ddp workers against one, and against two processes that do not talk: what is lost, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.players import OPPONENTS, Row, faster, play, row

GOAL = 0.93


@dataclass(frozen=True)
class Case:
    """A model's data and how much of it is measured."""

    data: tuple[str, ...]
    steps: int  # of a block
    skip: int
    rounds: int
    warm_up: bool  # a round more, which does not count


CASES = {
    "mnist_cnn": Case(("data.samples=20000",), 20, 2, 8, True),
    "resnet18": Case(("data.samples=10000", "data.channels=3", "data.image_size=32"), 3, 1, 2, False),
}
BATCH = 256


def measure(model: str, folder: Path) -> list[Row]:
    """A model, one thread a worker; all sides are train.py, so all compute the same step."""
    case = CASES[model]
    base = [str(OPPONENTS / "lockstep_train.py"), f"model={model}", "data=synthetic", *case.data, "threads=1"]
    base += ["lr=0.01", f"outputs={folder}/runs"]
    half = [*base, f"batch_size={BATCH // 2}"]
    found = play(
        {
            "one": [[*base, f"batch_size={BATCH}"]],
            "ddp": [[*base, f"batch_size={BATCH}", "strategy=ddp", "devices=2"]],
            "apart": [half, half],
        },
        case.rounds,
        case.steps,
        skip=case.skip,
        warm_up=case.warm_up,
        folder=folder,
    )
    one, ddp, apart = (found[side].blocks for side in ("one", "ddp", "apart"))
    twice, apart_twice = ([2 * seconds for seconds in blocks] for blocks in (ddp, apart))
    what = f"{model}, batch {BATCH}, 2 workers of one thread"
    return [
        faster(f"{what}: part of twice one worker's speed", twice, one, GOAL),
        faster(f"{what}: the same of two runs of {BATCH // 2} that do not talk", apart_twice, one, None),
        row(f"{what}: ddp against those two (all-reduce, waiting, loop)", ddp, apart, None),
    ]
