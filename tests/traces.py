"""What happens inside a step, from the trace that `debug=profile` writes."""

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.players import program

STEP = "[pl][profile]run_training_batch"  # Lightning's name for an optimizer step


def traced(overrides: Sequence[str], folder: Path) -> dict[str, float]:
    """Run train.py under torch's profiler: how often each event happens in an optimizer step, by its name.

    Raises:
        RuntimeError: the run failed.
    """
    with tempfile.TemporaryDirectory(dir=folder) as outputs:
        recorded = ("max_steps=40", "debug.trainer.profiler.schedule.active=32")  # pieces: some whole steps
        program("src/train.py", "debug=profile", *recorded, *overrides, f"outputs={outputs}")
        path = min(Path(outputs).rglob("*.pt.trace.json"))  # rank zero's
        return per_step(json.loads(path.read_text())["traceEvents"])


def per_step(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the events that begin in a step, on the host or on the GPU: of all steps the one in the middle, since
    some talk more (about once a second ranks ask each other for signals)."""
    events = [event for event in events if "dur" in event]
    steps = [e for e in events if e["name"] == STEP and "gpu" not in str(e.get("cat"))]
    *starts, end = sorted(step["ts"] for step in steps)  # the last one is cut short, maybe
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(starts))
    for event in events:
        if starts[0] <= event["ts"] < end:
            counts[event["name"]][bisect_right(starts, event["ts"]) - 1] += 1
    return {name: median(actual) for name, actual in counts.items()}
