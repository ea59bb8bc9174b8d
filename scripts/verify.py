"""Compute parts of a run again, on any layout, and compare the bits:

    python scripts/verify.py run=outputs/<name>/<timestamp> steps=3
    python scripts/verify.py run=outputs/<name>/<timestamp> steps=[50,150] strategy=ddp devices=2

The run must have been made with `extras=[ledger]`. To start elsewhere than at its beginning, it must have kept its
checkpoints (`checkpoint_keep=-1`, for example).
The program first checks the ledger: each line must follow from the one before, and the samples of all steps must be
those of the seed. Then, for each chosen step, it trains from the last checkpoint before it up to that step, in a folder
that is deleted afterwards. Weights and optimizer must have the bits that the ledger records. docs/extras/ledger.md
explains what this proves and what it does not.

Exit codes: 0 all the same, 1 something differs, 2 bad input (no ledger, nothing to start from).
"""

import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from pydantic import Field
from recomputing import Part, first_difference, part_of_run, recompute

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.io import CheckpointError
from lockstep.checkpoint.paths import step_checkpoints
from lockstep.checkpoint.start import differences
from lockstep.config.value_checks import PositiveInt, as_text, checker, show
from lockstep.errors import UserError
from lockstep.extras.ledger.ledger_file import (
    LEDGER_FILE,
    config_sha256,
    hashes,
    line_sha256,
    parse_line,
    read,
    samples_sha256,
)
from lockstep.launch.environment import external_workers
from lockstep.run import cli
from lockstep.run.provenance import code_sha256, git_info, versions
from lockstep.text import join_names

Line = dict[str, Any]
HASHES = {"weights_sha256": "weights", "optimizer_sha256": "optimizer"}
MOST_STEPS = 10_000_000  # between two lines; more would take minutes to hash

check_steps = checker(PositiveInt | Annotated[list[PositiveInt], Field(min_length=1)])
check_seed = checker(Annotated[int, Field(strict=True, ge=0)])


