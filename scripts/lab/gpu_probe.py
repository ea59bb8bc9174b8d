"""Measure steps of Lockstep, of Lightning's Trainer and of plain loops on one device, in one process:

    python scripts/lab/gpu_probe.py --to FOLDER --part=steps              # loops, Lightning and ours: 2 minutes
    python scripts/lab/gpu_probe.py --to FOLDER --part=price              # what exact=true costs: 2.5 minutes
    python scripts/lab/gpu_probe.py --to FOLDER                           # all else, about 8 minutes on an H100
    python scripts/lab/gpu_probe.py --to FOLDER --device=cpu --short      # a rehearsal, seconds

Rows come in the order of their information, and after each the program writes probe.json. It continues that file: rows
with figures are not measured again. All sides train the same network with the same optimizer on images of random
numbers. A row has, for a step:

- `us`: microseconds, of many steps, with the device waited for at both ends only;
- `cpu_us`: CPU time of the process, in microseconds;
- `launches`: kernels and graphs that the host starts; `waits`: how often the host waits for the device, by function;
- `busy`: the part of the time in which the device computes, by torch's profiler, which slows the host down;
- `peak_mib`: the largest memory of tensors on the device.
Exit codes: 0 all rows have figures, 1 a row failed or was left out for want of time.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from lockstep.commands.api import compose
from lockstep.config.check import check
from lockstep.config.extras import RunParts
from lockstep.config.run_length import run_length
from lockstep.data.build import open_data
from lockstep.files import write
from lockstep.job import build
from lockstep.step.compile import compile_networks

WAITS = ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"]
WAITS += ["cuStreamSynchronize", "cuCtxSynchronize"]
IMAGES = {"small_cnn": (1, 28), "fast_cnn": (1, 28), "resnet18": (3, 32), "vit_b_16": (3, 64)}  # channels and size
SAMPLES = 30_000
SAMPLES_OF = {"vit_b_16": 8_000}  # fewer, since its images are larger
ORDERS = 64  # steps before a loop takes the same batches again
PRECISIONS = ("TF32", "float32", "bf16")
TUNED = ("+optimizer.fused=true", "+debug.trainer.benchmark=true")

# Options of `loop`: everything on the device and channels_last; then compile, graph.
LOOPS: dict[str, set[str]] = {
    "plain loop": set(),
    "loop, every lever": {"levers"},
    "loop, contiguous": {"levers", "contiguous"},
    "loop, CUDA graph": {"levers", "graph"},
    "loop, compiled": {"levers", "compile"},
}
OURS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "ours, tuned": TUNED,
    "ours, no callbacks": ("callbacks=none", "logger=none"),
    "ours, data on the host": ("speed.resident=false",),
    "ours, augmented": ("+data.augment.crop=4", "+data.augment.flip=true"),
    "ours, contiguous": ("speed.memory_format=contiguous",),
    "ours, compiled": ("compile=true", *TUNED),
    "ours, compiled, CUDA graphs": ("compile=true", "speed.cuda_graphs=true", *TUNED),
    "ours, not fused": ("+optimizer.fused=false",),
    "ours, 4 pieces": ("pieces=4",),
    "ours, exact": ("exact=true",),
    "ours, 4 pieces, exact": ("pieces=4", "exact=true"),
    "ours, 8 pieces": ("pieces=8",),
    "ours, 8 pieces, exact": ("pieces=8", "exact=true"),
}
TRAINER = "Lightning's Trainer"
FIRST = ("plain loop", "loop, every lever", "ours", "loop, CUDA graph", TRAINER, "ours, tuned", "ours, no callbacks")
EXACT = ("ours", "ours, 4 pieces", "ours, 4 pieces, exact", "ours, exact")
PRICE = ("ours", "ours, exact", "ours, 8 pieces", "ours, 8 pieces, exact")
STEPS = ("plain loop", "loop, every lever", TRAINER, "ours")
OPTIONS = ("ours, not fused", "ours, data on the host", "ours, augmented", "ours, contiguous", "loop, contiguous")
COMPILED = ("loop, compiled", "ours, compiled", "ours, compiled, CUDA graphs")
# Sides that the cases of other batch sizes and precisions have.
FEW = ("plain loop", "loop, every lever", "ours", "loop, CUDA graph")

# What was expected of an H100 before any run: the shortest and the longest step, in microseconds.
PREDICTIONS: dict[tuple[str, int, str, str], tuple[float, float]] = {
    ("small_cnn", 128, "TF32", "plain loop"): (300, 700),
    ("small_cnn", 128, "TF32", "loop, every lever"): (250, 500),
    ("small_cnn", 128, "TF32", "loop, CUDA graph"): (60, 160),
    ("small_cnn", 128, "TF32", TRAINER): (450, 900),
    ("small_cnn", 128, "TF32", "ours"): (450, 1000),
    ("small_cnn", 128, "TF32", "ours, 4 pieces, exact"): (3000, 8000),
    ("small_cnn", 1024, "TF32", "ours"): (450, 1200),
    ("resnet18", 128, "TF32", "plain loop"): (4000, 8000),
    ("resnet18", 128, "TF32", "loop, every lever"): (3000, 6000),
    ("resnet18", 128, "TF32", "loop, CUDA graph"): (2500, 5000),
    ("resnet18", 128, "TF32", "ours"): (3500, 7000),
    ("resnet18", 128, "TF32", "ours, 4 pieces, exact"): (12000, 30000),
    ("resnet18", 128, "float32", "ours"): (8000, 16000),
    ("resnet18", 128, "bf16", "ours"): (3500, 7000),
    ("resnet18", 512, "TF32", "ours"): (11000, 20000),
    ("resnet18", 512, "bf16", "ours"): (6000, 12000),
    ("resnet18", 1024, "TF32", "ours"): (22000, 40000),
    ("resnet18", 1024, "bf16", "ours"): (11000, 22000),
    ("resnet18", 128, "bf16", "ours, compiled"): (2500, 6000),
    ("small_cnn", 128, "TF32", "ours, compiled, CUDA graphs"): (350, 800),
    ("resnet18", 128, "bf16", "ours, compiled, CUDA graphs"): (1500, 4000),
    ("fast_cnn", 128, "TF32", "ours"): (700, 1800),
    ("fast_cnn", 128, "TF32", "loop, CUDA graph"): (150, 500),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One row: a network, a batch size, a precision, and who makes the steps."""

    model: str
    batch: int
    precision: str
    side: str

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.model, self.batch, self.precision, self.side


