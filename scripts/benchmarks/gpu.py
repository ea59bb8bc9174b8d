"""On a GPU: a step against bare loops, what each option gains, images a second, and how often a step waits for the GPU.

All sides of a case hold their memory at once: about 100 GB for resnet18 with 1,024 images. The functions take a device,
so that tests run them on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.players import OPPONENTS, Outcome, Row, faster, play, row
from benchmarks.steps import CASES, COLOURED, SMALL, Case, distance, make_task

AHEAD = 0.97  # goal: images/s over those of the bare tuned loop
APART = (0.1, 0.5)  # most that weights may differ: float32 (convolutions in TF32, kernels chosen by timing), bf16
GPU_CASES = [
    # nine tenths are trained on: without a short tail, and longer than all blocks, since an epoch's end saves
    replace(CASES[model], batch=batch, data=data | {"samples": samples}, steps=steps, games=1, rounds=5, apart=APART)
    for model, data in (("mnist_cnn", SMALL), ("resnet18", COLOURED))
    for batch, steps, samples in ((128, 100, 102_400), (1024, 20, 143_360))
]
TRAIN = ("+debug.trainer.limit_val_batches=0", "checkpoint_every=null")  # the bare loops don't validate
BF16 = "precision=bf16-mixed"
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
HALF = {side for side in (*OURS, *BARE) if "tuned" in side or side == BF16}
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize", "cuCtxSynchronize")
EVENTS = ("cudaEventSynchronize", "cuEventSynchronize")
WARMUP, COUNTED = 8, 20  # steps


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
    accelerator = "cpu" if device == "cpu" else "gpu"
    more = (*TRAIN, f"accelerator={accelerator}")
    task, command = make_task(case, (case.rounds + 1) * case.steps, folder, more)
    loop = [str(OPPONENTS / "bare_loop.py"), "--task", str(task), "--device", device]
    sides = {side: [[*command, *options]] for side, options in ours.items()}
    sides |= {side: [[*loop, *options]] for side, options in bare.items()}
    found = play(sides, case.rounds, case.steps, save_at=case.save_at, folder=folder)
    apart = {side: distance(task, found["plain"].weights, found[side].weights) for side in found}
    for side, value in apart.items():
        if not value <= case.apart[side in HALF]:
            raise RuntimeError(f"{case.model}: after {case.save_at} steps {side!r} is {value:.1%} of its way off")
    return rows(case, found, apart)


def rows(case: Case, found: Mapping[str, Outcome], apart: Mapping[str, float]) -> list[Row]:
    """What the sides' blocks say."""
    seconds = {side: [block / (case.steps - 2) for block in outcome.blocks] for side, outcome in found.items()}
    what = f"{case.model}, batch {case.batch}"

    def line(said: str, side: str, other: str) -> Row:
        return row(f"{what}: {said}", seconds[side], seconds[other], None, check=f"weights {apart[side]:.1e} apart")

    lines = [
        line("control, plain against plain", "plain again", "plain"),
        line("against the plain loop", "ours", "plain"),
        line("against the loop with every lever", "ours", "levers"),
    ]
    lines += [line(f"{option} against the defaults", option, "ours") for option in OPTIONS if option in found]
    for kind in ("tuned", "tuned, CUDA graphs"):
        if f"ours, {kind}" in found:
            goal = AHEAD if case.model == "resnet18" else None
            said = f"{what}: {kind}, times as fast as the bare loop"
            one = faster(said, seconds[f"ours, {kind}"], seconds[f"bare, {kind}"], goal)
            one.ours, one.other, one.unit = case.batch / one.ours, case.batch / one.other, "images/s"
            lines.append(one)
    return lines


def synchronisations(case: Case, folder: Path, *overrides: str) -> Row:
    """How often the host waits for the GPU in a step of train.py, by torch's profiler; no dashboard point is due.

    Told, but not counted: the wait for an event that was recorded one step before (`nonfinite=stop`).
    """
    from lockstep.launch.agent import has_computed, launch
    from lockstep.loading import open_data
    from lockstep.run.config import check
    from lockstep.run.library import compose

    asked = [f"model={case.model}", "data=synthetic", *(f"data.{key}={value}" for key, value in case.data.items())]
    asked += [f"batch_size={case.batch}", f"max_steps={WARMUP + COUNTED + 1}", "log_every=1000000", "threads=1"]
    config = check(compose(*asked, *TRAIN, f"outputs={folder}", *overrides))
    splits = replace(open_data(config.data, config.data_dir, config.seed), val=None)
    with has_computed():  # this process may have
        found = launch(_profiled, config, splits, folder, layout=config.layout)
    waited = sum(found.get(name, 0) for name in WAITING) / COUNTED
    told = ", ".join(f"{name} {count / COUNTED:g}" for name, count in sorted(found.items()))
    said = f"{case.model}, batch {case.batch}: host-device synchronisations of a step"
    return Row(said, waited, 0.0, waited, 0.0, unit="", check=told or "none of any kind")


def _profiled(config: Any, splits: Any, folder: Path) -> dict[str, int]:
    import lightning.pytorch as pl
    from torch.profiler import profile, record_function

    from lockstep.launch import logs
    from lockstep.run import fast
    from lockstep.run.build import compile_module, make_callbacks, make_data, make_module, make_trainer

    logs.configure(folder, 0)
    fast.set_up(config.layout, config.threads, config.allocator)
    profiler = profile()  # of the host, and of the GPU where there is one
    span = record_function("counted steps")

    class FiniteGradientCheck(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == WARMUP:
                profiler.start()
                span.__enter__()
            elif trainer.global_step == WARMUP + COUNTED:
                span.__exit__(None, None, None)
                profiler.stop()

    module = make_module(config, splits)
    trainer = make_trainer(config, folder, [*make_callbacks(config, splits, folder, module), FiniteGradientCheck()])
    compile_module(config, module)
    trainer.fit(module, datamodule=make_data(config, splits, 0))
    return counted(profiler.events() or [])


def counted(events: Iterable[Any]) -> dict[str, int]:
    """How often a wait, or a copy from or to memory that is not page-locked, lies in the counted steps."""
    events = list(events)
    (span,) = (e.time_range for e in events if e.name == "counted steps" and "CPU" in str(e.device_type))
    found: dict[str, int] = {}
    for event in events:
        kind = event.name in (*WAITING, *EVENTS) or "Pageable" in event.name
        if kind and span.start <= event.time_range.start <= span.end:
            found[event.name] = found.get(event.name, 0) + 1
    return found
