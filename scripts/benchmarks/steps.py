"""A step: train.py as users run it against the loop that people write by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.players import OPPONENTS, Row, play, row

LR = 0.01


@dataclass(frozen=True)
class Case:
    """A model with its batch, and the goals: against the plain loop, the same with levers, bf16 against plain."""

    model: str
    batch: int
    data: dict[str, int]
    steps: int  # of a block
    games: int
    rounds: int  # of each game
    warm_up: bool  # a round more, which does not count
    save_at: int  # step after which both sides' weights are compared: before rounding has grown, by BatchNorm above all
    goals: tuple[float, float, float]
    apart: tuple[float, float]  # most that weights may differ, as a part of how far they moved: float32, bf16


SMALL = {"channels": 1, "image_size": 28, "samples": 20_000}
COLOURED = {"channels": 3, "image_size": 32, "samples": 10_000}
CASES = {
    "mnist_cnn": Case("mnist_cnn", 64, SMALL, 50, 5, 2, True, 10, (0.72, 1.03, 0.50), (1e-3, 0.3)),
    "resnet18": Case("resnet18", 32, COLOURED, 6, 1, 4, False, 2, (0.92, 1.01, 0.62), (5e-2, 0.5)),
}


def measure(name: str, folder: Path) -> list[Row]:
    """All comparisons of a model.

    Raises:
        RuntimeError: the sides do not compute the same.
    """
    case = CASES[name]
    steps = (case.rounds + 1) * case.steps
    task, ours = make_task(case, steps, folder)
    bare = [str(OPPONENTS / "bare_loop.py"), "--task", str(task)]
    found = play(
        {
            "ours": [ours],
            "ours, bf16": [[*ours, "precision=bf16-mixed"]],
            "plain": [bare],
            "levers": [[*bare, "--levers"]],
            "plain again": [bare],
        },
        case.rounds,
        case.steps,
        games=case.games,
        save_at=case.save_at,
        warm_up=case.warm_up,
        folder=folder,
    )
    apart = {side: distance(task, found["plain"].weights, found[side].weights) for side in found}
    for side, value in apart.items():
        limit = case.apart[side == "ours, bf16"]
        if not value <= limit:
            raise RuntimeError(
                f"{name}: after {case.save_at} steps the weights of {side!r} are {value:.1%} of their way off"
            )
    same = f"weights {apart['ours']:.1e} apart"
    blocks = {side: [seconds / (case.steps - 2) for seconds in outcome.blocks] for side, outcome in found.items()}
    what = f"{name}, batch {case.batch}"
    return [
        row(f"{what}: control, plain against plain", blocks["plain again"], blocks["plain"], None),
        row(f"{what}: against the plain loop", blocks["ours"], blocks["plain"], case.goals[0], check=same),
        row(f"{what}: against the loop with every lever", blocks["ours"], blocks["levers"], case.goals[1], check=same),
        row(
            f"{what}: bf16-mixed against the plain float32 loop",
            blocks["ours, bf16"],
            blocks["plain"],
            case.goals[2],
            check=f"weights {apart['ours, bf16']:.1e} apart",
        ),
    ]


def make_task(case: Case, steps: int, folder: Path, more: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """What the bare loop needs to make the steps that train.py makes, and train.py's own arguments, with `more`."""
    import torch

    from lockstep.arithmetic.order import DataOrder
    from lockstep.loading import open_data
    from lockstep.run.build import make_module
    from lockstep.run.config import check
    from lockstep.run.library import compose

    arguments = [
        f"model={case.model}",
        "data=synthetic",
        f"batch_size={case.batch}",
        f"lr={LR}",
        "scheduler=constant",
        "threads=1",
        *more,
    ]
    arguments += [f"data.{key}={value}" for key, value in case.data.items()]
    arguments += [f"max_epochs={1 + steps * case.batch // int(0.9 * case.data['samples'])}", f"outputs={folder}/runs"]
    config = check(compose(*arguments))
    splits = open_data(config.data, config.data_dir, config.seed)
    images, labels = splits.train.dataset.__getitems__(range(len(splits.train.dataset)))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (splits.spec.mean, splits.spec.std))
    order = DataOrder(len(splits.train), config.layout, config.seed)
    ids = torch.as_tensor(splits.train.indices)
    batches = [ids[torch.from_numpy(order.step(*order.position(step)))] for step in range(steps)]
    path = folder / f"{case.model}.task.pt"
    torch.save(
        {
            "model": case.model,
            "images": (images.float() / 255 - mean) / std,
            "labels": labels,
            "classes": splits.spec.num_classes,
            "order": batches,
            "weights": [parameter.detach() for parameter in make_module(config, splits).parameters()],
            "lr": LR,
        },
        path,
    )
    return path, [str(OPPONENTS / "lockstep_train.py"), *arguments]


def distance(task: Path, one: Path, other: Path) -> float:
    """How far two sides' weights are apart, as a part of how far the first has moved from where both began."""
    import torch

    start, a, b = (
        torch.cat([tensor.double().flatten() for tensor in tensors])
        for tensors in (torch.load(task)["weights"], torch.load(one), torch.load(other))
    )
    return float((a - b).norm() / (a - start).norm())