class Different(Exception):
    """Something differs from the ledger.

    Attributes:
        step: the optimizer step.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


def verify(raw: dict[str, Any], folder: Path) -> None:
    """Check the ledger, compute the chosen steps again, and print what is proven.

    Raises:
        Different: the first step that differs from the ledger.
        UserError: there is no ledger, or nothing to start from.
    """
    try:
        verify_in(raw, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the folder is not empty
            folder.parent.rmdir()


def verify_in(raw: dict[str, Any], folder: Path) -> None:
    """Do what `verify` promises. The caller deletes `folder` afterwards."""
    torch.set_num_threads(1)  # this process forks, and a child lacks the threads that torch has started
    wanted, seed = check_steps("steps", raw.pop("steps")), check_seed("seed", raw.pop("seed"))
    if raw["num_nodes"] != 1 or external_workers():
        raise UserError("verify.py runs on one machine: use num_nodes=1, without torchrun")
    run = Path(str(as_text(raw.pop("run")))).expanduser()
    path = run / LEDGER_FILE
    if not path.is_file():
        raise UserError(f"run={run} has no {LEDGER_FILE}: start a run with extras=[ledger]")
    lines = chained(path)
    parts = parts_of(lines, raw, path)
    for line, part in zip(lines[1:], parts[1:], strict=True):
        since, step = line["since"], line["step"]
        if step - since > MOST_STEPS or line.get("samples_sha256") != samples_sha256(part.order, since, step):
            raise Different(f"step {step}: the samples of steps {since + 1} to {step} are not those of the seed")
    starts = checkpoints(run, lines)
    steps = choose(wanted, seed, lines, starts, run)
    spans = [(max(start for start in starts if start < step), step) for step in steps]
    wrong: dict[int, str] = {}
    for start, step in spans:
        differing = compare(lines, parts, start, starts, step, folder / "again")
        shutil.rmtree(folder / "again", ignore_errors=True)
        print(f"steps {start} to {step}: {next(iter(differing.values()), 'the same bits')}", flush=True)
        wrong |= differing
    for note in differences_here(parts[-1].about):
        print(f"note: {note}")
    if wrong:
        first = min(wrong)
        raise Different(f"{run}: step {first} differs from its ledger: {wrong[first]}")
    conclude(lines, parts, spans)


# --- the ledger -------------------------------------------------------------------------------------------------------


def chained(path: Path) -> list[Line]:
    """Return the lines of a ledger after checking that each follows from the one before.

    Raises:
        Different: a line does not follow.
        UserError: there is no line of a step.
    """
    texts = read(path)
    if path.stat().st_size > sum(len(text) + 1 for text in texts):
        print(f"note: {path}: its last line is incomplete and is ignored")
    lines: list[Line] = []
    for number, text in enumerate(texts, 1):
        line, before = parse_line(text), lines[-1] if lines else None
        if not line:
            raise Different(f"{path}: line {number} is not a line of a ledger: it was changed")
        if line.get("before") != (line_sha256(texts[number - 2]) if before else None):
            step = (before or line)["step"]
            raise Different(
                f"{path}: the chain breaks at step {step}: line {max(number - 1, 1)} or the one after it was changed"
            )
        if before and (line["since"] != before["step"] or line["step"] < before["step"]):
            raise Different(f"{path}: step {line['step']} does not follow step {before['step']}")
        lines.append({**line, "text": text})
    if len(lines) < 2:
        raise UserError(f"{path} has no step yet: a line is written with each checkpoint (checkpoint_every)")
    return lines


def parts_of(lines: Sequence[Line], raw: Mapping[str, Any], path: Path) -> list[Part]:
    """Return, for each line, the part of the run from the line before it to this line.

    Raises:
        Different: the config does not have the recorded hash, or the data differ on this machine.
    """
    parts: list[Part] = []
    for line in lines:
        if "about" in line:
            part = part_of_run(line["about"], raw, path)
            if part.about.get("data") != part.splits.fingerprint:
                data = shown(part.about.get("data"))[:12]
                raise Different(
                    f"{path}: other data: their fingerprint is {part.splits.fingerprint[:12]} in "
                    f"{part.config.data_dir}, and {data} in the ledger from step {line['since']} on"
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


def changes(before: Part, now: Part) -> str:
    """Return what differs between two parts of a run, in words."""
    parts = []
    for name in sorted({*before.about, *now.about} - {"data_dir"}):
        one, other = before.about.get(name), now.about.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            parts += differences(one, other)
        elif one != other:
            parts.append(f"another {name}")
    return shown(join_names(parts))


def differences_here(about: Mapping[str, Any]) -> list[str]:
    """Return notes on versions and code that differ from the run's. The bits may still be the same."""
    recorded, here = about.get("versions"), versions()
    packages = recorded.items() if isinstance(recorded, dict) else ()
    odd = [f"{name} {old} in the run, {here.get(name)} here" for name, old in packages if here.get(name) != old]
    if about.get("code_sha256") != code_sha256():
        sides = {"in the run": about, "here": git_info()}.items()
        commits = (
            f"commit {str(git.get('commit'))[:12]}{' and changes' * bool(git.get('dirty'))} {at}" for at, git in sides
        )
        odd.append(f"src/ is not the same code: {', '.join(commits)}")
    return [shown(each) for each in odd]


def shown(value: Any) -> str:
    """Return text from an untrusted file in a form that is safe for a terminal."""
    return "".join(char if char.isprintable() else "?" for char in str(value)[:300])


# --- the steps --------------------------------------------------------------------------------------------------------


def checkpoints(run: Path, lines: Sequence[Line]) -> dict[int, Path | None]:
    """Return the points that training can start from, by step.

    These are the kept checkpoints of the ledger's steps, and None for the seed at step 0.
    """
    folder, steps = run / "checkpoints", {line["step"] for line in lines}
    saved = step_checkpoints(folder) if folder.is_dir() else {}
    starts: dict[int, Path | None] = {step: path for step, path in saved.items() if step in steps}
    return starts | ({0: None} if lines[0]["step"] == 0 else {})


