"""Strong and weak scaling, as the textbooks measure them:

    python scripts/scaling.py data=mnist batch_size=256 lr=0.2 'over=[1,2]' max_epochs=1

Strong scaling keeps the step (`batch_size` samples, `lr`) and spreads it over more devices; weak scaling lets both
grow with the devices (Goyal et al., Accurate, large minibatch SGD, 2017). Efficiency is samples per second over those
of the first number of devices, for each device. Takes the config of train.py; writes scaling.json and scaling.png.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import clock
from rich import box
from rich.table import Table
from showing import GREY, find_pyplot, style, wide_console

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.environment import external_workers
from lockstep.loading import Splits
from lockstep.run import cli
from lockstep.run.checks import choice, real, several, show, whole
from lockstep.run.config import Config, check
from lockstep.run.opening import open_data
from lockstep.run.summary import versions, write_summary
from lockstep.run.supervisor import run_in_workers
from lockstep.run.training import train


@dataclass(frozen=True)
class Point:
    """One run. Times in seconds; efficiency against the first number of devices."""

    mode: str
    strategy: str
    devices: int
    batch_size: int
    lr: float
    epoch_seconds: float
    samples_per_second: float
    efficiency: float
    accuracy: float
    peak_gib: float  # of the largest process


def scaling(raw: dict[str, Any], folder: Path) -> None:
    """Runs every point, prints the table, writes table and plot."""
    own = {key: raw.pop(key) for key in ("over", "strategies", "modes", "repeats")}
    over = several(whole(1))("over", own["over"])
    strategies = several(choice("ddp", "dp"))("strategies", own["strategies"])
    modes = several(choice("strong", "weak"))("modes", own["modes"])
    repeats = whole(1)("repeats", own["repeats"])
    whole(1)("batch_size", raw["batch_size"])  # they grow, so they must be numbers
    real(above=0)("lr", raw["lr"])
    if external_workers() or raw["num_nodes"] != 1:
        raise Refusal(f"over={show(over)}: numbers of devices of one machine, without torchrun")
    plan = [(mode, name, n) for mode in modes for name in strategies for n in over]
    configs = [config_of(raw, *point, over[0]) for point in plan]
    splits = open_data(configs[0].data, configs[0].data_dir, configs[0].seed)
    points: list[Point] = []
    base: dict[tuple[str, str], float] = {}
    for number, ((mode, name, n), config) in enumerate(zip(plan, configs, strict=True)):
        best = max((measure(config, splits, folder / "runs" / f"{number}.{k}") for k in range(repeats)), key=speed)
        efficiency = speed(best) / base.setdefault((mode, name), speed(best)) * over[0] / n
        accuracy, epoch = best["metrics"].get("test/acc", float("nan")), len(splits.train) / speed(best)
        step = config.layout.batch_size, config.lr
        points.append(Point(mode, name, n, *step, epoch, speed(best), efficiency, accuracy, best["peak_gib"]))
    wide_console(120).print(table(points))
    report = {"config": raw, "points": [asdict(point) for point in points], "versions": versions()}
    write_summary(folder / "scaling.json", report)
    plot(points, folder / "scaling.png")


def config_of(raw: dict[str, Any], mode: str, strategy: str, devices: int, first: int) -> Config:
    """The checked config of one point."""
    grown = devices / first if mode == "weak" else 1
    changes = {
        "strategy": {"name": "auto" if devices == 1 else strategy},
        "devices": devices,
        "batch_size": round(raw["batch_size"] * grown),
        "lr": raw["lr"] * grown,
        "callbacks": {**raw["callbacks"], "clock": {"_target_": "clock.Clock"}},
    }
    return check({**raw, **changes})


def measure(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """One run's summary, and the peak memory of its largest process."""
    folder.mkdir(parents=True)
    summary: dict[str, Any] = run_in_workers(train, config, splits, folder)
    if summary["throughput"]["samples_per_second"] is None:
        raise Refusal("scaling needs runs of some steps, and callbacks=default, which measure them")
    return summary | {"peak_gib": max(rank["peak_gib"] for rank in clock.read(folder))}


def speed(summary: dict[str, Any]) -> float:
    """Samples per second in training, all devices together, without warm-up and validation."""
    return float(summary["throughput"]["samples_per_second"])


def table(points: list[Point]) -> Table:
    """The points, a section for each mode."""
    shown = Table(
        "scaling", "layout", "batch", "lr", "s/epoch", "samples/s", "efficiency", "test acc", "peak GiB/process",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for point, after in zip(points, [*points[1:], None], strict=True):
        numbers = [f"{point.epoch_seconds:.1f}", f"{point.samples_per_second:.0f}", f"{point.efficiency:.0%}"]
        quality = [f"{point.accuracy:.2%}", f"{point.peak_gib:.2f}"]
        end = after is not None and after.mode != point.mode
        sizes = [str(point.batch_size), f"{point.lr:g}"]
        layout = "1 device" if point.devices == 1 else f"{point.strategy}, {point.devices} devices"
        shown.add_row(point.mode, layout, *sizes, *numbers, *quality, end_section=end)
    return shown


def plot(points: list[Point], path: Path) -> None:
    """Samples per second over devices; nothing without matplotlib."""
    pyplot = find_pyplot()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(f"{point.mode}, {point.strategy}", []).append(point)
    for number, (name, line) in enumerate(lines.items()):
        axes.plot([p.devices for p in line], [p.samples_per_second for p in line], label=name, **style(number))
    most = max(point.devices for point in points)
    one = points[0].samples_per_second / points[0].devices
    axes.plot([1, most], [one, most * one], color=GREY, linewidth=1, label="ideal")
    axes.set(xlabel="devices", ylabel="samples per second", ylim=(0, None), xticks=sorted({p.devices for p in points}))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(color="#E4E4E4")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    cli.command(scaling, "scaling")
