"""Runs of one config and several seeds as one group, and what sets the groups apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from comparison.curves import Curve, read_curves
from comparison.pair import ABSENT, NO_RUN, flat, read, show

from lockstep.arithmetic.layout import Refusal

# What runs may differ in and still be the same experiment.
IGNORED = re.compile(r"(seed|name|outputs|resume|data_dir|rdzv_endpoint|sweep|hydra|logger|debug)(\.|$)")
# What `layout` and `batch` say already.
LAYOUT = re.compile(r"(strategy\.name|devices|num_nodes|accumulate_grad_batches|pieces|batch_size)$")
LONGEST = 50  # characters of a label
Cell = str | float | int | None


@dataclass
class Run:
    """A run folder."""

    folder: Path
    config: dict[str, Any]  # dotted keys
    summary: dict[str, Any]

    @property
    def completed(self) -> bool:
        return bool(self.summary.get("status") == "completed")

    def number(self, section: str, key: str) -> float | None:
        found = (self.summary.get(section) or {}).get(key)
        return None if found is None else float(found)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        return read_curves(self.folder, self.summary)


@dataclass
class Group:
    """Runs that differ in nothing but the seed."""

    runs: list[Run]
    differs: dict[str, Any]  # what sets it apart from other groups, the layout left out
    efficiency: float | None = None  # samples/s of a device, against one alone
    label: str = ""  # what tells it apart in a plot

    @property
    def completed(self) -> list[Run]:
        return [run for run in self.runs if run.completed]

    @property
    def layout(self) -> dict[str, Any]:
        return next((run.summary["layout"] for run in self.runs if run.summary.get("layout")), {})

    @property
    def world(self) -> int:
        return int(self.layout.get("devices", 0)) * int(self.layout.get("num_nodes", 0))

    @property
    def layout_name(self) -> str:
        layout, world = self.layout, self.world
        if not layout:
            return ABSENT
        kind = "GPU" if layout["accelerator"] == "gpu" else "device"
        nodes = f" on {layout['num_nodes']} machines" if layout["num_nodes"] > 1 else ""
        pieces = f", {layout['pieces']} pieces" if layout["pieces"] > 1 else ""
        return f"{layout['strategy']} {world} {kind}{'s' * (world > 1)}{nodes}{pieces}"

    def values(self, section: str, key: str) -> list[float]:
        found = (run.number(section, key) for run in self.completed)
        return [value for value in found if value is not None]

    def mean(self, section: str, key: str) -> float | None:
        values = self.values(section, key)
        return fmean(values) if values else None

    @property
    def memory(self) -> float | None:
        """Largest process, GiB."""
        curves = (run.curves.get("workers/peak_gib") for run in self.completed)
        peaks = [curve.values.max() for curve in curves if curve]
        return float(max(peaks)) if peaks else None

    def row(self) -> dict[str, Cell]:
        accuracy, whole = self.values("metrics", "test/acc"), len(self.completed)
        named = {"run": self.label.removeprefix("run ")} if self.label.startswith("run ") else {}
        return {
            **named,
            "layout": self.layout_name,
            "batch": self.layout.get("batch_size"),
            **{key: brief(value) for key, value in self.differs.items()},
            "runs": whole if whole == len(self.runs) else f"{whole} of {len(self.runs)}",
            "test acc": fmean(accuracy) if accuracy else None,
            "+-": stdev(accuracy) if len(accuracy) > 1 else None,
            "val acc": self.mean("metrics", "val/acc"),
            "samples/s": self.mean("throughput", "samples_per_second"),
            "efficiency": self.efficiency,
            "GiB": self.memory,
            "seconds": self.mean("throughput", "seconds"),
        }  # fmt: skip


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Groups runs by their configs, and measures each group against one device. Beside runs that trained, what did not
    (evaluations, predictions, exports) is left out: it has other keys.

    Raises:
        Refusal: no run says what it was.
    """
    runs = [run for run in runs if not run.config or "max_epochs" in run.config] or runs
    gathered: dict[str, list[Run]] = {}
    for run in runs:
        said = {key: show(value) for key, value in run.config.items() if _counts(key, run.config)}
        gathered.setdefault(json.dumps(said, sort_keys=True), []).append(run)
    groups = [Group(members, {}) for said, members in gathered.items()]
    if not any(group.layout for group in groups):
        raise Refusal(f"{runs[0].folder}: none of the runs has a summary to compare")
    keys = _differing(groups)
    for group in groups:
        group.differs = {key: group.runs[0].config.get(key, ABSENT) for key in keys}
    for group, label in zip(groups, _labels(groups), strict=True):
        group.efficiency, group.label = _efficiency(group, groups), label
    return groups


