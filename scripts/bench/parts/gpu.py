"""On a GPU: a step against bare loops, what each option gains, images a second, and how often a step waits for the GPU.

All sides of a case hold their memory at once: about 100 GB for resnet18 with 1,024 images. `measure` takes a device, so
that a test runs it on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from parts.players import OPPONENTS, Outcome, Row, faster, row
from parts.steps import BF16, CASES, COLOURED, SMALL, Case, make_task, race
from parts.traces import traced

AHEAD = 0.97  # goal: images/s over those of the bare tuned loop
APART = (0.1, 0.5)  # most that weights may differ: float32 (convolutions in TF32, kernels chosen by timing), bf16
GPU_CASES = [
    # nine tenths are trained on: without a short tail, and longer than all blocks, since an epoch's end saves
    replace(CASES[model], batch=batch, data=data | {"samples": samples}, steps=steps, games=1, rounds=5, apart=APART)
    for model, data in (("mnist_cnn", SMALL), ("resnet18", COLOURED))
    for batch, steps, samples in ((128, 100, 102_400), (1024, 20, 143_360))
]
BARE_TRAINING = ("+debug.trainer.limit_val_batches=0", "checkpoint_every=null")  # the bare loops don't validate
TUNED = (BF16, "+optimizer.fused=true", "+debug.trainer.benchmark=true")
# What is switched on, or off, against train.py's defaults on a GPU, which are channels_last and resident data.
OPTIONS = {
    BF16: (BF16,),
    "compile=true": ("compile=true",),
    "compile=reduce-overhead (CUDA graphs)": ("compile=reduce-overhead",),
    "+optimizer.fused=true": ("+optimizer.fused=true",),
    "+debug.trainer.benchmark=true (cuDNN)": ("+debug.trainer.benchmark=true",),
    "memory_format=contiguous": ("memory_format=contiguous",),
    "resident=false": ("resident=false",),
}
OURS = {
    "ours": (),
    **OPTIONS,
    "ours, tuned": (*TUNED, "compile=true"),
    "ours, tuned, CUDA graphs": (*TUNED, "compile=reduce-overhead"),
}
BARE = {
    "plain": (),
    "plain again": (),
    "levers": ("--levers",),
    "bare, tuned": ("--levers", "--precision", "bf16", "--compile", "default"),
    "bare, tuned, CUDA graphs": ("--levers", "--precision", "bf16", "--compile", "reduce-overhead"),
}
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize", "cuCtxSynchronize")
EVENTS = ("cudaEventSynchronize", "cuEventSynchronize")


def gpu(folder: Path) -> list[Row]:
    """All cases, and how often each waits."""
    lines = [line for case in GPU_CASES for line in measure(case, folder)]
    return lines + [synchronisations(case, folder) for case in GPU_CASES]


def measure(
    case: Case,
    folder: Path,
    device: str = "cuda",
    ours: Mapping[str, tuple[str, ...]] = OURS,
    bare: Mapping[str, tuple[str, ...]] = BARE,
) -> list[Row]:
    """The rows of a case: ratios of steps, gains of options, images/s.

    Raises:
        RuntimeError: a side failed, or does not compute the same.
    """
    more = (*BARE_TRAINING, f"accelerator={'cpu' if device == 'cpu' else 'gpu'}")
    task, command = make_task(case, (case.rounds + 1) * case.steps, folder, more)
    loop = [str(OPPONENTS / "bare_loop.py"), "--task", str(task), "--device", device]
    sides = {side: [[*command, *options]] for side, options in ours.items()}
    sides |= {side: [[*loop, *options]] for side, options in bare.items()}
    half = {side for side in sides if "tuned" in side or side == BF16}
    same = {side: ("plain", case.apart[side in half]) for side in sides}
    return rows(case, *race(case, sides, folder, same, task))


def rows(case: Case, found: Mapping[str, Outcome], apart: Mapping[str, float]) -> list[Row]:
    """What the sides' blocks say."""
    seconds = {side: [block / (case.steps - case.skip) for block in found[side].blocks] for side in found}
    what = f"{case.model}, batch {case.batch}"
    pairs = [
        ("control, plain against plain", "plain again", "plain"),
        ("against the plain loop", "ours", "plain"),
        ("against the loop with every lever", "ours", "levers"),
        *((f"{option} against the defaults", option, "ours") for option in OPTIONS if option in found),
    ]
    lines = [
        row(f"{what}: {said}", seconds[side], seconds[other], None, check=f"weights {apart[side]:.1e} apart")
        for said, side, other in pairs
    ]
    for kind in ("tuned", "tuned, CUDA graphs"):
        if f"ours, {kind}" in found:
            goal = AHEAD if case.model == "resnet18" else None
            said = f"{what}: {kind}, times as fast as the bare loop"
            one = faster(said, seconds[f"ours, {kind}"], seconds[f"bare, {kind}"], goal)
            one.ours, one.other, one.unit = case.batch / one.ours, case.batch / one.other, "images/s"
            lines.append(one)
    return lines


def synchronisations(case: Case, folder: Path, *overrides: str) -> Row:
    """How often the host waits for the GPU in a step of train.py; no dashboard point is due.

    Told, but not counted: the wait for an event that was recorded one step before (`nonfinite=stop`).
    """
    asked = [f"model={case.model}", "data=synthetic", *(f"data.{key}={value}" for key, value in case.data.items())]
    asked += [f"batch_size={case.batch}", "log_every=1000000", "threads=1", *overrides]
    return waits(f"{case.model}, batch {case.batch}", traced(asked, folder))


def waits(what: str, happened: Mapping[str, float]) -> Row:
    """Of a step's events, those in which the host waits, copies from or to memory that is not page-locked included."""
    found = {name: n for name, n in happened.items() if name in (*WAITING, *EVENTS) or "Pageable" in name}
    waited = sum(found.get(name, 0) for name in WAITING)
    told = ", ".join(f"{name} {count:g}" for name, count in sorted(found.items())) or "none of any kind"
    return Row(f"{what}: host-device synchronisations of a step", waited, 0.0, waited, 0.0, unit="", check=told)
