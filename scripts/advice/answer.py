"""The advice in words and as a table."""

from __future__ import annotations

from statistics import median

from advice.prediction import Choice, Machine
from rich import box
from rich.table import Table

from lockstep.run.config import Config
from lockstep.step.memory import MIB


def table(choices: list[Choice], config: Config) -> Table:
    """Prediction and measurement side by side."""
    shown = Table(
        "layout", "devices", "accumulated", "piece", "MiB/device", "compute", "all-reduce", "predicted", "measured",
        "error", box=box.SIMPLE_HEAD, caption="ms a step; in order of the prediction",
    )  # fmt: skip
    for choice in choices:
        times = [f"{1000 * t:.1f}" for t in (choice.compute, choice.all_reduce, choice.predicted)]
        measured = "" if choice.measured is None else f"{1000 * choice.measured:.1f}"
        error = "" if choice.error is None else f"{choice.error:+.0%}"
        piece = str(config.layout.batch_size // (choice.devices * choice.accumulate_grad_batches))
        sizes = [str(choice.devices), str(choice.accumulate_grad_batches), piece, f"{choice.mib:.0f}"]
        shown.add_row(choice.strategy, *sizes, *times, measured, error)
    return shown


def conclusion(choices: list[Choice], machine: Machine, config: Config) -> str:
    """One paragraph: which layout, and why."""
    best = min((choice for choice in choices if choice.measured), key=lambda choice: choice.best)
    errors = [abs(choice.error) for choice in choices if choice.error is not None]
    ones = [choice for choice in choices if choice.devices == 1 and choice.measured]  # none: one does not hold it
    said = [
        f"Use {best}: a step of {config.layout.batch_size} samples takes {1000 * best.best:.1f} ms (measured; "
        f"predicted {1000 * best.predicted:.1f})."
    ]
    if best.devices > 1 and ones:
        one = min(choice.best for choice in ones)
        said.append(f"That is {one / best.best:.2f} times as fast as one device ({1000 * one:.1f} ms, measured).")
    for n in sorted({choice.devices for choice in choices} - {1}):
        latency, bandwidth = machine.ring(n)
        said.append(
            f"{n} workers that compute at once take {1000 * machine.step(n, min(machine.compute[n])):.1f} ms for their "
            f"parts, and {1000 * machine.send(n):.1f} ms to all-reduce {machine.gradients / MIB:.1f} MiB of gradients "
            f"({1e6 * latency:.0f} us + bytes sent at {bandwidth / 1e9:.2f} GB/s)."
        )
    if any(choice.strategy == "dp" for choice in choices):
        dp = min((choice for choice in choices if choice.strategy == "dp"), key=lambda choice: choice.best)
        why = "one process, which copies weights and gradients in every turn"
        if config.layout.accelerator == "cpu":
            why = "one process, in which a CPU computes the devices' pieces one after the other"
        known = "measured" if dp.measured else "predicted"
        said.append(f"dp is {why}: {1000 * dp.best:.1f} ms at best ({known}).")
    same = [c for c in choices if (c.strategy, c.devices) == (best.strategy, best.devices)]
    more = max(same, key=lambda choice: choice.accumulate_grad_batches)
    if more is not best:
        longer = more.predicted / best.predicted - 1
        said.append(
            f"Accumulating {more.accumulate_grad_batches} pieces on each device is predicted to take {longer:+.0%} "
            f"time, and {more.mib:.0f} instead of {best.mib:.0f} MiB."
        )
    said.append(
        f"Predictions were off by {max(errors):.0%} at most and {median(errors):.0%} in the middle, of "
        f"{len(errors)} run."
    )
    return " ".join(said)
