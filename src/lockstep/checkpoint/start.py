"""How a worker continues from a checkpoint: it reads it, once, and checks that it fits.

The run's folder gets the new config after the first step, because nothing is refused after that.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.checkpoint.fits import DATA, check_fits, check_record
from lockstep.checkpoint.io import CheckpointError, step_of
from lockstep.checkpoint.record import ResumableRun
from lockstep.checkpoint.resume import OVERRIDES, write_hydra_files
from lockstep.config.check import Config
from lockstep.config.instantiate import locate, parameters
from lockstep.config.value_checks import checker, show
from lockstep.data import Splits
from lockstep.data.splits import is_other_data, same_classes
from lockstep.errors import UserError
from lockstep.files import link_file, write
from lockstep.launch import slurm
from lockstep.launch.environment import Environment, environment
from lockstep.launch.process_group import broadcast_file, broadcast_from_rank_zero, gather_objects
from lockstep.text import join_names

LOG = logging.getLogger("lockstep")
# Options of a data set that do not change which samples it has.
CHANGEABLE = {"name", "augment", "transforms", "mix", "mix_alpha", "sampling"}
check_resumable = checker(ResumableRun)
NEW_RUN = "init_from= begins a new run with its weights"


def load_start(
    folder: Path,
    resume: str | None,
    hydra_files: Mapping[str, str],
    ranks: Sequence[int],
    here: Environment | None = None,
    whole: bool = True,
) -> tuple[str | None, dict[str, Any]]:
    """Return the path and the content of rank zero's checkpoint from which a run continues. All workers must call it.

    It is the last checkpoint, or the one that the user has named. If the last one is damaged and the user has not named
    it, it is the best one.

    Args:
        resume: the checkpoint that the user has named; at least one machine has it in the run's folder.
        hydra_files: the texts of the files in `.hydra/`, by file name.
        ranks: the ranks that write in the folder, from `ranks_writing_in`.
        here: this rank's place in the run; None: that of this process.
        whole: as in `checkpoint.io.load`.

    Returns:
        The path and the content; None and an empty dict for a new run.

    Raises:
        CheckpointError: the checkpoint can't be used.
    """
    here = here or environment()
    path, best = checkpoint_to_load(folder, resume, hydra_files, here), paths.best(folder)
    if here.rank == 0 and path.parent.is_dir():
        checkpoint_io.remove_unused_parts(path.parent)
    share_newest(path, ranks)
    named = resume is not None and not here.restarts
    exists, has_best, named = broadcast_from_rank_zero((path.exists(), best.exists(), named))
    if not exists and not named:
        return None, {}
    try:
        return str(path), _load(path, whole)
    except CheckpointError as error:
        if named or not has_best:
            raise
        LOG.warning("%s; continuing from the older %s", error, best.name)
        return str(best), _load(best, whole)


def _load(path: Path, whole: bool) -> dict[str, Any]:
    """Read rank zero's checkpoint, which a run with a config must have saved. All workers must call it."""
    content = checkpoint_io.load(path, broadcast=True, whole=whole)
    check_record(str(path), content, NEW_RUN, check_resumable)
    return content


def checkpoint_to_load(
    folder: Path, resume: str | None, hydra_files: Mapping[str, str], here: Environment | None = None
) -> Path:
    """Return the path of the checkpoint from which a run continues. It may not exist. All workers must call it."""
    here = here or environment()
    last = paths.last(folder)
    if resume is None or Path(resume).name == last.name:
        return last
    # A restarted command has already gone back to `resume` once. It continues from the checkpoints that it saved since.
    restarted = bool(here.restarts) or slurm.restarted(here)
    recorded = folder / ".hydra" / OVERRIDES
    went_back = restarted and recorded.exists() and recorded.read_text() == hydra_files.get(OVERRIDES)
    return last if any(gather_objects(went_back)) else last.with_name(Path(resume).name)


def share_newest(start: Path, ranks: Sequence[int]) -> None:
    """Send the newest checkpoints to the machines that lack them. All ranks must call it.

    The files are the newest version of the checkpoint from which a run continues, and the best checkpoint beside it.

    Args:
        start: the path of the checkpoint in this machine's folder of the run.
        ranks: the ranks that write in the folder, from `ranks_writing_in`.
    """
    if len(ranks) == 1:
        return
    writes = dist.get_rank() in ranks
    steps = gather_objects(step_of(start) if writes else -1)
    newest = max(ranks, key=lambda rank: (steps[rank], -rank))
    lacking = [rank for rank in ranks if steps[rank] != steps[newest]]
    if not lacking:
        return
    for path in (paths.best(paths.run_of(start)), start):
        content = broadcast_file(path if dist.get_rank() == newest and path.exists() else None, newest)
        if dist.get_rank() not in lacking:
            continue
        if content is None:
            path.unlink(missing_ok=True)
        else:
            write(path, content)


# --- whether the checkpoint fits, and what has changed ---


