"""Group runs that differ in the seed or the fold only, find the keys in which groups differ, and read curves."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.metrics import MODE_OF
from lockstep.errors import UserError
from lockstep.programs.comparison.facts import ABSENT, flat, read, recorded_config, show
from lockstep.text import plural

# Keys that may differ between runs of the same experiment.
NOT_OF_THE_EXPERIMENT = re.compile(
    r"(seed|name|outputs|resume|data_dir|sweep|hydra|logger|debug|data\.(fold|cache|cache_gb|retry_seconds))(\.|$)"
)
# Keys that the columns `layout` and `batch` show.
IN_LAYOUT_COLUMNS = re.compile(r"(strategy\.name|devices|num_nodes|accumulate_grad_batches|pieces|batch_size)$")
# Keys that do not change a step, except for rounding. They set which device computes a piece, how fast, and in which
# order it adds. `pieces` does change a step, but it may be null in the config, so it is read from the layout.
NOT_OF_THE_STEP = re.compile(
    r"(strategy\.(name|shares|split|sync_batchnorm)|accelerator|devices|num_nodes|accumulate_grad_batches|pieces|threads"
    r"|num_workers|speed|compile|max_restarts|hang_timeout|machine_timeout"
    r"|elastic|survive|log_every|callbacks\.(meter|console|dashboard|pictures)\..*)$"
)
MAX_LABEL = 50  # characters; longer labels do not fit in a legend
# The names that a curve may have. Lightning adds a suffix to a value that is logged both at steps and at epoch ends.
TAGS = {
    "train/loss": ("train/loss", "train/loss_step", "train/loss_epoch"),
    "val/acc": ("val/acc",),
    "workers/peak_gib": ("workers/peak_gib",),
}
Numbers = NDArray[np.float64]


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
    config: dict[str, Any]  # by dotted key
    summary: dict[str, Any]  # by dotted key
    recorded: bool = True  # whether the run has recorded its config; else it is as Hydra composed it

    @property
    def completed(self) -> bool:
        return bool(self.summary.get("status") == "completed")

    @property
    def seed_and_fold(self) -> tuple[Any, Any]:
        """The seed and the fold. Runs that share both have the same initial weights, order and augmentation."""
        return self.config.get("seed"), self.config.get("data.fold")

    @cached_property
    def curves(self) -> dict[str, Curve]:
        return read_curves(self.folder, self.summary)


@dataclass
class Group:
    """Runs that differ in nothing but the seed and the fold."""

    runs: list[Run]
    differing_values: dict[str, Any]  # the group's values of the keys in which the groups differ, without the layout
    efficiency: float | None = None  # samples/s per device, relative to the fastest run on one device
    label: str = ""  # the group's name in a plot

    @property
    def completed(self) -> list[Run]:
        return [run for run in self.runs if run.completed]

    def layout(self, key: str) -> Any:
        """Return a value of the layout. Return None for runs that were refused: they have no layout."""
        return next((run.summary[f"layout.{key}"] for run in self.runs if f"layout.{key}" in run.summary), None)

    @property
    def world_size(self) -> int:
        return (self.layout("devices") or 0) * (self.layout("num_nodes") or 0)

    @property
    def layout_name(self) -> str:
        if not self.world_size:
            return ABSENT
        nodes, pieces = self.layout("num_nodes"), self.layout("pieces")
        device = "GPU" if self.layout("accelerator") == "gpu" else "device"
        machines = f" on {nodes} machines" if nodes > 1 else ""
        return (
            f"{self.layout('strategy')} {plural(self.world_size, device)}{machines}"
            f"{f', {pieces} pieces' if pieces > 1 else ''}"
        )

    @property
    def hashes_by_run(self) -> tuple[tuple[Any, Any], ...]:
        """For each completed run: its seed and fold, as text, and the SHA-256 of its weights."""
        return tuple(sorted((str(run.seed_and_fold), run.summary.get("weights_sha256")) for run in self.completed))

    def values(self, key: str) -> list[float]:
        """Return the values of a summary key, one for each completed run that has it."""
        entries = (run.summary.get(key) for run in self.completed)
        return [float(value) for value in entries if isinstance(value, int | float)]

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
        tested, completed = self.values(f"metrics.test/{metric}"), len(self.completed)
        curves = (run.curves.get("workers/peak_gib") for run in self.completed)
        peaks = [float(curve.values.max()) for curve in curves if curve]
        return {
            "layout": self.layout_name,
            "batch": self.layout("batch_size"),
            **{key: brief(value) for key, value in self.differing_values.items()},
            "runs": completed if completed == len(self.runs) else f"{completed} of {len(self.runs)}",
            f"val {metric}": self.mean(f"metrics.val/{metric}"),
            f"test {metric}": fmean(tested) if tested else None,
            "+-": stdev(tested) if len(tested) > 1 else None,
            "samples/s": self.speed,
            "efficiency": self.efficiency,
            "GiB": max(peaks, default=None),
            "seconds": self.mean("throughput.seconds"),
        }


def followed_metric(groups: Sequence[Group]) -> tuple[str, str | None]:
    """Return the metric that all models name as `monitor`, without `val/`, else `acc`; and which value is the best.

    That is `max` or `min`, or None if it is not known.
    """
    configs = [run.config for group in groups for run in group.runs]
    named = {(config.get("model.monitor", "val/acc"), config.get("model.mode")) for config in configs}
    monitor, mode = named.pop() if len(named) == 1 else ("val/acc", "max")
    return monitor.removeprefix("val/"), mode or MODE_OF.get(monitor)


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Return the runs in folders. Numbered folders are in the order of their numbers.

    Raises:
        UserError: a folder has no runs, or a run can't be read.
    """

    def sort_key(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts]

    runs: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        run_folders = {path.parent for path in folder.rglob("summary.json")}
        run_folders |= {path.parents[1] for path in folder.rglob(".hydra/config.yaml")}
        if not run_folders:
            raise UserError(
                f"{folder} has no runs: name a run folder, which has summary.json or .hydra/config.yaml, or a folder "
                "with run folders in it"
            )
        for run in sorted(run_folders, key=sort_key):
            summary = read(run / "summary.json")
            runs[run.absolute()] = Run(
                run, dict(flat(recorded_config(run))), dict(flat(summary)), (run / "provenance.json").exists()
            )
    return list(runs.values())


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group the runs of the same experiment. Compute what differs between groups, their efficiency and their labels.

    If some of the runs trained, leave out those that did not (evaluations, predictions, exports): they have other keys.

    Raises:
        UserError: no run has a layout.
    """
    runs = [run for run in runs if not run.config or "max_epochs" in run.config] or runs
    runs = [_as_recorded(run, runs) for run in runs]
    gathered: dict[str, list[Run]] = {}
    for run in runs:
        experiment = {key: show(value) for key, value in run.config.items() if belongs_to_experiment(key, run.config)}
        gathered.setdefault(json.dumps(experiment, sort_keys=True), []).append(run)
    configs = [members[0].config for members in gathered.values()]
    keys = _differing_keys([config for config in configs if config])
    groups = [
        Group(members, {key: config.get(key, ABSENT) for key in keys})
        for members, config in zip(gathered.values(), configs, strict=True)
    ]
    if not any(group.world_size for group in groups):
        raise UserError(f"{runs[0].folder}: none of the runs has a summary to compare")
    return [
        replace(group, efficiency=_efficiency(group, groups), label=label)
        for group, label in zip(groups, _labels(groups), strict=True)
    ]


def _as_recorded(run: Run, runs: Sequence[Run]) -> Run:
    """Return a run that ended before its first step with the keys that runs of the same pages have recorded.

    What it has not chosen is null in its config, or a key of another place, and is no difference.
    """
    if run.recorded:
        return run

    def pages(config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key.endswith(".name")}

    like = next((each.config for each in runs if each.recorded and pages(each.config) == pages(run.config)), None)
    if like is None:
        return run
    chosen = {key: value for key, value in run.config.items() if key in like and value is not None}
    return replace(run, config={**like, **chosen})


def same_steps(groups: Sequence[Group]) -> list[list[Group]]:
    """Return groups that took the same steps on different layouts, with the same seeds and folds."""
    gathered: dict[str, list[Group]] = {}
    for group in groups:
        if not group.completed or not group.completed[0].config:
            continue
        config = group.completed[0].config
        seeds_and_folds = sorted(str(run.seed_and_fold) for run in group.completed)
        step_keys = {
            key: show(value)
            for key, value in config.items()
            if belongs_to_experiment(key, config)
            and not NOT_OF_THE_STEP.match(key)
            and not (key.startswith("strategy.") and _is_off(value))
        }
        sizes = [group.layout("batch_size"), group.layout("pieces"), seeds_and_folds]
        gathered.setdefault(json.dumps([step_keys, sizes], sort_keys=True), []).append(group)
    return [members for members in gathered.values() if len(members) > 1]


def _is_off(value: Any) -> bool:
    """Check whether a strategy's option is off. Then the steps are those of a strategy without the option."""
    return value in (None, False, "none")