class Clock:
    """Count the steps of a side, and measure those after the warm-up, then those under the profiler."""

    def __init__(self, device: torch.device, steps: int, warm_up: int, traced: int) -> None:
        self.device, self.warm_up, self.timed, self.ends = device, warm_up, warm_up + steps, warm_up + steps + traced
        self.total = self.ends + 2  # a last step may differ
        self.count, self.began, self.began_cpu = 0, 0.0, 0.0
        self.figures: Row = {}
        self.profile: Any = None

    def step(self) -> None:
        """Note the end of a step."""
        self.count += 1
        if self.count == self.warm_up:
            self._begin()
        if self.count == self.timed:
            cpu = time.process_time() - self.began_cpu
            steps = self.timed - self.warm_up
            self.figures = {"us": self._seconds() / steps * 1e6, "cpu_us": cpu / steps * 1e6}
            if self.device.type == "cuda":
                self.figures["peak_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self.device.type == "cuda")]
            self.profile = profile(activities=activities)
            self.profile.__enter__()
            self._begin()
        if self.count == self.ends:
            seconds = self._seconds()
            self.profile.__exit__(None, None, None)
            self.figures |= _of_trace(self.profile.events(), self.ends - self.timed, seconds)

    def _begin(self) -> None:
        self._wait()
        self.began, self.began_cpu = time.perf_counter(), time.process_time()

    def _seconds(self) -> float:
        self._wait()
        return time.perf_counter() - self.began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _of_trace(events: Any, steps: int, seconds: float) -> Row:
    """Return the figures of some traced steps that took `seconds` together."""
    names: Counter[str] = Counter()
    busy = 0.0
    for event in events:
        if str(event.device_type).endswith("CUDA"):
            is_kernel = not event.name.startswith(("Memcpy", "Memset", "Optimizer", "ProfilerStep", "[pl]"))
            busy += event.time_range.elapsed_us() if is_kernel else 0
        else:
            names[event.name] += 1
    launches = sum(count for name, count in names.items() if "aunchKernel" in name or "GraphLaunch" in name)
    waits = {name: round(names[name] / steps, 2) for name in WAITS if names[name]}
    return {"launches": round(launches / steps, 1), "waits": waits, "busy": round(busy / seconds / 1e6, 3)}


def composed(case: Case, device: torch.device, steps: int, more: tuple[str, ...], outputs: str) -> Any:
    """Return the checked config of a case, and its data."""
    channels, size = IMAGES[case.model]
    precision = "bf16-mixed" if case.precision == "bf16" else "32-true"
    model = ["model=torchvision", f"model.arch={case.model}"] if "vit" in case.model else [f"model={case.model}"]
    samples = SAMPLES_OF.get(case.model, SAMPLES)
    overrides = [*model, "data=synthetic", f"data.samples={samples}", f"data.channels={channels}"]
    overrides += [f"data.image_size={size}", f"batch_size={case.batch}", f"precision={precision}", "lr=0.01"]
    overrides += ["scheduler=constant", f"max_steps={steps}", "checkpoint_every=null", "threads=1"]
    overrides += ["+debug.trainer.limit_val_batches=0", f"accelerator={'gpu' if device.type == 'cuda' else 'cpu'}"]
    if device.type == "cpu":  # `resident` is for GPUs
        more = tuple(each for each in more if "resident" not in each)
    config = check(compose(*overrides, *more, f"outputs={outputs}"))
    splits = open_data(config.data, config.data_dir, config.seed)
    return replace(config, max_epochs=run_length(config, len(splits.train)).epochs), splits


def ours(case: Case, device: torch.device, clock: Clock, outputs: str) -> None:
    """Train as train.py does."""
    config, splits = composed(case, device, clock.total, OURS[case.side], outputs)
    folder = Path(outputs)
    module = build.make_module(config, splits)
    callbacks = [*build.make_callbacks(config, splits, folder, module), _Ticks(clock)]
    trainer = build.make_trainer(config, folder, callbacks, RunParts(config, splits, folder, module, {}, 0))
    if config.compile:
        compile_networks(module, bool(config.layout.exact), config.speed.cuda_graphs)
    trainer.fit(module, datamodule=build.make_data(config, splits))


class _Ticks(pl.Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.step()


def network(case: Case, device: torch.device, outputs: str) -> nn.Module:
    """Return the network that ours trains."""
    config, splits = composed(case, device, 1, (), outputs)
    net: nn.Module = build.make_module(config, splits).net  # type: ignore[assignment]
    return net


def optimizer_of(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, **options)


def samples(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images, labels and the ids of each step's samples, on the device."""
    channels, size = IMAGES[case.model]
    count = SAMPLES_OF.get(case.model, SAMPLES)
    images, labels = torch.randn(count, channels, size, size), torch.randint(10, (count,))
    order = torch.stack([torch.randperm(count)[: case.batch] for _ in range(ORDERS)])
    return images.to(device), labels.to(device), order.to(device)


def loop(case: Case, device: torch.device, clock: Clock, outputs: str) -> None:
    """Train with the loop that people write by hand."""
    chosen, on_gpu = LOOPS[case.side], device.type == "cuda"
    images, labels, order = samples(case, device if "levers" in chosen else torch.device("cpu"))
    net = network(case, device, outputs).to(device)
    if "contiguous" in chosen or "levers" not in chosen:  # ours are channels_last
        net.to(memory_format=torch.contiguous_format)
    optimizer = optimizer_of(net, fused=True if "levers" in chosen and on_gpu else None)
    torch.backends.cudnn.benchmark = "levers" in chosen
    if "compile" in chosen:
        net.compile(dynamic=False)

    def one(index: torch.Tensor) -> None:
        x, y = images.index_select(0, index).to(device), labels.index_select(0, index).to(device)
        optimizer.zero_grad()
        bf16 = torch.autocast(device.type, torch.bfloat16, cache_enabled="graph" not in chosen)
        with bf16 if case.precision == "bf16" else nullcontext():
            loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    step: Callable[[torch.Tensor], None] = _graph(one, order[0]) if "graph" in chosen else one
    for number in range(clock.total):
        step(order[number % ORDERS])
        clock.step()


def _graph(one: Callable[[torch.Tensor], None], index: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Record a whole step as a CUDA graph."""
    fixed, side = index.clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is allocated and chosen in the first steps must not be recorded
        for _ in range(5):
            one(fixed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one(fixed)

    def again(index: torch.Tensor) -> None:
        fixed.copy_(index)
        graph.replay()

    return again


def lightning(case: Case, device: torch.device, clock: Clock, outputs: str) -> None:
    """Train with Lightning's Trainer and no callbacks, with images on the device."""
    images, labels, order = samples(case, device)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(case, device, outputs)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

        def on_train_batch_end(self, *args: Any) -> None:
            clock.step()

    class Loader:
        def __len__(self) -> int:
            return clock.total

        def __iter__(self) -> Iterator[Any]:
            for number in range(clock.total):
                index = order[number % ORDERS]
                yield images.index_select(0, index), labels.index_select(0, index)

    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"precision": "bf16-mixed" if case.precision == "bf16" else "32-true", "default_root_dir": outputs}
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    trainer = pl.Trainer(max_epochs=1, accelerator=accelerator, devices=1, enable_model_summary=False, **options)
    trainer.fit(Module(), Loader())


def measured(case: Case, device: torch.device, clock: Clock) -> Row:
    """Return the row of a case. An error of a side is its row's `error`."""
    row: Row = {"model": case.model, "batch": case.batch, "precision": case.precision, "side": case.side}
    row |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.precision != "float32"
    began = time.perf_counter()
    side = loop if case.side in LOOPS else ours if case.side in OURS else lightning
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as outputs:
        try:
            side(case, device, clock, outputs)
            row |= clock.figures
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    # The next row begins with torch's defaults.
    torch.compiler.reset()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
    return row | {"took": round(time.perf_counter() - began, 1)}


def cases(part: str, short: bool) -> list[Case]:
    """Return the cases of a part, the most informative first.

    Args:
        part: `steps` (loops, Lightning and ours), `price` and `exact` (what exact=true costs), `all` (all else).
        short: small batches and few cases, for a rehearsal on a CPU.
    """
    if part == "price":
        kinds = [("resnet18", "float32"), ("resnet18", "bf16"), ("vit_b_16", "bf16"), ("vit_b_16", "float32")]
        kinds, batch = ([("small_cnn", "float32")], 8) if short else (kinds, 128)
        return [Case(model, batch, precision, side) for model, precision in kinds for side in PRICE]
    if part == "steps":
        sizes = [("small_cnn", 8)] if short else [("small_cnn", 64), ("resnet18", 1024), ("resnet18", 64)]
        sizes += [] if short else [("small_cnn", 1024)]
        return [Case(model, batch, "TF32", side) for model, batch in sizes for side in STEPS]
    models, batches = ["small_cnn", "resnet18", "fast_cnn"], [128, 1024, 512]
    if short:
        models, batches = ["small_cnn"], [8]
    big = batches[1:]
    if part == "exact":
        sizes = [(model, batch) for batch in batches[:2] for model in models]
        return [Case(model, batch, "TF32", side) for model, batch in sizes for side in EXACT]
    cases = [Case(model, batches[0], "TF32", side) for model in models for side in FIRST]
    cases += [
        Case(model, batches[0], precision, side) for precision in PRECISIONS[1:] for model in models for side in FEW
    ]
    cases += [Case(model, batch, precision, side) for batch in big for precision in PRECISIONS
              for model in models[1:] for side in FEW]  # fmt: skip
    cases += [Case("small_cnn", batch, "TF32", side) for batch in big for side in FEW]
    cases += [Case(model, batches[0], "TF32", side) for model in models for side in OPTIONS]
    return cases + [Case(model, batches[0], precision, side) for precision in ("TF32", "bf16") for model in models
                    for side in COMPILED]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="folder of probe.json")
    parser.add_argument("--part", choices=["steps", "price", "exact", "all"], default="all", help="which cases")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=7, help="cases that have not begun by then are left out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--short", action="store_true", help="few cases of few steps")
    parser.add_argument("--again", action="store_true", help="measure again what has figures")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.device == "cpu":
        torch.set_num_threads(1)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    path, end = options.to / "probe.json", time.monotonic() + 60 * options.minutes
    options.to.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    left_out = failed = 0
    chosen = cases(options.part, options.short)
    if options.again:
        rows = [row for row in rows if _key(row) not in {case.key for case in chosen}]
    for case in chosen:
        skipped = device.type == "cpu" and any(word in case.side for word in ("graph", "compiled", "not fused"))
        if skipped or any(_key(row) == case.key and "error" not in row for row in rows):
            continue
        if time.monotonic() > end:
            left_out += 1
            continue
        slow = 5 if case.batch > 128 or "8 pieces" in case.side or "vit" in case.model else 1
        steps = 5 if options.short else max(20, options.steps // slow)
        row = measured(case, device, Clock(device, steps, *((3, 3) if options.short else (30, 20))))
        failed += "error" in row
        rows = [each for each in rows if _key(each) != case.key] + [row]
        write(path, (json.dumps(rows, indent=1) + "\n").encode())
        print(f"{case.model} {case.batch} {case.precision} {case.side}: {row.get('error') or row['us']}", flush=True)
    print(f"{len(rows)} rows, {failed} failed, {left_out} left out for want of time")
    return int(failed or left_out > 0)


def _key(row: Row) -> tuple[str, int, str, str]:
    return row["model"], row["batch"], row["precision"], row["side"]


if __name__ == "__main__":
    sys.exit(main())
