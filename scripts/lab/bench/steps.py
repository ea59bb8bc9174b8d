"""Measure a step of train.py as users run it.

It is compared with a loop written by hand, also on a GPU; in pieces and with exact sums; and on two ddp workers. Each
process has one thread.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.players import OPPONENTS, TRAIN, Command, Row, play, row, weights_of

from lockstep.config.pages import options
from lockstep.launch.machine import computes_bf16

LR = 0.01
SMALL = {"channels": 1, "image_size": 28, "samples": 20_000}
COLOURED = {"channels": 3, "image_size": 32, "samples": 10_000}
BF16 = "precision=bf16-mixed"
BARE_LOOP = str(OPPONENTS / "bare_loop.py")


@dataclass(frozen=True)
class Case:
    """A model with its batch size, its data, and the numbers of a game."""

    model: str
    batch: int
    data: dict[str, int]
    steps: int  # of a block
    skip: int  # first steps of a block, which don't count
    games: int
    rounds: int  # of each game
    save_at: int  # compare both sides' weights after this step: before rounding has grown, above all by BatchNorm
    limits: tuple[float, float]  # largest difference of weights relative to how far they moved: float32, bf16
    clock: str = "perf_counter"  # see opponents/turns.py


SMALL_CASE = Case("small_cnn", 64, SMALL, 50, 2, 5, 2, 10, (1e-3, 0.3))
LARGE_CASE = Case("resnet18", 32, COLOURED, 6, 2, 1, 4, 2, (5e-2, 0.5))
Pair = tuple[str, str, str, float | None]  # label, a side, the other, goal
STEP_GOALS = {"small_cnn": (0.72, 1.03, 0.50), "resnet18": (0.92, 1.01, 0.62)}  # plain, with levers, bf16 against plain

PIECES = 8
PIECES_CASES = (
    replace(SMALL_CASE, batch=256, steps=20, games=3),
    replace(LARGE_CASE, batch=128, data=COLOURED | {"samples": 5000}, steps=3, skip=1, rounds=3),
)
CUT_GOALS = {"small_cnn": (None, 1.05), "resnet18": (1.03, 1.10)}  # 8 pieces against one; exact against plain sums

SCALING_CASES = (
    (replace(SMALL_CASE, batch=256, steps=20, games=1, rounds=8), 1.04),
    (replace(LARGE_CASE, batch=256, steps=3, skip=1, rounds=2), 1.02),
)

SURVIVE_GOAL = 1.02
SURVIVE_CASES = (
    replace(SMALL_CASE, batch=256, steps=20, games=1, rounds=12),
    replace(LARGE_CASE, steps=3, skip=1, games=1, rounds=4),
)

# Processor time, since a step is short beside what other programs take. A block holds three points of the dashboard.
OVERHEAD_CASE = replace(SMALL_CASE, batch=8, steps=160, skip=10, games=2, rounds=4, clock="process_time")
OVERHEAD_CASES = [replace(OVERHEAD_CASE, model="linear", data=SMALL | {"image_size": 10}), OVERHEAD_CASE]
LIGHTNING_LOOP = str(OPPONENTS / "lightning_loop.py")

# All sides of a case use memory at once: about 70 GB for resnet18 with 1,024 images. Nine tenths of the samples are for
# training. The epoch has no short step and is longer than all blocks, because its end saves. On a GPU float32 means
# convolutions in TF32.
GPU_CASES = [
    replace(case, batch=batch, data=case.data | {"samples": samples}, steps=steps, games=1, rounds=5, limits=(0.1, 0.5))
    for case in (SMALL_CASE, LARGE_CASE)
    for batch, steps, samples in ((128, 100, 102_400), (1024, 20, 143_360))
]
GPU_TRAINING = ("accelerator=gpu", "+debug.trainer.limit_val_batches=0", "checkpoint_every=null")
OURS = {
    "ours": (),
    "bf16": (BF16,),
    "compile=true": ("compile=true",),
    "bf16, tuned": (BF16, "compile=true", "+optimizer.fused=true", "+debug.trainer.benchmark=true"),
}
BARE = {
    "plain": (),
    "plain again": (),
    "levers": ("--levers",),
    "bare, bf16, tuned": ("--levers", "--precision", "bf16", "--compile", "default"),
}
GPU_PAIRS: list[Pair] = [
    ("control, plain against plain", "plain again", "plain", None),
    ("against the plain loop", "ours", "plain", None),
    ("against the loop with every lever", "ours", "levers", None),
    ("bf16-mixed against float32", "bf16", "ours", None),
    ("compile=true against false", "compile=true", "ours", None),
    ("tuned, against the tuned loop", "bf16, tuned", "bare, bf16, tuned", 1.03),
]


def step(folder: Path) -> list[Row]:
    """Compare a step with the loop that people write by hand."""
    rows = []
    for case in (SMALL_CASE, LARGE_CASE):
        plain, levers, bf16 = STEP_GOALS[case.model]
        pairs: list[Pair] = [
            ("control, plain against plain", "plain again", "plain", None),
            ("against the plain loop", "ours", "plain", plain),
            ("against the loop with every lever", "ours", "levers", levers),
        ]
        if computes_bf16("cpu"):  # if bf16 is emulated, a step takes up to half a minute
            pairs.append(("bf16-mixed against the plain float32 loop", "bf16", "plain", bf16))
        rows += against(case, folder, pairs)
    return rows


def overhead(folder: Path) -> list[Row]:
    """Compare the processor time of a step of a small network, nearly all of which is the program around the network.

    Nothing is validated or saved during the blocks.
    """
    rows = []
    for case in OVERHEAD_CASES:
        training = ("+debug.trainer.limit_val_batches=0", "checkpoint_every=null", "accelerator=cpu")
        task, command = make_task(case, (case.rounds + 1) * case.steps + 10, folder, training)
        sides: dict[str, list[Command]] = {
            "the plain loop": [[BARE_LOOP, "--task", str(task)]],
            "Fabric": [[LIGHTNING_LOOP, "--task", str(task), "--fabric"]],
            "Lightning": [[LIGHTNING_LOOP, "--task", str(task)]],
            "ours": [command],
            "ours without callbacks": [[*command, "callbacks=none", "logger=none"]],
        }
        same = dict.fromkeys(sides, ("the plain loop", case.limits[0]))
        blocks, distances = race(case, sides, folder, same, task)
        times = {side: [1e6 * took / (case.steps - case.skip) for took in taken] for side, taken in blocks.items()}
        goals = {"Lightning": 1.0}
        for side, others in {"ours": list(sides)[:3], "ours without callbacks": list(sides)[2:3]}.items():
            rows += [
                row(
                    f"{case.model}, batch {case.batch}: {side}, against {other}",
                    times[side],
                    times[other],
                    goals.get(other) if side == "ours" and case.model == "linear" else None,
                    unit="us",
                    check=f"weights {distances[side]:.1e} apart",
                )
                for other in others
            ]
    return rows


def gpu(folder: Path) -> list[Row]:
    """Compare a step on a GPU, and measure the gain of each option."""
    return [line for case in GPU_CASES for line in against(case, folder, GPU_PAIRS, GPU_TRAINING, "cuda")]


def against(
    case: Case, folder: Path, pairs: Sequence[Pair], more: Sequence[str] = (), device: str = "cpu"
) -> list[Row]:
    """Run the sides of some pairs, which must all compute what `plain` does. Return a row for each, in seconds a step.

    Raises:
        RuntimeError: a side failed, or does not compute the same.
    """
    task, command = make_task(case, (case.rounds + 1) * case.steps, folder, more)
    loop = [BARE_LOOP, "--task", str(task), "--device", device]
    wanted = dict.fromkeys(side for _, *both, _ in pairs for side in both)
    sides = {side: [[*command, *OURS[side]] if side in OURS else [*loop, *BARE[side]]] for side in wanted}
    same = {side: ("plain", case.limits["bf16" in side]) for side in sides}
    blocks, distances = race(case, sides, folder, same, task)
    per_step = {side: [took / (case.steps - case.skip) for took in taken] for side, taken in blocks.items()}
    return [
        row(
            f"{case.model}, batch {case.batch}: {label}",
            per_step[side],
            per_step[other],
            goal,
            check=f"weights {distances[side]:.1e} apart",
        )
        for label, side, other, goal in pairs
    ]


def race(
    case: Case,
    sides: Mapping[str, Sequence[Command]],
    folder: Path,
    same: Mapping[str, tuple[str, float]] | None = None,
    task: Path | None = None,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Run a case.

    Args:
        same: for some sides, another side that must have the same weights, and the largest distance between them.

    Returns:
        seconds of the blocks, and the distances.

    Raises:
        RuntimeError: the sides do not compute the same.
    """
    how: dict[str, Any] = {"games": case.games, "skip": case.skip, "save_at": case.save_at, "clock": case.clock}
    blocks = play(sides, case.rounds, case.steps, folder=folder, **how)
    distances = {}
    for side, (other, limit) in (same or {}).items():
        assert task is not None
        distances[side] = distance(task, weights_of(other, folder), weights_of(side, folder))
        if not distances[side] <= limit:
            weights = f"the weights of {side!r} are {distances[side]:.1%} of their way off"
            raise RuntimeError(f"{case.model}: after {case.save_at} steps {weights}")
    return blocks, distances


