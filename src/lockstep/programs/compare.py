"""Compare runs of a sweep, or any runs, side by side:

    lockstep compare outputs/mnist_cnn_digits/sweeps/<stamp>
    lockstep compare outputs/mnist_cnn_digits/<one> outputs/mnist_cnn_digits/<other> ...

Runs that differ only in the seed or the fold share a row. Rows are sorted by validation accuracy; test accuracy is
shown but does not affect the order. If all models name another metric as `monitor`, it takes the place of accuracy.
Notes below the table name the rows that took the same steps on different layouts.

For runs with data.folds a second table has the mean over the folds, their standard deviation, and the score of all
validation samples as one set. Runs whose folds are of different splits (data.folds, data.split_seed) are refused. So
are two completed runs of the same fold, folds of different numbers of samples, and incomplete sets of folds that have
no fold in common: they are probably one set, in which a setting or the seed differs by mistake.

If rows have several seeds in common with the first one, another table has the difference of each from the first one,
seed by seed, and whether the difference is larger than the noise.

The tables are printed. They are also written, with plots of loss and accuracy, as compare.md and compare.json.
The folder for these files is `compare` in the given folder, or in the folder that contains all given ones; `--to`
names another.

`lockstep same` on two run folders finds the first step at which they differ, and the cause.

Exit codes: 0 compared, 2 bad input.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.commands.sweeps import chooses_samples
from lockstep.config.metrics import best_value
from lockstep.errors import UserError
from lockstep.files import write
from lockstep.programs.common.parser import parser_of
from lockstep.programs.common.showing import markdown
from lockstep.programs.comparison import noise
from lockstep.programs.comparison.facts import ABSENT
from lockstep.programs.comparison.folds import CrossValidation, cross_validations
from lockstep.programs.comparison.runs import (
    Group,
    Run,
    find_runs,
    followed_metric,
    group_runs,
    same_steps,
)
from lockstep.text import plural

CAPTION = (
    "+-: standard deviation of test {} over {}",
    "efficiency: samples/s per device, relative to the fastest run on one device",
    "GiB: peak memory of the largest process",
)
FORMATS = {"samples/s": ",.0f", "efficiency": ".0%", "GiB": ".2f", "seconds": ".1f"}


def main(words: list[str]) -> int:
    """Compare the runs. Return the exit code.

    Raises:
        UserError: there is nothing to compare.
    """
    parser = parser_of("compare", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="folder", help="a run, or a folder with runs in it")
    parser.add_argument("--to", type=Path, metavar="folder", help="folder for the table and the plots")
    arguments = parser.parse_args(words)
    compare(arguments.runs, arguments.to)
    return 0


def compare(folders: Sequence[Path], output: Path | None) -> None:
    """Print and write the tables, best rows first, and draw the plots.

    Args:
        folders: folders with runs.
        output: the folder to write to; None: `compare` in the folder that contains all `folders`.

    Raises:
        UserError: there is nothing to compare.
    """
    groups = group_runs(runs := find_runs(folders))
    metric, mode = followed_metric(groups)
    groups.sort(key=partial(sort_key, metric=metric, mode=mode), reverse=True)
    validations = cross_validations(groups)
    differences = noise.differences_from_first(first_and_different(groups), metric)
    root = Path(os.path.commonpath([folder.absolute() for folder in folders]))
    rows = [{"folder": folder_names(group, root), **group.row(metric)} for group in groups]
    notes = [best_note(groups, root, metric, mode), *same_steps_notes(groups, root), *left_out_notes(groups, len(runs))]
    text = table(rows)
    caption = "\n".join(CAPTION).format(metric, "seeds and folds" if validations else "seeds")
    text += "\n\n" + "\n".join([f"folder: relative to {os.path.relpath(root)}", caption, *filter(None, notes)]) + "\n"
    text += folds_text(validations, metric) + noise_text(groups, differences)
    print(text)

    folder = output or root / "compare"
    if folder.is_symlink() and not output:  # it may have come with somebody else's runs
        raise UserError(f"{folder}: a link: name the folder for the tables, --to {os.path.relpath(folder.resolve())}")
    folder.mkdir(parents=True, exist_ok=True)
    from lockstep.programs.comparison.charts import draw_curves  # matplotlib takes a second

    plots = draw_curves(groups, folder)
    write(folder / "compare.md", (text + "".join(f"\n![]({name})\n" for name in plots)).encode())
    for row, group in zip(rows, groups, strict=True):
        row["folders"] = {str(run.folder): run.summary.get("status") for run in group.runs}
        row["cross_validation"] = [each.row(metric) for each in validations if each.runs[0] in group.runs]
        row["noise"] = {name: asdict(difference) for other, name, difference in differences if other is group}
    write(folder / "compare.json", f"{json.dumps(rows, indent=2)}\n".encode())
    print(f"{os.path.relpath(folder)}: {', '.join(['compare.md', 'compare.json', *plots])}")


def sort_key(group: Group, metric: str, mode: str | None) -> tuple[float, float]:
    """Return the sort key: larger is better.

    It is `metric` in validation, then the validation loss, for ties and for runs without the metric. Runs without
    either come last. A metric of which it is not known which value is the best (`mode` is None) does not count.
    """
    value, loss = (group.mean(f"metrics.val/{name}") for name in (metric, "loss"))
    value = value if mode else None
    sign = 1 if mode == "max" else -1
    return -math.inf if value is None else sign * value, -math.inf if loss is None else -loss


def folder_names(group: Group, root: Path) -> str:
    """Return the group's folders relative to `root`. For the jobs of a sweep these are numbers."""
    by_parent = runs_by_parent(group.runs, root)
    names = [", ".join(each) if parent == root else shell_path(parent, each) for parent, each in by_parent.items()]
    return ", ".join(os.path.relpath(name, root) if "/" in name else name for name in names)