def check_checkpoint_fits(
    path: str,
    checkpoint: Mapping[str, Any],
    weights: Mapping[str, Any] | None,
    config: Config,
    splits: Splits,
    now: Mapping[str, Any],
    steps: int,
) -> None:
    """Check that a run can continue from a checkpoint.

    Args:
        weights: see `compared_weights`.
        now: the entry `lockstep` of this run's checkpoints.
        steps: optimizer steps of the whole run.

    Raises:
        UserError: the checkpoint has other data, another network, optimizer, grouping of parameters or batch size, or
            more steps; or, with a window, other pieces.
    """
    recorded = checkpoint["lockstep"]
    before = recorded["config"]
    _check_same_data(path, recorded, config, splits)
    optimizer = config.record["optimizer"].get("_target_")  # None: the module's own, which its class decides
    for group, target, has in (
        ("model", config.model["_target_"], "was saved by"),
        ("optimizer", optimizer, "holds the state of"),
    ):
        if target and target != (saved := before[group]["_target_"]):
            raise UserError(f"{group}._target_={target}, but {path} {has} {saved}: give the same class; {NEW_RUN}")
    groups = (each.get("lr_scale") for each in (before["optimizer"], config.optimizer))
    saved_patterns, patterns = (list(each) if isinstance(each, Mapping) else [] for each in groups)
    if optimizer and saved_patterns != patterns:
        raise UserError(
            f"optimizer.lr_scale groups parameters by {join_names(patterns) or 'no pattern'}, but {path} groups them "
            f"by {join_names(saved_patterns) or 'no pattern'}: keep the patterns; only their factors may change"
        )
    must_stay = {"batch_size": "", "samples": ""}
    if splits.window is not None:  # each piece is at a place of its own stream
        why = f"with data.window={splits.window} each piece reads its own part of the shards, and "
        must_stay |= dict.fromkeys(("pieces", *DATA), why)
    limit = f"max_steps={steps}" if steps == config.max_steps else f"max_epochs={config.max_epochs}"
    check_fits(path, checkpoint, now["trainer"], weights, {limit: steps}, must_stay, NEW_RUN)


def _check_same_data(path: str, recorded: Mapping[str, Any], config: Config, splits: Splits) -> None:
    """Check that the data set is the one that a checkpoint was trained on.

    A checkpoint's position and schedule are counted in steps of its training set. The folder of the data may change,
    and so may augmentation, transforms, mixing and sampling.

    Args:
        recorded: the checkpoint's entry `lockstep`.

    Raises:
        UserError: the function that opens the data or the classes differ, or both the options and the content do.
    """
    before = recorded["config"]["data"]
    if before["_target_"] != config.data["_target_"]:
        names = [group.get("name") or group["_target_"] for group in (config.data, before)]
        raise UserError(f"data={names[0]}, but {path} was trained on data={names[1]}: give the same data; {NEW_RUN}")
    classes, now_classes = recorded["spec"]["classes"], splits.spec.classes
    differ = not same_classes(classes, now_classes)
    if differ and sorted(classes) == sorted(now_classes):
        remedy = NEW_RUN
        if "known_classes" in parameters(locate("data._target_", config.data["_target_"])):
            remedy = f"'+data.known_classes=[{','.join(classes)}]' keeps it; {NEW_RUN}"
        order = f"{join_names(classes, 5)}, and not {join_names(now_classes, 5)}"
        raise UserError(f"data: {path} was trained with the classes in another order, {order}: {remedy}")
    options = (set(before) | set(config.data)) - CHANGEABLE
    changed = sorted(name for name in options if before.get(name) != config.data.get(name))
    if changed and recorded["trainer"]["fingerprint"] != splits.fingerprint:
        name = changed[0]
        now_shown, shown = show(config.data.get(name)), show(before.get(name))
        raise UserError(
            f"data.{name}={now_shown}, but {path} was trained with {shown}: give data.{name}={shown}; {NEW_RUN}"
        )
    if differ:
        raise UserError(f"data: {path} was trained on other classes: give the same data; {NEW_RUN}")


def resume_messages(config: Config, splits: Splits, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return lines for the log about a resumed run: its step, and what has changed since the checkpoint."""
    if not checkpoint:
        return []
    recorded, messages = checkpoint["lockstep"], [f"resumes after step {checkpoint['global_step']}"]
    before = {**recorded["config"], "precision": recorded["trainer"]["precision"]}
    now = {**config.record, "precision": config.precision, "resume": before.get("resume")}
    changed = differences(before, now)
    if changed:
        messages.append("changed since the checkpoint: " + ", ".join(changed))
    if is_other_data(recorded["trainer"], splits):
        messages.append("the content of the data set has changed since the checkpoint")
    return messages


def differences(before: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> list[str]:
    """Return the changes between two plain configs, as lines `key: old -> new`.

    If another file of a group was chosen, only its name and the keys that both files have are compared.
    """
    changes = []
    replaced = before.get("name") != now.get("name")
    for key in sorted(set(before) & set(now) if above and replaced else set(before) | set(now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += differences(old, new, f"{above}{key}.")
        elif old != new:
            changes.append(f"{above}{key}: {old} -> {new}")
    return changes


# --- the run's folder ---


class TakeOverFolder(Callback):
    """Takes over the folder of a resumed run: writes `.hydra/`, and makes the checkpoint that was read its last one.

    This happens after the first step, or at the end of a run without a step. Until then the folder keeps the earlier
    run's files.

    Args:
        hydra_files: the texts of the files in `.hydra/`, by file name.
        writes: whether this rank writes in the folder.
    """

    def __init__(self, folder: Path, hydra_files: Mapping[str, str], start: str | None, writes: bool) -> None:
        self._folder, self._hydra_files = folder, hydra_files
        self._checkpoint, self._due = start, writes

    def _take_over(self, *args: Any, **kwargs: Any) -> None:
        if not self._due:
            return
        self._due = False
        write_hydra_files(self._folder, self._hydra_files)
        if self._checkpoint and Path(self._checkpoint).exists():
            link_file(self._checkpoint, paths.last(self._folder))

    # After a step, since Lightning calls callbacks that save later; without one, before a checkpoint or at the end.
    on_train_batch_end = on_save_checkpoint = on_fit_end = _take_over