def pieces(folder: Path) -> list[Row]:
    """Measure the cost of cutting a step: 8 pieces against one, and exact sums against plain ones."""
    rows = []
    for case in PIECES_CASES:
        task, whole = make_task(case, case.steps * (case.rounds + 1), folder)
        bare = [BARE_LOOP, "--task", str(task), "--levers"]
        cut = [*whole, f"pieces={PIECES}"]
        sides = {"whole": [whole], "pieces": [cut], "exact": [[*cut, "exact=true"]], "bare, whole": [bare]}
        sides["bare, pieces"] = [[*bare, "--pieces", str(PIECES)]]
        one, distances = race(case, sides, folder, {"pieces": ("bare, pieces", case.limits[0])}, task)
        ddp = [*cut, "strategy=ddp", "devices=2"]
        two, _ = race(case, {"pieces": [ddp], "exact": [[*ddp, "exact=true"]]}, folder)
        what, end = f"{case.model}, batch {case.batch}, one device, {PIECES} pieces", "exact=true against false"
        cut_goal, exact_goal = CUT_GOALS[case.model]
        checked = f"{distances['pieces']:.1e} apart"
        rows += [
            row(f"{what}: against one piece", one["pieces"], one["whole"], cut_goal),
            row(f"{what}: the same of the loop with every lever", one["bare, pieces"], one["bare, whole"], None),
            row(f"{what}: against that loop", one["pieces"], one["bare, pieces"], None, check=checked),
            row(f"{what}: {end}", one["exact"], one["pieces"], exact_goal),
            row(f"{what.replace('one device', 'ddp on 2')}: {end}", two["exact"], two["pieces"], exact_goal),
        ]
    return rows


