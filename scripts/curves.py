"""A run's curves, from its event files or its csv: against samples seen and against seconds of training."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TAGS = ("train/loss", "val/acc", "memory/peak_gib")
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A quantity over a run; float64 [points] each."""

    samples: Numbers
    seconds: Numbers | None  # csv files have no times
    values: Numbers


def read_curves(folder: Path, summary: Mapping[str, Any]) -> dict[str, Curve]:
    """The curves of TAGS that the run has."""
    if any((folder / "tensorboard").glob("events.out.tfevents.*")):
        return _from_events(folder / "tensorboard", summary)
    if (folder / "csv" / "metrics.csv").is_file():
        return _from_csv(folder / "csv" / "metrics.csv")
    return {}


def _from_events(folder: Path, summary: Mapping[str, Any]) -> dict[str, Curve]:
    """A run that was stopped and continued has a file for each time: its clock stands still between them, and what was
    drawn after the last checkpoint counts once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[str, list[tuple[float, float, float]]] = {tag: [] for tag in TAGS}  # step, seconds, value
    before = 0.0
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: int(path.name.split(".")[3])):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        found = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if tag in TAGS}
        if not found:
            continue
        start = events.FirstEventTimestamp()
        first = min(event.step for series in found.values() for event in series)
        for tag, kept in points.items():
            kept[:] = [point for point in kept if point[0] < first]
            kept += [(event.step, before + event.wall_time - start, event.value) for event in found.get(tag, ())]
        before = max(point[1] for kept in points.values() for point in kept)
    per_step = (summary.get("samples_seen") or 0) / (summary.get("steps") or 1) or 1.0
    curves = {tag: np.array(kept, dtype=np.float64).T for tag, kept in points.items() if kept}
    return {tag: Curve(steps * per_step, seconds, values) for tag, (steps, seconds, values) in curves.items()}


def _from_csv(path: Path) -> dict[str, Curve]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    curves = {}
    for tag in TAGS:
        pairs = [(float(row["samples"]), float(row[tag])) for row in rows if row.get(tag) and row.get("samples")]
        if pairs:
            samples, values = np.array(pairs, dtype=np.float64).T
            curves[tag] = Curve(samples, None, values)
    return curves
