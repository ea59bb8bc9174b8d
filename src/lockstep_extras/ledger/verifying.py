"""Check a ledger, compute steps of its run again, and compare the bits: the work of `lockstep verify`.

A ledger has hashes of weights and of the optimizer's state, so its comparison is of bits alone: what `lockstep same`
records of a step (gradients, distances, rounding) has no counterpart in a ledger. `lockstep same` judges two
folders by it.
"""

import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.io import CheckpointError
from lockstep.checkpoint.paths import step_checkpoints
from lockstep.checkpoint.start import differences
from lockstep.config.value_checks import PositiveInt, as_text, checker, show
from lockstep.data.datasets import changed, differ
from lockstep.errors import UserError
from lockstep.job.optimizers import as_built
from lockstep.programs.common.training import check_one_machine
from lockstep.report.provenance import code_sha256, git_info, versions
from lockstep.text import join_names
from lockstep_extras.ledger.ledger_file import (
    LEDGER_FILE,
    config_sha256,
    hashes,
    line_sha256,
    parse_line,
    read,
    samples_sha256,
)
from lockstep_extras.ledger.recomputing import Part, first_difference, part_of_run, recompute

# Each line of a ledger belongs to a checkpoint and covers the steps `since` + 1 to `step`. A line has `about` if a part
# of the run begins there (see `parts_of_lines`). `read_chain` adds `text`, the line as it is in the file.
Line = dict[str, Any]
HASHES = {"weights_sha256": "weights", "optimizer_sha256": "optimizer"}  # keys of a ledger's line -> words for messages
MAX_STEPS_PER_LINE = 10_000_000  # the samples of more steps would take minutes to hash

check_steps = checker(PositiveInt | Annotated[list[PositiveInt], Field(min_length=1)])
check_seed = checker(Annotated[int, Field(strict=True, ge=0)])