def scaling(folder: Path) -> list[Row]:
    """Compare two ddp workers with two separate runs, and measure how much of the difference is waiting.

    All are train.py, so all compute the same step.
    """
    rows = []
    for case, goal in SCALING_CASES:
        base = arguments(case, folder, (case.rounds + 1) * case.steps)
        half = [*base, f"batch_size={case.batch // 2}"]
        ddp = [*base, "strategy=ddp", "devices=2"]
        sides = {"ddp": [ddp], "separate": [half, half]}
        if sends_nothing := "local_sgd" in options("extras"):
            never = ["extras=[local_sgd]", "extras.local_sgd.every=1000000"]
            sides["meeting"] = [[*ddp, *never, "+callbacks.turns.meets=true"]]
        blocks, _ = race(case, sides, folder)
        what, end = f"{case.model}, batch {case.batch}", f"against two runs of {case.batch // 2} that do not talk"
        rows.append(row(f"{what}: ddp on 2 {end}", blocks["ddp"], blocks["separate"], goal))
        if sends_nothing:
            label = f"{what}: two that send nothing but wait for each other at each step, {end}"
            rows.append(row(label, blocks["meeting"], blocks["separate"], None))
    return rows


def survive(folder: Path) -> list[Row]:
    """Measure what `survive=true` costs while nobody dies: the copies of the state."""
    rows = []
    for case in SURVIVE_CASES:
        ddp = arguments(case, folder, (case.rounds + 1) * case.steps, ("strategy=ddp", "devices=2", "exact=true"))
        blocks, _ = race(case, {"alone": [ddp], "survive": [[*ddp, "survive=true"]]}, folder)
        what = f"{case.model}, batch {case.batch}, exact ddp on 2: survive=true against false"
        rows.append(row(what, blocks["survive"], blocks["alone"], SURVIVE_GOAL))
    return rows


def arguments(case: Case, folder: Path, steps: int, more: Sequence[str] = ()) -> list[str]:
    """Return the arguments of train.py for `steps` steps of a case, with `more`."""
    epochs = 1 + steps * case.batch // int(0.9 * case.data["samples"])
    linear = ("model=small_cnn", "model._target_=linear_net.LinearNet", "~model.dropout")
    model = linear if case.model == "linear" else (f"model={case.model}",)
    overrides = [*model, "data=synthetic", *(f"data.{key}={value}" for key, value in case.data.items())]
    overrides += [f"batch_size={case.batch}", f"lr={LR}", "scheduler=constant", "threads=1"]
    return [*TRAIN, *overrides, *more, f"max_epochs={epochs}", f"outputs={folder}/runs"]


def make_task(case: Case, steps: int, folder: Path, more: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """Write the bare loop's task, with the steps that train.py makes. Return its path and train.py's arguments."""
    import torch

    sys.path.insert(1, str(OPPONENTS))  # with the linear network
    from lockstep.arithmetic.order import DataOrder
    from lockstep.commands.api import compose
    from lockstep.config.check import check
    from lockstep.data.build import open_data
    from lockstep.job.build import make_module

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
    """Return the distance of two sides' weights, relative to how far the first moved from the start."""
    import torch

    start, a, b = (
        torch.cat([tensor.double().flatten() for tensor in tensors])
        for tensors in (torch.load(task)["weights"], torch.load(one), torch.load(other))
    )
    return float((a - b).norm() / (a - start).norm())
