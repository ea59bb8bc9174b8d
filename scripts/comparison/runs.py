"""Group runs that differ in the seed or the fold only, find what sets the groups apart, and read curves."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from common.keys import differing
from comparison.pair import ABSENT, NO_RUN, flat, read, show
from numpy.typing import NDArray

from lockstep.errors import UserError

# Keys that may differ between runs of the same experiment.
IGNORED = re.compile(r"(seed|name|outputs|resume|data_dir|sweep|hydra|logger|debug|data\.fold)(\.|$)")
# Keys that the columns `layout` and `batch` show.
LAYOUT = re.compile(r"(strategy\.name|devices|num_nodes|accumulate_grad_batches|pieces|batch_size)$")
# Keys that decide which device computes which piece, how fast, and in which order it adds, but not what a step is.
# `pieces` is read from the layout: in the config it may be null.
PLACED = re.compile(
    r"(strategy\.(name|shares|split|sync_batchnorm)|accelerator|devices|num_nodes|accumulate_grad_batches|pieces|threads"
    r"|num_workers|speed|compile|max_restarts|hang_timeout|machine_timeout"
    r"|elastic|log_every|callbacks\.(meter|console|dashboard|pictures)\..*)$"
)
LONGEST = 50  # characters of a label
# The names that a curve may have. Lightning adds a suffix to a value that is logged both at steps and at epoch ends.
TAGS = {
    "train/loss": ("train/loss", "train/loss_step", "train/loss_epoch"),
    "val/acc": ("val/acc",),
    "workers/peak_gib": ("workers/peak_gib",),
}
Numbers = NDArray[np.float64]
Lines = dict[str, dict[float, list[float]]]  # label -> value of a key -> test accuracy of each run


@dataclass(frozen=True)
class Curve:
    """A quantity over a run. Each array is float64 [points]."""

    samples: Numbers
    seconds: Numbers
    values: Numbers


@dataclass
class Run:
    """A run folder."""

    folder: Path
    config: dict[str, Any]  # dotted keys
    summary: dict[str, Any]  # dotted keys

    @property
    def completed(self) -> bool:
        return bool(self.summary.get("status") == "completed")

    @property
    def draw(self) -> tuple[Any, Any]:
        """The seed and the fold. Runs with the same ones have the same initial weights, order and augmentation."""
        return self.config.get("seed"), self.config.get("data.fold")

    @cached_property
    def curves(self) -> dict[str, Curve]:
        return read_curves(self.folder, self.summary)


@dataclass
class Group:
    """Runs that differ in nothing but the seed and the fold."""

    runs: list[Run]
    differs: dict[str, Any]  # the keys that set it apart from other groups, without the layout
    efficiency: float | None = None  # samples/s per device, relative to a run on one device
    label: str = ""  # its name in a plot

    @property
    def completed(self) -> list[Run]:
        return [run for run in self.runs if run.completed]

    def layout(self, key: str) -> Any:
        """Return a value of the layout. Return None for runs that were refused: they have no layout."""
        return next((run.summary[f"layout.{key}"] for run in self.runs if f"layout.{key}" in run.summary), None)

    @property
    def world(self) -> int:
        return (self.layout("devices") or 0) * (self.layout("num_nodes") or 0)

    @property
    def layout_name(self) -> str:
        if not self.world:
            return ABSENT
        kind, nodes, pieces = self.layout("accelerator"), self.layout("num_nodes"), self.layout("pieces")
        devices = f"{self.world} {'GPU' if kind == 'gpu' else 'device'}{'s' * (self.world > 1)}"
        where = f" on {nodes} machines" if nodes > 1 else ""
        return f"{self.layout('strategy')} {devices}{where}{f', {pieces} pieces' if pieces > 1 else ''}"

    @property
    def digests(self) -> tuple[tuple[Any, Any], ...]:
        """Return the seed and fold, as text, and the SHA-256 of the weights of each completed run."""
        return tuple(sorted((str(run.draw), run.summary.get("weights_sha256")) for run in self.completed))

    def values(self, key: str) -> list[float]:
        """Return the values of a summary key, one for each completed run that has it."""
        entries = (run.summary.get(key) for run in self.completed)
        return [float(value) for value in entries if value is not None]

    def mean(self, key: str) -> float | None:
        values = self.values(key)
        return fmean(values) if values else None

    @property
    def speed(self) -> float | None:
        return self.mean("throughput.samples_per_second")

    def row(self, metric: str) -> dict[str, Any]:
        """Return the group's row of the table, by column.

        Args:
            metric: name of the metric to show, without `val/`.
        """
        tested, whole = self.values(f"metrics.test/{metric}"), len(self.completed)
        curves = (run.curves.get("workers/peak_gib") for run in self.completed)
        peaks = [float(curve.values.max()) for curve in curves if curve]
        return {
            "layout": self.layout_name,
            "batch": self.layout("batch_size"),
            **{key: brief(value) for key, value in self.differs.items()},
            "runs": whole if whole == len(self.runs) else f"{whole} of {len(self.runs)}",
            f"val {metric}": self.mean(f"metrics.val/{metric}"),
            f"test {metric}": fmean(tested) if tested else None,
            "+-": stdev(tested) if len(tested) > 1 else None,
            "samples/s": self.speed,
            "efficiency": self.efficiency,
            "GiB": max(peaks, default=None),
            "seconds": self.mean("throughput.seconds"),
        }


def followed_metric(groups: Sequence[Group]) -> tuple[str, str]:
    """Return the metric that all models name as `monitor`, without `val/`, and its `mode`; else `acc` and `max`."""
    configs = [run.config for group in groups for run in group.runs]
    followed = {(config.get("model.monitor", "val/acc"), config.get("model.mode", "max")) for config in configs}
    monitor, mode = followed.pop() if len(followed) == 1 else ("val/acc", "max")
    return monitor.removeprefix("val/"), mode


def is_run(folder: Path) -> bool:
    return (folder / "summary.json").is_file() or (folder / ".hydra" / "config.yaml").is_file()


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Return the runs in folders. Numbered folders are in the order of their numbers.

    Raises:
        UserError: a folder has no runs, or one that can't be read.
    """

    def natural(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts]

    runs: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        inside = {path.parent for path in folder.rglob("summary.json")}
        inside |= {path.parents[1] for path in folder.rglob(".hydra/config.yaml")}
        if not inside:
            raise UserError(f"{folder}: no run folder, {NO_RUN}, nor runs in it")
        for run in sorted(inside, key=natural):
            config = read(run / "provenance.json").get("config") or read(run / ".hydra" / "config.yaml")
            runs[run.absolute()] = Run(run, dict(flat(config)), dict(flat(read(run / "summary.json"))))
    return list(runs.values())


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group runs by their configs, and measure each group against one device.

    If some of the runs trained, leave out those that did not (evaluations, predictions, exports): they have other keys.

    Raises:
        UserError: no run has a layout.
    """
    runs = [run for run in runs if not run.config or "max_epochs" in run.config] or runs
    gathered: dict[str, list[Run]] = {}
    for run in runs:
        compared = {key: show(value) for key, value in run.config.items() if counts(key, run.config)}
        gathered.setdefault(json.dumps(compared, sort_keys=True), []).append(run)
    groups = [Group(members, {}) for members in gathered.values()]
    if not any(group.world for group in groups):
        raise UserError(f"{runs[0].folder}: none of the runs has a summary to compare")
    keys = _differing([group.runs[0].config for group in groups if group.runs[0].config])
    for group in groups:
        group.differs = {key: group.runs[0].config.get(key, ABSENT) for key in keys}
    for group, label in zip(groups, _labels(groups), strict=True):
        group.efficiency, group.label = _efficiency(group, groups), label
    return groups


def same_steps(groups: Sequence[Group]) -> list[list[Group]]:
    """Return groups that took the same steps on different layouts, with the same seeds and folds."""
    gathered: dict[str, list[Group]] = {}
    for group in groups:
        if not group.completed or not group.completed[0].config:
            continue
        config, draws = group.completed[0].config, sorted(str(run.draw) for run in group.completed)
        steps = {
            key: show(value)
            for key, value in config.items()
            if counts(key, config) and not PLACED.match(key) and not (key.startswith("strategy.") and _off(value))
        }
        sizes = [group.layout("batch_size"), group.layout("pieces"), draws]
        gathered.setdefault(json.dumps([steps, sizes], sort_keys=True), []).append(group)
    return [members for members in gathered.values() if len(members) > 1]


def _off(value: Any) -> bool:
    """Check whether a strategy's option is off. Other strategies do not have the key at all."""
    return value in (None, False, "none")


