"""A line at each job's end: which of how many, how it went, the best so far, time left."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.environment import environment
from lockstep.sweeps.jobs import Job


@dataclass
class Progress:
    """What a sweep tells while it runs."""

    total: int  # jobs of the whole sweep
    metric: str  # name in a summary's `metrics` by which the best is chosen
    mode: str  # max or min
    at_once: int = 1  # jobs that run at the same time
    done: int = 0  # jobs that are over, of an earlier start too
    failed: int = 0  # those of this start that did not end well
    best: tuple[float, int] | None = None  # value, job number
    seconds: list[float] = field(default_factory=list)  # that each job of this start took

    def saw(self, number: int, summary: dict[str, Any]) -> float | None:
        """Takes down that a job is over, and returns its result; only a completed run can be the best."""
        self.done += 1
        value = (summary.get("metrics") or {}).get(self.metric)
        if value is not None and summary.get("status") == "completed":
            sign = 1 if self.mode == "max" else -1
            if self.best is None or sign * value > sign * self.best[0]:
                self.best = (value, number)
        return value

    def ended(self, job: Job, summary: dict[str, Any]) -> None:
        """Says how a job of this start went."""
        status, took = summary.get("status"), time.monotonic() - job.started
        value = self.saw(job.number, summary)
        self.failed += status != "completed"
        self.seconds.append(took)
        parts = [f"[{self.done} of {self.total}] job {job.number} {status} in {duration(took)}: {job.label}"]
        if value is not None:
            parts.append(f"{self.metric} {value:.4g}")
        elif status == "completed" and "metrics" in summary:
            logged = ", ".join(name for name in summary["metrics"] if name.startswith("val/"))
            parts.append(f"no {self.metric} to choose by; validation logged: {logged or 'nothing'}")
        if self.best:
            parts.append(f"best {self.best[0]:.4g} (job {self.best[1]})")
        if left := self.total - self.done:
            mean = sum(self.seconds) / len(self.seconds)
            parts.append(f"about {duration(mean * max(1, left / self.at_once))} left")
        if environment().rank:
            return
        print(" | ".join(parts), file=sys.stderr, flush=True)
        if status != "completed":
            print(f"job {job.number} {status}: {summary.get('error')}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