class Different(Exception):
    """The ledger was changed, or the run differs from it.

    Attributes:
        step: the step that differs; 0 if the ledger itself was changed.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


def verify(raw: dict[str, Any], folder: Path) -> None:
    """Check the ledger, compute the chosen steps again, and print what is proven.

    Args:
        raw: the composed config of this command.
        folder: a folder for the training; it is deleted afterwards.

    Raises:
        Different: the ledger was changed, or a step differs from it. The message names the first such step.
        UserError: there is no ledger, or neither a checkpoint nor the seed to start from.
    """
    try:
        verify_in(raw, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the parent stays if it has other runs in it
            folder.parent.rmdir()


def verify_in(raw: dict[str, Any], folder: Path) -> None:
    """Do the work of `verify`, and leave `folder` for the caller to delete."""
    torch.set_num_threads(1)  # this process forks, and a forked child does not have torch's threads
    count_or_steps, choice_seed = check_steps("steps", raw.pop("steps")), check_seed("seed", raw.pop("seed"))
    check_one_machine("lockstep verify", raw)
    run = Path(str(as_text(raw.pop("run")))).expanduser()
    path = run / LEDGER_FILE
    lines = read_chain(path)
    parts = parts_of_lines(lines, raw, path)
    for line, part in zip(lines[1:], parts[1:], strict=True):
        since, step = line["since"], line["step"]
        if step - since > MAX_STEPS_PER_LINE:
            raise UserError(
                f"{path}: its line of step {step} is for {step - since:,} steps: samples are compared for at most "
                f"{MAX_STEPS_PER_LINE:,} steps in a line"
            )
        if line.get("samples_sha256") != samples_sha256(part.order, since, step):
            raise Different(f"step {step}: the samples of steps {since + 1} to {step} are not those of the seed")
    starts = start_points(run, lines)
    steps = choose_steps(count_or_steps, choice_seed, lines, starts, run)
    spans = [(max(start for start in starts if start < step), step) for step in steps]
    different_steps: list[Different] = []
    for start, step in spans:
        result = "the same bits"
        try:
            compare(lines, parts, start, starts, step, folder / "recomputed")
        except Different as different:
            result = str(different)
            different_steps.append(different)
        shutil.rmtree(folder / "recomputed", ignore_errors=True)
        print(f"steps {start + 1} to {step}: {result}", flush=True)
    for note in notes_on_versions(parts[-1].about):
        print(f"note: {note}")
    if different_steps:
        first = min(different_steps, key=lambda different: different.step)
        for part in parts:
            if as_built(part.about["config"], part.config) != part.about["config"]:
                raise UserError(
                    f"{run} can't be verified: an older version recorded it, and not which lr the module got; with the "
                    f"default of the module, step {first.step} has {first}: train again"
                )
        raise Different(f"{run}: step {first.step} differs from its ledger: {first}")
    conclude(lines, parts, spans)


# --- the ledger -------------------------------------------------------------------------------------------------------


def read_chain(path: Path) -> list[Line]:
    """Return the lines of a ledger. Check that each line has the hash of the line before, and begins at its step.

    Raises:
        Different: a line was changed.
        UserError: the ledger has only its first line, which records no step.
    """
    texts = read(path)
    if path.stat().st_size > sum(len(text) + 1 for text in texts):
        print(f"note: {path}: its last line is incomplete and is ignored")
    lines: list[Line] = []
    for number, text in enumerate(texts, 1):
        line, previous = parse_line(text), lines[-1] if lines else None
        if not line:
            raise Different(f"{path}: line {number} is not a line of a ledger: it was changed")
        if line.get("before") != (line_sha256(texts[number - 2]) if previous else None):  # `number` starts at 1
            step = (previous or line)["step"]
            raise Different(
                f"{path}: the chain breaks at step {step}: line {max(number - 1, 1)} or the one after it was changed"
            )
        if previous and (line["since"] != previous["step"] or line["step"] < previous["step"]):
            raise Different(f"{path}: step {line['step']} does not follow step {previous['step']}")
        lines.append({**line, "text": text})
    if len(lines) < 2:
        raise UserError(f"{path} has no step yet: a line is written with each checkpoint (checkpoint_every)")
    return lines


def parts_of_lines(lines: Sequence[Line], raw: Mapping[str, Any], path: Path) -> list[Part]:
    """Return, for each line, the part of the run that its steps belong to.

    A new part begins where the config, the data, the code or the versions change. The first line of a part has `about`.

    Raises:
        Different: the config does not have the recorded hash, or the data differ on this machine.
    """
    parts: list[Part] = []
    for line in lines:
        if "about" in line:
            part = part_of_run(line["about"], raw, path)
            if part.about.get("data") != part.splits.fingerprint:
                data = printable(part.about.get("data"))[:12]
                raise Different(
                    f"{path}: other data: their fingerprint is {part.splits.fingerprint[:12]} in "
                    f"{part.config.data_dir}, and {data} in the ledger from step {line['since']} on"
                )
            if differ(part.about.get("content"), part.splits.content):
                content = printable(part.about.get("content"))[:12]
                raise Different(
                    f"{path}: other data: the SHA-256 of their shards is {str(part.splits.content)[:12]} in "
                    f"{part.config.data_dir}, and {content} in the ledger from step {line['since']} on"
                )
            if parts:
                print(f"note: after step {line['since']} the run changed: {changes(parts[-1], part)}")
        elif not parts:
            raise Different(f"{path}: its first line does not describe the run: it was changed")
        else:
            part = parts[-1]
        if line.get("config_sha256") != config_sha256(part.about["config"]):
            raise Different(f"{path}: step {line['step']} has the hash of another config")
        parts.append(part)
    return parts


def changes(old_part: Part, new_part: Part) -> str:
    """Return what differs between two parts of a run, in words."""
    texts = []
    for name in changed(old_part.about, new_part.about):
        old, new = old_part.about.get(name), new_part.about.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            texts += differences(old, new)
        elif name != "data_dir":
            texts.append(f"another {name}")
    return printable(join_names(texts))


def notes_on_versions(about: Mapping[str, Any]) -> list[str]:
    """Return notes on the versions and the code here that differ from the run's. The bits may still be the same."""
    recorded, installed = about.get("versions"), versions()
    packages = recorded.items() if isinstance(recorded, dict) else ()
    notes = [
        f"{name} {version} in the run, {installed.get(name)} here"
        for name, version in packages
        if installed.get(name) != version
    ]
    if about.get("code_sha256") != code_sha256():
        commits = (
            f"commit {str(git.get('commit'))[:12]}{' with uncommitted changes' * bool(git.get('dirty'))} ({where})"
            for where, git in (("in the run", about), ("here", git_info()))
        )
        notes.append(f"src/ is not the same code: {', '.join(commits)}")
    return [printable(note) for note in notes]


def printable(value: Any) -> str:
    """Return text from an untrusted file in a form that is safe for a terminal."""
    return "".join(char if char.isprintable() else "?" for char in str(value)[:300])


# --- the steps --------------------------------------------------------------------------------------------------------


def start_points(run: Path, lines: Sequence[Line]) -> dict[int, Path | None]:
    """Return what training can start from, by the number of steps done: a kept checkpoint, or None for the seed.

    The checkpoints are those of steps in the ledger. Training from the seed starts at step 0. It is left out if the
    ledger begins at a later step.
    """
    folder, steps = run / "checkpoints", {line["step"] for line in lines}
    saved = step_checkpoints(folder) if folder.is_dir() else {}
    starts: dict[int, Path | None] = {step: path for step, path in saved.items() if step in steps}
    return starts | ({0: None} if lines[0]["step"] == 0 else {})