def belongs_to_experiment(key: str, config: Mapping[str, Any]) -> bool:
    """Check whether runs that differ in a key are different experiments.

    `data_dir` belongs to the experiment with image_folder and shards, because it is the data set there.
    """
    names_the_data = key == "data_dir" and config.get("data.name") in ("image_folder", "shards")
    return names_the_data or not NOT_OF_THE_EXPERIMENT.match(key)


def _differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of the experiment whose printed values differ between configs, without those of the layout.

    Where configs chose different files of a group, `optimizer.name` shows it. Keys that only one of the files has are
    then left out.
    """
    printed = [{key: show(value) for key, value in config.items()} for config in configs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    keys = [key for key in keys if len({config.get(key) for config in printed}) > 1]
    chosen = {key.rpartition(".")[0] for key in keys if key.endswith(".name")}
    keys = [key for key in keys if key.partition(".")[0] not in chosen or all(key in config for config in configs)]
    keys = [key for key in keys if any(belongs_to_experiment(key, config) for config in configs if key in config)]
    return [key for key in keys if not IN_LAYOUT_COLUMNS.match(key) and not key.endswith("_target_")]


def _labels(groups: Sequence[Group]) -> list[str]:
    """Return labels made of what differs. If one is too long for a legend, use the names of the folders."""
    with_layout = [group for group in groups if group.world_size]
    show_layout = len({group.layout_name for group in with_layout}) > 1 or not groups[0].differing_values
    show_batch_size = len({group.layout("batch_size") for group in with_layout}) > 1
    labels = []
    for group in groups:
        parts = [group.layout_name] if show_layout else []
        parts += [f"batch {group.layout('batch_size')}"] if show_batch_size else []
        parts += [f"{key.rpartition('.')[2]}={brief(value)}" for key, value in group.differing_values.items()]
        labels.append(", ".join(parts))
    too_long = max(map(len, labels)) > MAX_LABEL
    return [f"run {group.runs[0].folder.name}" for group in groups] if too_long else labels


def _efficiency(group: Group, groups: Sequence[Group]) -> float | None:
    """Return the group's samples/s per device, relative to the fastest run on one device."""
    on_one_device = [
        each for each in groups if each.world_size == 1 and each.differing_values == group.differing_values
    ]
    batch_size = group.layout("batch_size")
    speeds = [each.speed for each in on_one_device if each.layout("batch_size") == batch_size and each.speed]
    return group.speed / (group.world_size * max(speeds)) if group.speed and speeds else None


