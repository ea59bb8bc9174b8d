"""On a GPU: a step against bare loops, and what each option gains.

All sides of a case hold their memory at once: about 70 GB for resnet18 with 1,024 images. `measure` takes a device, so
that a test runs it on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from parts.players import OPPONENTS, Row
from parts.steps import BF16, CASES, COLOURED, SMALL, Case, Pair, make_task, ratios

LIMITS = (0.1, 0.5)  # most that weights may differ: float32 (convolutions in TF32, kernels chosen by timing), bf16
GPU_CASES = [
    # nine tenths are trained on: without a short tail, and longer than all blocks, since an epoch's end saves
    replace(CASES[model], batch=batch, data=data | {"samples": samples}, steps=steps, games=1, rounds=5, limits=LIMITS)
    for model, data in (("mnist_cnn", SMALL), ("resnet18", COLOURED))
    for batch, steps, samples in ((128, 100, 102_400), (1024, 20, 143_360))
]
BARE_TRAINING = ("+debug.trainer.limit_val_batches=0", "checkpoint_every=null")  # the bare loops don't validate
OURS = {
    "ours": (),
    "bf16": (BF16,),
    "compile=true": ("compile=true",),
    "compile=reduce-overhead": ("compile=reduce-overhead",),
    "bf16, tuned": (BF16, "compile=true", "+optimizer.fused=true", "+debug.trainer.benchmark=true"),
}
BARE = {
    "plain": (),
    "plain again": (),
    "levers": ("--levers",),
    "bare, bf16, tuned": ("--levers", "--precision", "bf16", "--compile", "default"),
}
PAIRS: list[Pair] = [
    ("control, plain against plain", "plain again", "plain", None),
    ("against the plain loop", "ours", "plain", None),
    ("against the loop with every lever", "ours", "levers", None),
    ("bf16-mixed against float32", "bf16", "ours", None),
    ("compile=true against false", "compile=true", "ours", None),
    ("compile=reduce-overhead against false", "compile=reduce-overhead", "ours", None),
    ("tuned, against the tuned loop", "bf16, tuned", "bare, bf16, tuned", 1.03),
]


def gpu(folder: Path) -> list[Row]:
    """All cases."""
    return [line for case in GPU_CASES for line in measure(case, folder)]


def measure(case: Case, folder: Path, device: str = "cuda", ours: Mapping[str, tuple[str, ...]] = OURS) -> list[Row]:
    """The ratios of a case's steps.

    Raises:
        RuntimeError: a side failed, or does not compute the same.
    """
    more = (*BARE_TRAINING, f"accelerator={'cpu' if device == 'cpu' else 'gpu'}")
    task, command = make_task(case, (case.rounds + 1) * case.steps, folder, more)
    loop = [str(OPPONENTS / "bare_loop.py"), "--task", str(task), "--device", device]
    sides = {side: [[*command, *options]] for side, options in ours.items()}
    sides |= {side: [[*loop, *options]] for side, options in BARE.items()}
    return ratios(case, sides, [pair for pair in PAIRS if {*pair[1:3]} <= {*sides}], folder, task)