def runs_by_parent(runs: Sequence[Run], root: Path) -> dict[Path, list[str]]:
    """Return the names of run folders by their parent folder. If `root` itself is a run, it stands under `root`."""
    by_parent: dict[Path, list[str]] = {}
    for run in runs:
        folder = run.folder.absolute()
        by_parent.setdefault(root if folder == root else folder.parent, []).append(folder.name)
    return by_parent


def shell_path(parent: Path, names: Sequence[str]) -> str:
    """Return the paths of folders as a shell understands them: `sweep/0`, or `sweep/{0,2}`."""
    return f"{parent}/{names[0] if len(names) == 1 else '{' + ','.join(names) + '}'}"


def best_note(groups: Sequence[Group], root: Path, metric: str, mode: str | None) -> str:
    """Return a line with the folders of the best runs, or why there are none.

    It is empty if there is only one group or no validation.
    """
    first = groups[0]
    by_metric, by_loss = sort_key(first, metric, mode)
    if len(groups) == 1 or max(by_metric, by_loss) == -math.inf:
        return ""
    if any(chooses_samples(key) for key in first.differing_values):
        return "rows were scored on different samples, so none of them is the best"
    name, better = ("loss", "min") if by_metric == -math.inf else (metric, mode)
    folders = [shell_path(*each) for each in runs_by_parent(first.completed, root).items()]
    return f"best by val/{name} ({best_value(str(better))}): {', '.join(map(os.path.relpath, folders))}"