def counts(key: str, config: Mapping[str, Any]) -> bool:
    """Check whether runs that differ in a key are different experiments.

    With image_folder and shards, `data_dir` is the data set, so it counts.
    """
    return not IGNORED.match(key) or (key == "data_dir" and config.get("data.name") in ("image_folder", "shards"))


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configs differ as they are shown, without those of the layout."""
    keys = differing([{key: show(value) for key, value in config.items()} for config in configs])
    counting = [key for key in keys if any(counts(key, config) for config in configs if key in config)]
    return [key for key in counting if not LAYOUT.match(key) and not key.endswith("_target_")]


def _labels(groups: Sequence[Group]) -> list[str]:
    """Return labels made of what differs. If one is too long for a legend, use the names of the folders."""
    laid = [group for group in groups if group.world]
    layouts = len({group.layout_name for group in laid}) > 1 or not groups[0].differs
    batches = len({group.layout("batch_size") for group in laid}) > 1
    labels = []
    for group in groups:
        parts = [group.layout_name] * layouts + [f"batch {group.layout('batch_size')}"] * batches
        parts += [f"{key.rpartition('.')[2]}={brief(value)}" for key, value in group.differs.items()]
        labels.append(", ".join(parts))
    too_long = max(map(len, labels)) > LONGEST
    return [f"run {group.runs[0].folder.name}" for group in groups] if too_long else labels


def _efficiency(group: Group, groups: Sequence[Group]) -> float | None:
    """Return the group's samples/s per device, relative to the fastest run on one device."""
    single = [each for each in groups if each.world == 1 and each.differs == group.differs]
    alone = [each.speed for each in single if each.layout("batch_size") == group.layout("batch_size") and each.speed]
    return group.speed / (group.world * max(alone)) if group.speed and alone else None


def brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else show(value)


def against(groups: Sequence[Group], key: str) -> Lines:
    """Return the test accuracy, or what `followed_metric` names, by the value of a key.

    There is a line for each choice of the other keys for which the key has two values or more.

    Raises:
        UserError: there is no such line.
    """
    lines: dict[tuple[str, ...], dict[float, list[float]]] = {}
    tested = f"metrics.test/{followed_metric(groups)[0]}"
    for group in groups:
        value = group.runs[0].config.get(key)
        if isinstance(value, int | float) and group.completed:
            others = {name: other for name, other in group.differs.items() if name != key and other is not None}
            labels = [f"{name.rpartition('.')[2]}={brief(other)}" for name, other in others.items()]
            lines.setdefault((group.layout_name, *labels), {})[value] = group.values(tested)
    lines = {names: dict(sorted(points.items())) for names, points in sorted(lines.items()) if len(points) > 1}
    if not lines:
        raise UserError(f"--by {key}: no completed runs differ in this key alone: name a key whose values are numbers")
    layouts = len({layout for layout, *_ in lines}) > 1
    return {", ".join(names[not layouts :]) or "all": points for names, points in lines.items()}


# --- curves -----------------------------------------------------------------------------------------------------------


def read_curves(folder: Path, summary: Mapping[str, Any]) -> dict[str, Curve]:
    """Return the curves of TAGS that a run wrote. A run without event files has none.

    A run that was stopped and resumed has one file for each start. The clock stands still between them. Points after
    the last checkpoint were computed twice and count once.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sessions = []
    for path in (folder / "tensorboard").rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        tags = events.Tags()["scalars"]
        names = {tag: next((name for name in known if name in tags), None) for tag, known in TAGS.items()}
        if scalars := {tag: events.Scalars(name) for tag, name in names.items() if name}:
            first = min(series[0].wall_time for series in scalars.values())
            sessions.append((min(first, events.FirstEventTimestamp()), scalars))
    points: dict[str, list[tuple[float, float, float]]] = {tag: [] for tag in TAGS}  # step, seconds, value
    before = 0.0
    for start, scalars in sorted(sessions, key=lambda session: session[0]):
        first = min(event.step for series in scalars.values() for event in series)
        for tag, curve in points.items():
            curve[:] = [point for point in curve if point[0] < first]
            curve += [(event.step, before + event.wall_time - start, event.value) for event in scalars.get(tag, ())]
        before = max(point[1] for curve in points.values() for point in curve)
    per_step = (summary.get("samples_seen") or 0) / (summary.get("steps") or 1) or 1.0
    columns = {tag: np.array(curve, dtype=np.float64).T for tag, curve in points.items() if curve}
    return {tag: Curve(steps * per_step, seconds, values) for tag, (steps, seconds, values) in columns.items()}