def brief(value: Any) -> str:
    """Return a value as short text: a number has four digits."""
    return f"{value:.4g}" if isinstance(value, float) else show(value)


# --- curves -----------------------------------------------------------------------------------------------------------


def read_curves(folder: Path, summary: Mapping[str, Any]) -> dict[str, Curve]:
    """Return the curves of TAGS that a run wrote. A run without event files has none.

    A run that was stopped and resumed has one file for each start. The time between two files is left out. Points after
    the last checkpoint were computed twice; the later ones are returned.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sessions = []
    for path in (folder / "tensorboard").rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        tags = events.Tags()["scalars"]
        names = {tag: next((name for name in possible if name in tags), None) for tag, possible in TAGS.items()}
        if scalars := {tag: events.Scalars(name) for tag, name in names.items() if name}:
            first_time = min(series[0].wall_time for series in scalars.values())
            sessions.append((min(first_time, events.FirstEventTimestamp()), scalars))
    points: dict[str, list[tuple[float, float, float]]] = {tag: [] for tag in TAGS}  # step, seconds, value
    earlier_seconds = 0.0  # the seconds in the earlier files
    for start, scalars in sorted(sessions, key=lambda session: session[0]):
        first_step = min(event.step for series in scalars.values() for event in series)
        for tag, curve in points.items():
            curve[:] = [point for point in curve if point[0] < first_step]
            curve += [
                (event.step, earlier_seconds + event.wall_time - start, event.value) for event in scalars.get(tag, ())
            ]
        earlier_seconds = max(point[1] for curve in points.values() for point in curve)
    samples_per_step = (summary.get("samples_seen") or 0) / (summary.get("steps") or 1) or 1.0
    columns = {tag: np.array(curve, dtype=np.float64).T for tag, curve in points.items() if curve}
    return {tag: Curve(steps * samples_per_step, seconds, values) for tag, (steps, seconds, values) in columns.items()}