def same_steps_notes(groups: Sequence[Group], root: Path) -> list[str]:
    """Return a sentence for each set of rows that took the same steps on different layouts."""
    sentences = []
    for members in same_steps(groups):
        rows = " and ".join(f"{folder_names(group, root)} ({group.layout_name})" for group in members)
        exact = members[0].layout("exact")
        if len({group.hashes_by_run for group in members}) == 1:
            sentences.append(f"{rows} took the same steps, to the same bits of the weights.")
        elif exact:
            sentences.append(
                f"{rows} should have the same bits, but do not: `lockstep parity` shows where they differ."
            )
        else:
            sentences.append(
                f"{rows} took the same steps up to rounding, which depends on layout and threads: "
                "exact=true removes this too."
            )
    return sentences


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of rows, which all have the same columns."""
    return markdown([*rows[0]], [[format_cell(column, value) for column, value in row.items()] for row in rows])


def format_cell(column: str, value: Any) -> str:
    score = column.startswith(("val ", "test ", "out-of-fold ")) or column.endswith("+-")
    form = ".4f" if score else FORMATS.get(column, "")
    return ABSENT if value is None else f"{value:{form}}"


def left_out_notes(groups: Sequence[Group], total: int) -> list[str]:
    """Return lines about the runs that the averages leave out, and why; `total` is the number of all runs."""
    left_out = total - sum(len(group.runs) for group in groups)
    lines = [f"left out: {plural(left_out, 'folder')} of runs that did not train"] if left_out else []
    for group in groups:
        for run in group.runs:
            if not run.completed:
                outcome = (run.summary.get("status", "did not finish"), run.summary.get("error"))
                lines.append(f"{run.folder.name} ({group.label}): {', '.join(filter(None, outcome))}")
    return lines


def folds_text(validations: Sequence[CrossValidation], metric: str) -> str:
    """Return the table of the cross-validations and what it means. It is empty if there are none."""
    if not validations:
        return ""
    lines = [f"\nCross-validation with {validations[0].folds} folds: scores of the weights at the end of training\n"]
    lines += [table([each.row(metric) for each in validations]), ""]
    lines += [f"val {metric}, val loss: means over the folds; +-: their standard deviations over the folds"]
    counts = {f"{sum(each.sizes):,}" for each in validations if each.sizes and not each.missing}
    for count in counts:
        lines += [f"out-of-fold: all {count} samples as one set, each predicted by the run that was not trained on it"]
    for each in validations:
        if each.missing:
            missing = f"{'folds' if len(each.missing) > 1 else 'fold'} {', '.join(map(str, each.missing))}"
            lines += [f"{each.name}: no completed run of {missing}, so there is no out-of-fold score"]
    return "\n".join(lines) + "\n"


def first_and_different(groups: Sequence[Group]) -> list[Group]:
    """Return the first group, and the groups whose steps differ from the first one's.

    Groups that took the same steps have the same results up to rounding, so there is no difference to test.
    """
    same = next((members for members in same_steps(groups) if groups[0] in members), [])
    return [group for group in groups if group is groups[0] or group not in same]


def noise_text(groups: Sequence[Group], differences: Sequence[tuple[Group, str, noise.Difference]]) -> str:
    """Return the table of the differences from the first row, and the rows that can't be compared with it.

    Return an empty string if fewer than two rows with different steps have a completed run.
    """
    compared = [group for group, _, _ in differences]
    others = [group for group in first_and_different(groups)[1:] if group.completed and group not in compared]
    folds = any(run.seed_and_fold[1] is not None for run in groups[0].runs)
    same, lines = "seed and fold" if folds else "seed", []
    if differences:
        lines += [f"\nIs a difference larger than the noise? Each row minus the first one, {groups[0].label}:\n"]
        lines += [
            table([noise_row(*each) for each in differences]),
            "",
            "yes: 0 is outside the 95% interval (Student's t)",
        ]
        share = "which share order, augmentation and, in the same network, initial weights"
        lines += [f"pairs: runs with the same {same}, {share}"]
        if folds:
            lines += ["folds share training samples, so the interval is wider than usual (Nadeau and Bengio, 2003)"]
    if others and groups[0].completed:
        rows = f"{plural(len(others), 'row')} {'have' if len(others) > 1 else 'has'}"
        lines += [
            f"{rows} fewer than two runs with the {same} of a run of the first row, which does not show whether a "
            "difference is larger than the noise: train several seeds (-m seed=0,1,2,3,4)"
        ]
    return "\n".join(lines) + "\n" * bool(lines)


def noise_row(group: Group, name: str, each: noise.Difference) -> dict[str, Any]:
    """Return a row of the table of differences, by column."""
    interval = f"{each.mean - each.margin:+.4f} to {each.mean + each.margin:+.4f}"
    row = {"": group.label, "score": name, "pairs": each.pairs, "difference": f"{each.mean:+.4f}"}
    return row | {"95% interval": interval, "more than noise": each.verdict}
