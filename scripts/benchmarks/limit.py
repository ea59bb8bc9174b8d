"""How far a step is from what the machine can do: the share of it spent in convolutions and matrix products, and their
speed against the best that the same library reaches here on shapes that suit it. One thread, the step of train.py."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

STEPS, WARMUP = 12, 4
ARITHMETIC = ("conv", "mm", "linear")  # in the names of operations that multiply and add
MODELS = {
    "mnist_cnn": ["batch_size=64"],
    "resnet18": ["batch_size=32", "data.channels=3", "data.image_size=32"],
}


@dataclass
class Limit:
    """A model's step.

    Attributes:
        parts: share of the step's time by part, the largest first.
        gflops: of convolutions and matrix products together, over the time spent in them.
        best: GFLOP/s of a convolution (forward and backward) and of a matrix product on shapes that suit them.
    """

    model: str
    precision: str
    parts: dict[str, float]
    gflops: float
    best: dict[str, float]


def measure(folder: Path) -> list[Limit]:
    """Both models, float32 and bf16-mixed."""
    from lockstep.launch.agent import launch
    from lockstep.loading import open_data
    from lockstep.run.config import check
    from lockstep.run.library import compose

    found = []
    for model, options in MODELS.items():
        for precision in ("32-true", "bf16-mixed"):
            asked = [f"model={model}", "data=synthetic", *options, f"precision={precision}", "threads=1"]
            config = check(compose(*asked, f"max_steps={STEPS}", "callbacks=none", "logger=none"))
            splits = replace(open_data(config.data, config.data_dir, config.seed), val=None)
            parts, gflops, best = launch(_work, config, splits, folder, layout=config.layout)
            found.append(Limit(model, precision, parts, gflops, best))
    return found


def _work(config: Any, splits: Any, folder: Path) -> tuple[dict[str, float], float, dict[str, float]]:
    import lightning.pytorch as pl
    import torch
    from torch.profiler import ProfilerActivity, profile

    from lockstep.launch import logs
    from lockstep.loading import DataModule
    from lockstep.run import fast
    from lockstep.run.build import make_module, make_trainer

    logs.configure(folder, 0)
    fast.set_up(config.layout, config.threads, config.allocator)
    profiler = profile(activities=[ProfilerActivity.CPU])

    class FiniteGradientCheck(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == WARMUP:
                profiler.start()
                self.started = time.perf_counter()

        def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
            self.seconds = time.perf_counter() - self.started
            profiler.stop()

    watch = FiniteGradientCheck()
    module = make_module(config, splits)
    data = DataModule(splits, config.layout, seed=config.seed, num_workers=0)
    make_trainer(config, folder, [watch]).fit(module, datamodule=data)
    parts: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.key.startswith("aten::"):
            name = part_of(event.key)
            parts[name] = parts.get(name, 0.0) + event.self_cpu_time_total * 1e-6 / watch.seconds
    parts["Python and the loop"] = 1 - sum(parts.values())
    arithmetic = parts["convolutions and matrix products"] * watch.seconds / (STEPS - WARMUP)
    gflops = _flop(module, data.splits.spec, config.layout.batch_size) / arithmetic / 1e9
    dtype = torch.bfloat16 if config.precision == "bf16-mixed" else torch.float32
    return dict(sorted(parts.items(), key=lambda part: -part[1])), gflops, _best(dtype)


def part_of(operation: str) -> str:
    """The part of a step that an operation of torch belongs to."""
    kinds = {
        "convolutions and matrix products": ARITHMETIC,
        "normalisation": ("batch_norm",),
        "pooling": ("pool",),
        "activations": ("relu", "threshold", "clamp"),
        "loss": ("log_softmax", "nll_loss", "cross_entropy"),
        "copies and conversions": ("copy_", "_to_copy", "index", "contiguous", "cat", "clone"),
        "memory": ("empty", "zero", "fill", "resize"),
    }
    return next((kind for kind, words in kinds.items() if any(word in operation for word in words)), "other arithmetic")


def _flop(module: Any, spec: Any, batch: int) -> float:
    """Floating-point operations of a forward and backward pass; the gradient of the images is not computed."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.zeros(batch, spec.channels, spec.image_size, spec.image_size)
    with FlopCounterMode(display=False) as counter:
        module.net(x).sum().backward()
    return float(counter.get_total_flops())


def _best(dtype: Any) -> dict[str, float]:
    """GFLOP/s of one thread: forward and backward of a wide 3 x 3 convolution, and a square matrix product."""
    import torch

    def seconds(run: Any) -> float:
        times = []
        for _ in range(9):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return median(times[2:])

    layer = torch.nn.Conv2d(256, 256, 3, padding=1, bias=False).to(dtype)
    layer.to(memory_format=torch.channels_last)
    x = torch.randn(16, 256, 28, 28, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    up = torch.randn_like(layer(x))
    n = 1024
    a, b = torch.randn(n, n, dtype=dtype), torch.randn(n, n, dtype=dtype)
    flop = 3 * 2 * 16 * 28 * 28 * 256 * 256 * 9
    return {
        "convolution": flop / seconds(lambda: layer(x).backward(up)) / 1e9,
        "matrix product": 2 * n**3 / seconds(lambda: a @ b) / 1e9,
    }
