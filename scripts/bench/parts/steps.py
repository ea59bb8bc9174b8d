"""A step of train.py as users run it: against the loop that people write by hand, in pieces and with exact sums, and on
two ddp workers. One thread a process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parts.players import OPPONENTS, TRAIN, Command, Outcome, Row, play, row

LR = 0.01
SMALL = {"channels": 1, "image_size": 28, "samples": 20_000}
COLOURED = {"channels": 3, "image_size": 32, "samples": 10_000}
BF16 = "precision=bf16-mixed"
Pair = tuple[str, str, str, float | None]  # what is compared, a side, the other, goal


@dataclass(frozen=True)
class Case:
    """A model with its batch, its data, and how it is played."""

    model: str
    batch: int
    data: Mapping[str, int]
    steps: int  # of a block
    skip: int  # of these, that don't count
    games: int
    rounds: int  # of each game
    save_at: int  # step after which both sides' weights are compared: before rounding has grown, by BatchNorm above all
    limits: tuple[float, float]  # most that weights may differ, as a part of how far they moved: float32, bf16


SMALL_CASE = Case("mnist_cnn", 64, SMALL, 50, 2, 5, 2, 10, (1e-3, 0.3))
LARGE_CASE = Case("resnet18", 32, COLOURED, 6, 2, 1, 4, 2, (5e-2, 0.5))
CASES = {case.model: case for case in (SMALL_CASE, LARGE_CASE)}
STEP_GOALS = {"mnist_cnn": (0.72, 1.03, 0.50), "resnet18": (0.92, 1.01, 0.62)}  # plain, with levers, bf16 against plain

PIECES = 8
PIECES_CASES = (
    replace(SMALL_CASE, batch=256, steps=20, games=3),
    replace(LARGE_CASE, batch=128, data=COLOURED | {"samples": 5000}, steps=3, skip=1, rounds=3),
)
CUT_GOALS = {"mnist_cnn": (None, 1.05), "resnet18": (1.03, 1.10)}  # against one piece; exact against not

SCALING_CASES = (
    (replace(SMALL_CASE, batch=256, steps=20, games=1, rounds=8), 1.04),
    (replace(LARGE_CASE, batch=256, steps=3, skip=1, rounds=2), 1.02),
)


def race(
    case: Case,
    sides: Mapping[str, Sequence[Command]],
    folder: Path,
    same: Mapping[str, tuple[str, float]] | None = None,
    task: Path | None = None,
) -> tuple[dict[str, Outcome], dict[str, float]]:
    """Plays a case. `same`: sides whose weights must be another's, by `(the other, most that they may be apart)`;
    returned beside the outcomes is how far they are.

    Raises:
        RuntimeError: the sides do not compute the same.
    """
    options: dict[str, Any] = {"games": case.games, "skip": case.skip, "save_at": case.save_at, "folder": folder}
    found = play(sides, case.rounds, case.steps, **options)
    distances = {}
    for side, (other, limit) in (same or {}).items():
        assert task is not None
        distances[side] = distance(task, found[other].weights, found[side].weights)
        if not distances[side] <= limit:
            weights = f"the weights of {side!r} are {distances[side]:.1%} of their way off"
            raise RuntimeError(f"{case.model}: after {case.save_at} steps {weights}")
    return found, distances


def step(folder: Path) -> list[Row]:
    """Against the loop that people write by hand."""
    return [line for case in CASES.values() for line in _step(case, folder)]


def _step(case: Case, folder: Path) -> list[Row]:
    task, ours = make_task(case, (case.rounds + 1) * case.steps, folder)
    bare = [str(OPPONENTS / "bare_loop.py"), "--task", str(task)]
    sides = {"ours": [ours], "bf16": [[*ours, BF16]], "plain": [bare], "levers": [[*bare, "--levers"]]}
    sides["plain again"] = [bare]
    plain, levers, bf16 = STEP_GOALS[case.model]
    pairs = [
        ("control, plain against plain", "plain again", "plain", None),
        ("against the plain loop", "ours", "plain", plain),
        ("against the loop with every lever", "ours", "levers", levers),
        ("bf16-mixed against the plain float32 loop", "bf16", "plain", bf16),
    ]
    return ratios(case, sides, pairs, folder, task)


def ratios(
    case: Case, sides: Mapping[str, Sequence[Command]], pairs: Iterable[Pair], folder: Path, task: Path
) -> list[Row]:
    """Plays a case whose sides must all compute what `plain` does; a row for each pair, in seconds a step.

    Raises:
        RuntimeError: a side does not.
    """
    same = {side: ("plain", case.limits["bf16" in side]) for side in sides}
    found, distances = race(case, sides, folder, same, task)
    blocks = {side: [took / (case.steps - case.skip) for took in outcome.blocks] for side, outcome in found.items()}
    return [
        row(
            f"{case.model}, batch {case.batch}: {said}",
            blocks[side],
            blocks[other],
            goal,
            check=f"weights {distances[side]:.1e} apart",
        )
        for said, side, other, goal in pairs
    ]


def pieces(folder: Path) -> list[Row]:
    """What cutting a step costs: 8 pieces against one, and exact sums against plain ones."""
    return [line for case in PIECES_CASES for line in _pieces(case, folder)]


def _pieces(case: Case, folder: Path) -> list[Row]:
    task, whole = make_task(case, case.steps * (case.rounds + 1), folder)
    bare = [str(OPPONENTS / "bare_loop.py"), "--task", str(task), "--levers"]
    cut = [*whole, f"pieces={PIECES}"]
    sides = {"whole": [whole], "pieces": [cut], "exact": [[*cut, "exact=true"]], "bare, whole": [bare]}
    sides["bare, pieces"] = [[*bare, "--pieces", str(PIECES)]]
    found, distances = race(case, sides, folder, {"pieces": ("bare, pieces", case.limits[0])}, task)
    one = {side: outcome.blocks for side, outcome in found.items()}
    ddp = [*cut, "strategy=ddp", "devices=2"]
    found, _ = race(case, {"pieces": [ddp], "exact": [[*ddp, "exact=true"]]}, folder)
    two = {side: outcome.blocks for side, outcome in found.items()}
    what, end = f"{case.model}, batch {case.batch}, one device, {PIECES} pieces", "exact=true against false"
    cut_goal, exact_goal = CUT_GOALS[case.model]
    checked = f"{distances['pieces']:.1e} apart"
    return [
        row(f"{what}: against one piece", one["pieces"], one["whole"], cut_goal),
        row(f"{what}: the same of the loop with every lever", one["bare, pieces"], one["bare, whole"], None),
        row(f"{what}: against that loop", one["pieces"], one["bare, pieces"], None, check=checked),
        row(f"{what}: {end}", one["exact"], one["pieces"], exact_goal),
        row(f"{what.replace('one device', 'ddp on 2')}: {end}", two["exact"], two["pieces"], exact_goal),
    ]


def scaling(folder: Path) -> list[Row]:
    """Two ddp workers against two runs that do not talk. All are train.py, so all compute the same step."""
    rows = []
    for case, goal in SCALING_CASES:
        base = arguments(case, folder, (case.rounds + 1) * case.steps)
        half = [*base, f"batch_size={case.batch // 2}"]
        found, _ = race(case, {"ddp": [[*base, "strategy=ddp", "devices=2"]], "separate": [half, half]}, folder)
        what = f"{case.model}, batch {case.batch}: ddp on 2 against two runs of {case.batch // 2} that do not talk"
        rows.append(row(what, found["ddp"].blocks, found["separate"].blocks, goal))
    return rows


def arguments(case: Case, folder: Path, steps: int, more: Sequence[str] = ()) -> list[str]:
    """train.py's own for `steps` steps of a case, with `more`."""
    epochs = 1 + steps * case.batch // int(0.9 * case.data["samples"])
    asked = [f"model={case.model}", "data=synthetic", *(f"data.{key}={value}" for key, value in case.data.items())]
    asked += [f"batch_size={case.batch}", f"lr={LR}", "scheduler=constant", "threads=1"]
    return [*TRAIN, *asked, *more, f"max_epochs={epochs}", f"outputs={folder}/runs"]