def choose(
    wanted: int | list[int], seed: int, lines: Sequence[Line], starts: Mapping[int, Any], run: Path
) -> list[int]:
    """Return the steps to compute: those that are named, or a random choice.

    The choice is among steps whose previous line has a checkpoint to start from.

    Raises:
        UserError: a step is not in the ledger, or there is nothing to start from.
    """
    computed = {line["step"]: line["since"] for line in lines[1:] if line["step"] > line["since"]}
    if isinstance(wanted, int):
        within = sorted(step for step, since in computed.items() if since in starts)
        chosen = sorted(random.Random(seed).sample(within, min(wanted, len(within))))
    else:
        chosen = sorted(set(wanted))
    for step in chosen:
        if step not in computed:
            near = sorted(sorted(computed, key=lambda other: abs(other - step))[:3])
            raise UserError(
                f"steps={show(wanted)}: the ledger has no line at {step}: the nearest are {join_names(near)}"
            )
    if not chosen or not all(any(start < step for start in starts) for step in chosen):
        raise UserError(f"run={run} has no checkpoint to start from: train with checkpoint_keep=-1 (all) or a number")
    return chosen


def compare(
    lines: Sequence[Line], parts: Sequence[Part], start: int, starts: Mapping[int, Path | None], step: int, folder: Path
) -> dict[int, str]:
    """Compute from one recorded step to another and compare at each recorded step in between.

    Returns:
        the first difference, by step; empty if all bits are the same.

    Raises:
        UserError: the config of the run changed in between.
    """
    first = max(number for number, line in enumerate(lines) if line["step"] == start)
    within = [line for line in lines[first + 1 :] if line["step"] <= step]
    if len({line["config_sha256"] for line in within}) > 1:
        raise UserError(
            f"steps=[{step}]: training would start at step {start}, and the run's config changed in between: "
            "name another step"
        )
    try:
        check_checkpoint(starts[start], lines[first])
        computed = recompute(parts[first + len(within)], starts[start], [line["step"] for line in within], folder)
        for line in within:
            saved, again = check_checkpoint(starts.get(line["step"]), line), computed.get(line["step"], {})
            if odd := [word for key, word in HASHES.items() if again.get(key) != line.get(key)]:
                mine = checkpoint_io.load(folder / "checkpoints" / "last.ckpt")
                detail = first_difference(mine, saved) if saved and mine["global_step"] == line["step"] else ""
                return {line["step"]: f"other {' and '.join(odd)}{'; first difference: ' * bool(detail)}{detail}"}
    except Different as wrong:
        return {wrong.step: str(wrong)}
    return {}


def check_checkpoint(path: Path | None, line: Line) -> dict[str, Any]:
    """Return the kept checkpoint of a ledger's line, or an empty dict if there is none.

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
    odd = [word for key, word in HASHES.items() if key in line and digests[key] != line[key]]
    if checkpoint.get("global_step") != line["step"]:
        odd.append("step")
    if odd:
        raise Different(f"{path.name} does not match the ledger: other {' and '.join(odd)}", line["step"])
    return checkpoint


def conclude(lines: Sequence[Line], parts: Sequence[Part], spans: Sequence[tuple[int, int]]) -> None:
    """Print what is proven and what is not."""
    layout, last = parts[-1].config.layout, lines[-1]["step"]
    where = f"{layout.strategy} on {layout.num_devices} devices" if layout.num_devices > 1 else "one device"
    again = len({step for start, end in spans for step in range(start, end)})
    named = join_names((f"{start} to {end}" for start, end in spans), 8)
    print(
        f"proven: steps {named} ({again} of {last}), computed again ({layout.accelerator}, {where}), have the recorded "
        f"bits of weights and optimizer; all {last} steps have the seed's samples; {len(lines)} lines are one chain, "
        f"whose last hash is {line_sha256(lines[-1]['text'])}"
    )
    left = f"the other {last - again} steps; " if again < last else ""
    print(f"not proven: {left}other hardware; that this run was not chosen from several")


if __name__ == "__main__":
    cli.command(verify, "verify")
