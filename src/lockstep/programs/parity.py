"""Prove that layouts agree, on your own model, data and machine:

    lockstep parity model=resnet18 data=mnist devices=2 accumulate_grad_batches=4

The program takes the config of train.py. It trains the same optimizer steps on every layout that this machine can run,
with exact=false and with exact=true, and also in two workers started as an engine starts them (torchrun, SLURM, MPI).
By default layouts must agree up to rounding; under exact, bit for bit. It also runs controls, which are steps with a
deliberate mistake. If the comparison does not detect a control, it proves nothing, and the verdict states this.

The steps are recorded and judged as by `lockstep same`: what rounding does is measured, tensor by tensor and step by
step, in further runs on one device with a flipped bit of each weight (yardsticks). In small nets a rounding error
shrinks, but in others (ResNet18 in tiny pieces) it grows to the size of the weights within ten steps. From then on a
comparison by default detects no mistake. Under exact all bits count.

Callbacks are left out: a class of `lockstep.testing` runs layouts with them, and kills and resumes a run.

The run folder gets parity.json and parity.png. The last line is the verdict.

Exit codes: 0 all as promised, 1 not, 2 bad input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from torch.utils.data import Subset

from lockstep.arithmetic.layout import Layout, split
from lockstep.checkpoint.resume import LENGTH
from lockstep.commands import cli
from lockstep.config.arguments import overridden_keys
from lockstep.config.check import Config, check
from lockstep.config.pages import group_file, options
from lockstep.config.value_checks import whole_number
from lockstep.data import Splits
from lockstep.data.build import open_data
from lockstep.errors import UserError, WorkerFailed
from lockstep.guards import Finding
from lockstep.launch.machine import cpu_cap, gpu_count
from lockstep.programs.common.training import check_one_machine
from lockstep.programs.sameness.recorded import Side
from lockstep.programs.trials.judging import Row, explain, judge, measured, plot, rounding_of, table
from lockstep.programs.trials.trial import YARDSTICKS, Outcome, Trial, layout_changes, run, shorten, with_counter
from lockstep.report.summary import versions, write_summary
from lockstep.text import plural

CONTROLS = {
    "lr x 1.01": "faster",
    "gradients summed, not averaged": "summed",
    "another permutation": "permuted",
    "short tail scaled as a full step": "windowed",
}
ENGINE = "an engine's workers, 2"
BROKEN = "breaks a rule, see below"


class Different(Exception):
    """A layout differs, or a control was not detected."""


def parity(raw: dict[str, Any], folder: Path) -> None:
    """Run all trials, print the table, and write the results.

    Raises:
        Different: something is not as promised.
    """
    steps = whole_number(2)("steps", raw.pop("steps"))
    test_samples = whole_number(1)("test_samples", raw.pop("test_samples"))
    tail = raw.pop("tail")
    tail = None if tail is None else whole_number(1)("tail", tail)
    config, splits = opened(raw, test_samples)
    splits = shorten(splits, config.layout.batch_size, config.layout.pieces, tail)
    rows, text = compare(config, raw, steps, splits, folder / "trials")
    console = Console(width=170)
    console.print(table(rows))
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    report = {"config": raw, "steps": steps, "versions": versions(), "rows": [row.plain() for row in rows]}
    write_summary(folder / "parity.json", report)
    plot(rows, folder / "parity.png")
    console.print(f"{folder}: parity.json, parity.png", highlight=False, soft_wrap=True)
    text, passed = verdict(rows)
    if not passed:
        raise Different(text)
    print(text)


def opened(raw: dict[str, Any], test_samples: int) -> tuple[Config, Splits]:
    """Return the checked config and its data, with at most `test_samples` samples in the test split.

    Raises:
        UserError: this config can't be compared.
    """
    if unused := LENGTH.intersection(overridden_keys()):
        raise UserError(f"{min(unused)} has no effect on lockstep parity: give steps=, the number of optimizer steps")
    check_one_machine("lockstep parity", raw)
    config = check(raw)
    if config.layout.pieces < 2:
        raise UserError("pieces=1 can't be shared by devices: set devices, accumulate_grad_batches or pieces")
    splits = open_data(config.data, config.data_dir, config.seed)
    if splits.test is not None:
        splits = replace(splits, test=Subset(splits.test, range(min(test_samples, len(splits.test)))))
    return config, splits


def verdict(rows: Sequence[Row]) -> tuple[str, bool]:
    """Return the verdict in one line, and whether all is as promised."""
    trials = [row for row in rows if row.kind not in ("control", "yardstick")]
    controls = [row for row in rows if row.kind == "control"]
    failed = [f"{row.layout} ({row.kind})" for row in trials if not row.passed]
    blind = [row.layout for row in controls if not row.passed]
    exact = sum(row.kind == "exact" and row.same_bits is True for row in trials)  # others may be refused
    layouts = (
        f"{len(failed)} of {len(trials)} rows differ: {', '.join(failed)}"
        if failed
        else f"all {len(trials)} rows are as promised, {exact} of them bit for bit"
    )
    mistakes = (
        f"this comparison does not see {len(blind)} of {len(controls)} mistakes made on purpose, so it proves nothing: "
        f"{', '.join(blind)}"
        if blind
        else f"all {len(controls)} mistakes made on purpose are seen"
    )
    good = not (failed or blind)
    return f"{'The layouts agree: ' * good}{layouts}; {mistakes}.", good


def compare(config: Config, raw: dict[str, Any], steps: int, splits: Splits, folder: Path) -> tuple[list[Row], str]:
    """Compare each trial with one device that has the same pieces and arithmetic.

    Returns:
        the rows, and the text below the table.
    """
    rows: list[Row] = []
    first: dict[bool | str, Outcome] = {}  # on one device, by exact
    side: Side | None = None
    yardsticks: list[Outcome] = []
    findings: list[Finding] = []
    for number, (kind, trial) in enumerate(with_counter(trials(config, raw))):
        names = trial.name, ""
        try:
            layout = check({**raw, **trial.changes}).layout
            names = trial.name or title(layout), each(layout)
            outcome = run(trial, raw, steps, splits, folder / f"{number:02d}")
        except (UserError, WorkerFailed) as error:
            if side is None:
                raise
            # These failures are expected: some layouts have no exact sum (SyncBatchNorm, compression), a pipeline needs
            # a sequential network, and a control may overflow.
            refusable = kind == "exact" or trial.changes["strategy"]["name"] not in ("auto", "ddp", "dp")
            passed = isinstance(error, UserError) if refusable else kind == "control" and "not finite" in str(error)
            named = any(each.text in str(error) for each in findings)
            rows.append(Row(kind, *names, BROKEN if named else str(error), passed))
            continue
        reference = first.get(layout.exact, first.get(False, outcome))
        if kind == "yardstick":
            yardsticks.append(outcome)
            side = measured(reference, yardsticks)
        row = judge(kind, names, outcome, reference, side or Side("", reference.run))
        findings += outcome.findings
        if any(each.is_refused(exact=True) for each in outcome.findings):
            row = replace(row, verdict=BROKEN, passed=False)
        rows.append(row)
        first.setdefault(layout.exact, outcome)
    rules = [f"A rule that the module breaks: {each.text}" for each in findings]
    return rows, "\n".join([explain(first[False], rounding_of(rows)), *rules])


# --- what is run ------------------------------------------------------------------------------------------------------


def trials(config: Config, raw: dict[str, Any]) -> list[tuple[str, Trial]]:
    """Return the kinds and trials in the order of the table: the reference first, then the yardsticks."""
    default, exact = {"exact": False}, {"exact": True}
    everywhere = list(layouts(config, raw))
    one, others = everywhere[0] | default, everywhere[1:]
    planned = [("default", Trial("", one))]
    planned += [("yardstick", Trial(name, one, flip=flip)) for name, flip in YARDSTICKS.items()]
    two = layout_changes("ddp", 2, config.layout.pieces)
    engines = [two] if can_run({**raw, **two, **default}) else []
    planned += [("default", Trial("", layout | default)) for layout in others]
    planned += [("default", Trial(ENGINE, layout | default, by_engine=True)) for layout in engines]
    planned += [("exact", Trial("", layout | exact, judged=not number)) for number, layout in enumerate(everywhere)]
    planned += [("exact", Trial(ENGINE, layout | exact, by_engine=True)) for layout in engines]
    planned.append(("pieces", Trial("1 device, whole step", one | {"pieces": 1})))
    wrong = requested_layout(config, raw) | default
    for name, fault in CONTROLS.items():
        planned.append(("control", Trial(name, wrong, fault)))
    return planned


def can_run(raw: dict[str, Any]) -> bool:
    """Check whether a config is valid: a pipeline, for example, needs a network in parts."""
    try:
        check(raw)
    except UserError:
        return False
    return True


def layouts(config: Config, raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the changes to the config for every layout of its pieces that this machine can run, one device first."""
    pieces, devices = config.layout.pieces, config.layout.devices
    most = min(pieces, gpu_count() if config.layout.accelerator == "gpu" else cpu_cap())
    full = max(n for n in range(1, most + 1) if pieces % n == 0)  # the most devices that share the pieces equally
    uneven = next((n for n in range(2, most + 1) if pieces % n), 1)
    auto, ddp, dp = (group_file("strategy", name) for name in ("auto", "ddp", "dp"))
    candidates: list[tuple[dict[str, Any], int]] = [(auto, 1), (raw["strategy"], devices)]
    for strategy in (ddp,) if config.compile else (ddp, dp):  # dp can't be compiled
        candidates += [(strategy, n) for n in sorted({2, uneven, devices, full}) if 1 < n <= most]
        if pieces >= 3 and most >= 2:
            candidates.append((strategy | {"shares": [3, 1]}, 2))
    if config.layout.accelerator == "cpu":
        others = [group_file("strategy", name) for name in options("strategy") if name not in ("auto", "ddp", "dp")]
        candidates += [(strategy, n) for strategy in others for n in (2, 3) if n <= most]
    changed = [
        requested_layout(config, raw) | {"strategy": strategy, "devices": number} for strategy, number in candidates
    ]
    core = [strategy["name"] for strategy in (auto, ddp, dp)]
    seen = set()
    for changes in changed:
        if changes["strategy"]["name"] not in core and not can_run({**raw, **changes}):
            continue
        layout = check({**raw, **changes}).layout
        if (key := (title(layout), each(layout))) not in seen:
            seen.add(key)
            yield changes


def requested_layout(config: Config, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the layout that the user asked for, as changes to a config."""
    layout = {"strategy": raw["strategy"], "devices": config.layout.devices}
    return layout | {"pieces": config.layout.pieces, "accumulate_grad_batches": None}


def title(layout: Layout) -> str:
    """Return a layout's name in the table."""
    if layout.weights == "staged":
        return f"{layout.strategy}, {layout.devices} stages"
    return "1 device" if layout.strategy == "single" else f"{layout.strategy}, {plural(layout.devices, 'device')}"


def each(layout: Layout) -> str:
    """Return the number of pieces of each device, such as `4 + 4`."""
    if layout.weights == "staged":
        return f"{layout.pieces} through all"
    return " + ".join(map(str, split(layout.pieces, layout.num_devices, layout.shares)))


def main(arguments: list[str]) -> NoReturn:
    """Run the program under Hydra."""
    cli.command(parity, "parity")