def make_task(case: Case, steps: int, folder: Path, more: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """What the bare loop needs to make the steps that train.py makes, and train.py's own arguments, with `more`."""
    import torch

    from lockstep.arithmetic.order import DataOrder
    from lockstep.run.build import make_module
    from lockstep.run.config import check
    from lockstep.run.library import compose
    from lockstep.run.opening import open_data

    command = arguments(case, folder, steps, more)
    config = check(compose(*command[len(TRAIN) :]))
    splits = open_data(config.data, config.data_dir, config.seed)
    images, labels = splits.train.dataset.__getitems__(range(len(splits.train.dataset)))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (splits.spec.mean, splits.spec.std))
    order = DataOrder(len(splits.train), config.layout, config.seed)
    ids = torch.as_tensor(splits.train.indices)
    task = {
        "model": case.model,
        "images": (images.float() / 255 - mean) / std,
        "labels": labels,
        "classes": splits.spec.num_classes,
        "order": [ids[torch.from_numpy(order.step(*order.position(step)))] for step in range(steps)],
        "weights": [parameter.detach() for parameter in make_module(config, splits).parameters()],
        "lr": LR,
    }
    path = folder / f"{case.model}.task.pt"
    torch.save(task, path)
    return path, command


def distance(task: Path, one: Path, other: Path) -> float:
    """How far two sides' weights are apart, as a part of how far the first has moved from where both began."""
    import torch

    start, a, b = (
        torch.cat([tensor.double().flatten() for tensor in tensors])
        for tensors in (torch.load(task)["weights"], torch.load(one), torch.load(other))
    )
    return float((a - b).norm() / (a - start).norm())
