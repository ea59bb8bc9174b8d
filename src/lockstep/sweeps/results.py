"""What a search leaves behind: a table of its trials, Optuna's plots, and the best config as an experiment."""

from __future__ import annotations

import csv
import io
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.launch.atomic import replacing
from lockstep.run.summary import summary_of
from lockstep.sweeps.plotting import find_pyplot
from lockstep.sweeps.study import Study
from lockstep.sweeps.trial import optuna

SHOWN = 10  # trials in the terminal; all are in trials.csv
NOT_THE_RECIPE = {"outputs", "resume", "sweep", "experiment", "debug"}
GROUPS = ("model", "data", "strategy", "optimizer", "scheduler")


def write_results(study: Study, config: DictConfig, context: HydraContext) -> bool:
    """Writes trials.csv, plots/ and experiment/best.yaml into the sweep's folder, and prints the best trials; False
    where none was completed."""
    rows = list(_rows(study))
    with replacing(study.folder / "trials.csv") as file:
        text = io.TextIOWrapper(file, newline="", write_through=True)
        writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
        text.detach()
    completed = [row for row in rows if row["status"] == "complete"]
    if not completed:
        return False
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(_table(study, rows))
    _plot(study)
    shown = os.path.relpath(study.folder)
    print(f"{shown}: trials.csv, plots/")
    if _write_best(study, completed[0], config, context):
        print(f"the best again: python src/train.py --config-dir={shown} experiment=best")
    return True


def _rows(study: Study) -> Iterator[dict[str, Any]]:
    """Trials that ended, the best first; what is not completed comes last."""
    metric, sign = study.sweep["metric"], -1 if study.sweep["mode"] == "max" else 1

    def rank(trial: Any) -> tuple[int, float]:
        good = trial.state.name == "COMPLETE"
        return (0, sign * trial.value) if good else (1 + (trial.state.name == "FAIL"), trial.user_attrs["job"])

    for trial in sorted(study.finished(), key=rank):
        summary = summary_of(Path(trial.user_attrs["folder"]))
        ran = trial.datetime_complete - trial.datetime_start
        yield {
            "job": trial.user_attrs["job"],
            "status": trial.state.name.lower(),
            metric: trial.value,
            "test/acc": (summary.get("metrics") or {}).get("test/acc"),
            "seconds": round(ran.total_seconds(), 1),
            **{key: trial.params.get(key) for key in study.space},
            "error": trial.user_attrs.get("error"),
        }


def _table(study: Study, rows: list[dict[str, Any]]) -> Table:
    count = {status: sum(row["status"] == status for row in rows) for status in ("complete", "pruned", "fail")}
    title = f"{len(rows)} trials: {count['complete']} completed, {count['pruned']} pruned, {count['fail']} failed"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    columns = ["job", "status", study.sweep["metric"], "test/acc", "seconds", *study.space]
    for column in columns:
        table.add_column(column, justify="left" if column == "status" else "right")
    for row in rows[:SHOWN]:
        table.add_row(*(_cell(row[column]) for column in columns))
    return table


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _plot(study: Study) -> None:
    """Optuna's plots as PNG."""
    pyplot = find_pyplot()
    if pyplot is None:
        print("no plots: they need matplotlib (the project's extra `search`)", file=sys.stderr)
        return
    visual = optuna().visualization.matplotlib
    folder = study.folder / "plots"
    folder.mkdir(exist_ok=True)
    target = study.sweep["metric"]
    draw = {
        "history": lambda: visual.plot_optimization_history(study.study, target_name=target),
        "slices": lambda: visual.plot_slice(study.study, target_name=target),
        "parallel": lambda: visual.plot_parallel_coordinate(study.study, target_name=target),
        "validations": lambda: visual.plot_intermediate_values(study.study),
    }
    completed = [trial for trial in study.finished() if trial.state.name == "COMPLETE"]
    if len(study.space) > 1 and len({trial.value for trial in completed}) > 1:
        draw["importance"] = lambda: visual.plot_param_importances(study.study, target_name=target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in draw.items():
            make()
            figure = pyplot.gcf()
            figure.set_size_inches(max(8, 3.4 * len(study.space)) if name in ("slices", "parallel") else 8, 5)
            if name == "parallel":
                for axes in figure.axes:
                    axes.grid(False)
            if name == "validations":
                figure.axes[0].set(xlabel="validation", ylabel=target)
                figure.axes[0].locator_params(axis="x", integer=True)
            figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
            pyplot.close("all")


def _write_best(study: Study, best: Mapping[str, Any], config: DictConfig, context: HydraContext) -> bool:
    """Writes the best trial's config as a file of conf/experiment/: its groups, and what differs from their values."""
    trial = next(trial for trial in study.finished() if trial.user_attrs["job"] == best["job"])
    record = Path(trial.user_attrs["folder"]) / ".hydra"
    if not record.is_dir():
        print(f"{record.parent}: the best trial's folder is gone, so there is no experiment/best.yaml", file=sys.stderr)
        return False
    chosen = OmegaConf.load(record / "hydra.yaml").hydra.runtime.choices
    groups = {group: chosen[group] for group in GROUPS if group in chosen}
    plain = context.config_loader.load_configuration(
        config.hydra.job.config_name, [f"{group}={name}" for group, name in groups.items()], RunMode.RUN
    )
    before: Any = OmegaConf.to_container(plain, resolve=False)
    after: Any = OmegaConf.to_container(OmegaConf.load(record / "config.yaml"), resolve=False)
    changed = {key: value for key, value in _changed(before, after).items() if key not in NOT_THE_RECIPE}
    content = {"defaults": [*({f"override /{group}": name} for group, name in groups.items()), "_self_"], **changed}
    found = ", ".join(f"{name} {_cell(best[name])}" for name in (study.sweep["metric"], "test/acc"))
    head = f"# @package _global_\n# the best of {len(study.finished())} trials (job {best['job']}): {found}\n"
    with replacing(study.folder / "experiment" / "best.yaml") as file:
        file.write((head + OmegaConf.to_yaml(OmegaConf.create(content))).encode())
    return True


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := _changed(old, value):
                found[key] = inner
        elif value != old or key not in before:
            found[key] = value
    return found