def _labels(groups: Sequence[Group]) -> list[str]:
    """Only what differs; where that is too long for a legend, the folder's name. Refused runs have no layout."""
    laid = [group for group in groups if group.layout]
    layouts = len({group.layout_name for group in laid}) > 1 or not groups[0].differs
    batches = len({group.layout["batch_size"] for group in laid}) > 1
    labels = []
    for group in groups:
        parts = [group.layout_name] * (layouts and bool(group.layout))
        parts += [f"batch {group.layout['batch_size']}"] if batches and group.layout else []
        parts += [f"{key.rpartition('.')[2]}={brief(value)}" for key, value in group.differs.items()]
        labels.append(", ".join(parts))
    too_long = max(map(len, labels)) > LONGEST
    return [f"run {group.runs[0].folder.name}" for group in groups] if too_long else labels


def brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else show(value)


def _counts(key: str, config: Mapping[str, Any]) -> bool:
    """Whether runs that differ in a key are different experiments; of an image_folder, the folder is the data set."""
    return not IGNORED.match(key) or (key == "data_dir" and config.get("data.name") == "image_folder")


def _differing(groups: Sequence[Group]) -> list[str]:
    """Keys in which groups differ, the layout's left out. Where another file of a group was chosen (`optimizer.name`),
    that says it, and not the keys that only one of the files has."""
    configs = [group.runs[0].config for group in groups if group.runs[0].config]
    keys = [*dict.fromkeys(key for config in configs for key in config if _counts(key, config))]
    differ = [key for key in keys if len({show(config.get(key, ABSENT)) for config in configs}) > 1]
    chosen = {key.rpartition(".")[0] for key in differ if key.endswith(".name")}
    shared = [key for key in differ if key.partition(".")[0] not in chosen or all(key in config for config in configs)]
    return [key for key in shared if not LAYOUT.match(key) and not key.endswith("_target_")]


def _efficiency(group: Group, groups: Sequence[Group]) -> float | None:
    mine = group.mean("throughput", "samples_per_second")
    alone = [
        speed
        for other in groups
        if other.world == 1
        and other.differs == group.differs
        and other.layout["batch_size"] == group.layout.get("batch_size")
        and (speed := other.mean("throughput", "samples_per_second"))
    ]
    return mine / (group.world * max(alone)) if mine and alone else None


def is_run(folder: Path) -> bool:
    return (folder / "summary.json").is_file() or (folder / ".hydra" / "config.yaml").is_file()


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in folders, by their numbers where they have some.

    Raises:
        Refusal: a folder has none, or one that can't be read.
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise Refusal(f"{folder}: no such folder")
        inside = {path.parent for path in folder.rglob("summary.json")}
        inside |= {path.parents[1] for path in folder.rglob(".hydra/config.yaml")}
        if not inside:
            raise Refusal(f"{folder}: no run folder, {NO_RUN}, nor runs in it")
        for run in sorted(inside, key=_natural):
            config = read(run / "provenance.json").get("config") or read(run / ".hydra" / "config.yaml")
            found[run.absolute()] = Run(run, dict(flat(config)), read(run / "summary.json"))
    return list(found.values())


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts]