def choose_steps(
    count_or_steps: int | list[int], choice_seed: int, lines: Sequence[Line], starts: Mapping[int, Any], run: Path
) -> list[int]:
    """Return the steps to compute again.

    Args:
        count_or_steps: a list of steps; or the number of steps to choose at random, among those for which training can
            start at the step of the line before.
        choice_seed: the seed of this random choice.
        starts: what training can start from (`start_points`).

    Raises:
        UserError: a step is not in the ledger, or training can't start before it.
    """
    recorded = {line["step"]: line["since"] for line in lines[1:] if line["step"] > line["since"]}
    if isinstance(count_or_steps, int):
        candidates = sorted(step for step, since in recorded.items() if since in starts)
        chosen = sorted(random.Random(choice_seed).sample(candidates, min(count_or_steps, len(candidates))))
    else:
        chosen = sorted(set(count_or_steps))
    for step in chosen:
        if step not in recorded:
            nearest = sorted(sorted(recorded, key=lambda other: abs(other - step))[:3])
            raise UserError(
                f"steps={show(count_or_steps)}: the ledger has no line at {step}: the nearest are {join_names(nearest)}"
            )
    if not chosen or not all(any(start < step for start in starts) for step in chosen):
        raise UserError(f"run={run} has no checkpoint to start from: train with checkpoint_keep=-1 (all) or a number")
    return chosen


def compare(
    lines: Sequence[Line], parts: Sequence[Part], start: int, starts: Mapping[int, Path | None], step: int, folder: Path
) -> None:
    """Train in `folder` from step `start` to `step`, and compare with each line of the ledger between them.

    Raises:
        Different: a step differs. The message says what, for the first such step.
        UserError: the config of the run changed between the two steps.
    """
    # A step has two lines if the run was resumed there with another config and saved again. The later line counts.
    start_index = max(number for number, line in enumerate(lines) if line["step"] == start)
    later_lines = [line for line in lines[start_index + 1 :] if line["step"] <= step]
    if len({line["config_sha256"] for line in later_lines}) > 1:
        raise UserError(
            f"steps=[{step}]: training would start at step {start}, and the run's config changed between the two: "
            "name another step"
        )
    check_checkpoint(starts[start], lines[start_index])
    part, steps = parts[start_index + len(later_lines)], [line["step"] for line in later_lines]
    computed_lines = recompute(part, starts[start], steps, folder)
    for line in later_lines:
        saved, computed = check_checkpoint(starts.get(line["step"]), line), computed_lines.get(line["step"], {})
        if differing := [word for key, word in HASHES.items() if computed.get(key) != line.get(key)]:
            last = checkpoint_io.load(folder / "checkpoints" / "last.ckpt")
            detail = first_difference(last, saved) if saved and last["global_step"] == line["step"] else ""
            text = f"other {' and '.join(differing)}{'; first difference: ' * bool(detail)}{detail}"
            raise Different(text, line["step"])


def check_checkpoint(path: Path | None, line: Line) -> dict[str, Any]:
    """Load the kept checkpoint of a ledger's line, and check its hashes. Return it; empty if `path` is None.

    Raises:
        Different: the checkpoint does not match the line.
    """
    if path is None:
        return {}
    try:
        checkpoint = checkpoint_io.load(path)
    except CheckpointError as error:
        raise Different(str(error), line["step"]) from error
    digests = hashes(checkpoint)
    differing = [word for key, word in HASHES.items() if key in line and digests[key] != line[key]]
    if checkpoint.get("global_step") != line["step"]:
        differing.append("step")
    if differing:
        raise Different(f"{path.name} does not match the ledger: other {' and '.join(differing)}", line["step"])
    return checkpoint


def conclude(lines: Sequence[Line], parts: Sequence[Part], spans: Sequence[tuple[int, int]]) -> None:
    """Print what is proven and what is not."""
    layout, total = parts[-1].config.layout, lines[-1]["step"]
    devices = f"{layout.strategy} on {layout.num_devices} devices" if layout.num_devices > 1 else "one device"
    count = len({step for start, end in spans for step in range(start + 1, end + 1)})
    ranges = join_names((f"{start + 1} to {end}" for start, end in spans), 8)
    print(
        f"proven: steps {ranges} ({count} of {total}), computed again ({layout.accelerator}, {devices}), have the "
        f"recorded bits of weights and optimizer; all {total} steps have the seed's samples; {len(lines)} lines are "
        f"one chain, whose last hash is {line_sha256(lines[-1]['text'])}"
    )
    other_steps = f"the other {total - count} steps; " if count < total else ""
    print(
        f"not proven: {other_steps}results on other hardware; that this is the only run (it may be the best of several)"
    )
