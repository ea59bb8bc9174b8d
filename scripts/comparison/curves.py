"""A run's curves, from its event files: against samples seen and against seconds of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Each by the names that it may have: Lightning forks what is logged both at steps and at epochs' ends.
TAGS = {
    "train/loss": ("train/loss", "train/loss_step", "train/loss_epoch"),
    "val/acc": ("val/acc",),
    "workers/peak_gib": ("workers/peak_gib",),
}
NAMES = [name for names in TAGS.values() for name in names]
Point = tuple[float, float, float]  # optimizer step, seconds, value
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A quantity over a run; float64 [points] each."""

    samples: Numbers
    seconds: Numbers
    values: Numbers


def read_curves(folder: Path, summary: Mapping[str, Any]) -> dict[str, Curve]:
    """The curves of TAGS that the run has; none where it wrote no event files."""
    per_step = (summary.get("samples_seen") or 0) / (summary.get("steps") or 1) or 1.0
    points = _points(folder / "tensorboard")
    curves = {}
    for tag, names in TAGS.items():
        if kept := next((points[name] for name in names if points[name]), None):
            steps, seconds, values = np.array(kept, dtype=np.float64).T
            curves[tag] = Curve(steps * per_step, seconds, values)
    return curves


def _points(folder: Path) -> dict[str, list[Point]]:
    """A run that was stopped and continued has a file for each time: its clock stands still between them, and what was
    drawn after the last checkpoint counts once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sessions = []
    for path in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        if found := {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if tag in NAMES}:
            first = min(series[0].wall_time for series in found.values())
            sessions.append((first, min(first, events.FirstEventTimestamp()), found))
    points: dict[str, list[Point]] = {tag: [] for tag in NAMES}
    before = 0.0
    for _, start, found in sorted(sessions, key=lambda session: session[0]):
        first = min(event.step for series in found.values() for event in series)
        for tag, kept in points.items():
            kept[:] = [point for point in kept if point[0] < first]
            kept += [(event.step, before + event.wall_time - start, event.value) for event in found.get(tag, ())]
        before = max(point[1] for kept in points.values() for point in kept)
    return points
