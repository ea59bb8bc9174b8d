"""Test a checkpoint on any layout, as a run with its own folder."""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset

from lockstep.callbacks import DummyBatchOnEmptyRank
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths, resume
from lockstep.checkpoint.io import CheckpointError
from lockstep.config import value_checks
from lockstep.config.check import Config, check
from lockstep.config.instantiate import check_targets_named
from lockstep.config.schema import OptionalGroup, SpecRecord
from lockstep.config.value_checks import checker, show
from lockstep.data import Spec, Splits
from lockstep.data.build import for_evaluation
from lockstep.errors import UserError
from lockstep.launch.rank_zero_decisions import decide_on_rank_zero
from lockstep.run.build import make_callbacks, make_data, make_module, make_trainer
from lockstep.run.summary import RunRecord
from lockstep.run.worker_setup import set_up_worker
from lockstep.text import join_names

FIXED_KEYS = ("model", "seed", "optimizer", "scheduler", "lr")  # keys whose values the checkpoint fixes
SPLITS = ("train", "val", "test")
SAVED_GROUPS = ("model", "data", "optimizer", "scheduler")  # config groups that come from the checkpoint
SAVED_KEYS = ("seed", "lr", "data_dir")  # single keys that come from the checkpoint

LOG = logging.getLogger("lockstep")
check_group, check_spec = checker(OptionalGroup), checker(SpecRecord)


def find_checkpoint(raw: Mapping[str, Any]) -> Path:
    """Return the file that `checkpoint=` names.

    The value is a file; a run folder, which stands for its best checkpoint, or its last one if it has no best one; or
    `last`, which stands for the newest run in `outputs`.

    Raises:
        CheckpointError: The folder has no checkpoint.
        UserError: The value is none of these, or no run has a checkpoint.
    """
    path = value_checks.as_text(raw["checkpoint"])  # a file may have the name 5
    if not isinstance(path, str) or not path:
        raise UserError(f"checkpoint={show(path)}: must be a .ckpt file, a run folder, or last")
    if path == "last":
        outputs = Path(value_checks.folder("outputs", raw["outputs"]))
        path = str(resume.newest_run_folder("checkpoint", outputs))
    location = Path(path).expanduser()
    if not location.is_dir():
        return location
    if inside := paths.best_in(location):
        return inside
    raise CheckpointError(f"{path}: this folder has no checkpoint: it must hold checkpoints/best.ckpt or last.ckpt")


def find_checkpoint_and_record(raw: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint that `checkpoint=` names, and what Lockstep has recorded in it: config, spec, fingerprint.

    Rank zero reads the file and sends the record to the other ranks, so other machines need no copy of the file.

    Raises:
        CheckpointError: The file can't be read, or Lockstep did not write it; or see `find_checkpoint`.
        UserError: see `find_checkpoint`.
    """

    def read_record() -> list[Any]:
        path = find_checkpoint(raw)
        whole = checkpoint_io.load(path).get("lockstep")
        if not isinstance(whole, dict) or not {"config", "spec"} <= whole.keys():
            raise CheckpointError(f"{path}: the file does not name its model: use a checkpoint that Lockstep wrote")
        record = {"config": whole["config"], "spec": whole["spec"], "fingerprint": whole.get("fingerprint")}
        try:
            json.dumps(record)  # as it is sent to other machines
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: the Lockstep config inside it can't be read ({error})") from None
        return [str(path), record]

    decision_name = f"checkpoint={raw['checkpoint']}"  # jobs of a sweep may test different checkpoints
    path, record = decide_on_rank_zero(decision_name, read_record)
    return Path(path), record


def config_of(path: Path, record: Mapping[str, Any], raw: Mapping[str, Any]) -> Config:
    """Return the config of an evaluation.

    The checkpoint's record gives the model and the data set. It also gives the data's options and folder where `raw`
    has none. Everything else comes from `raw`.

    Raises:
        CheckpointError: The record lacks a key.
        UserError: A value in `raw` is bad, or `raw` has a key that the record fixes; or the record names a target that
            the user's config does not name, see `check_targets_named`.
    """
    for key in FIXED_KEYS:
        # `model._target_` alone names the class that the checkpoint needs, see `check_targets_named`.
        if key in raw and (key != "model" or list(raw["model"]) != ["_target_"]):
            raise UserError(f"{key} comes from the checkpoint, with all weights: leave it out")
    trained = record["config"] if isinstance(record["config"], Mapping) else {}
    if missing := sorted({*SAVED_GROUPS, *SAVED_KEYS} - trained.keys()):
        raise CheckpointError(f"{path}: its config lacks {', '.join(missing)}: use a checkpoint of this version")
    raw = {key: value for key, value in raw.items() if key != "split"}  # `split` chooses images, not the model
    merged = {key: trained[key] for key in SAVED_KEYS}
    if raw.get("data_dir") is not None:
        merged["data_dir"] = raw["data_dir"]
    for group in SAVED_GROUPS:
        saved, requested = (check_group(group, source.get(group)) for source in (trained, raw))
        if group == "data":
            saved, requested = for_evaluation(saved), for_evaluation(requested)
        if requested.get("_target_") in (None, saved.get("_target_")):  # another target has other options
            check_targets_named(path, group, saved, requested)
            requested = {**saved, **requested}
        merged[group] = requested
    return check({**raw, **merged, "checkpoint": str(path)}, trains=False)


@contextmanager
def weights_must_fit(config: Config) -> Iterator[None]:
    """Turn torch's error of many lines about weights that do not fit the model into a UserError of one line."""
    try:
        yield
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{config.checkpoint}: its weights do not fit {config.model['name']} on these images ({reason})"
        ) from error


def spec_of(path: Path, record: Mapping[str, Any]) -> Spec:
    """Return the spec of the images that a checkpoint was trained on.

    Raises:
        CheckpointError: The recorded spec is not valid.
    """
    try:
        return Spec(**check_spec("spec", record["spec"]))
    except (UserError, ValueError) as refusal:  # Spec raises ValueError
        raise CheckpointError(f"{path}: {str(refusal)[:200]}") from None


def check_same_images(path: Path, record: Mapping[str, Any], spec: Spec) -> None:
    """Check that the images to be tested have the channels and classes that a checkpoint was trained on.

    Raises:
        UserError: The channels, the classes or the order of the classes differ.
    """
    before = spec_of(path, record)
    if before.channels != spec.channels:
        raise UserError(f"data: images have channels={spec.channels}, but {path} was trained on {before.channels}")
    if before.task != spec.task:
        raise UserError(
            f"data: this data set is for {spec.task}, but {path} was trained for {before.task}: use its data"
        )
    if list(before.classes) != list(spec.classes):
        only = {"the data set": set(spec.classes) - set(before.classes), path: set(before.classes) - set(spec.classes)}
        odd = [f"only {one} has {join_names(sorted(classes), 5)}" for one, classes in only.items() if classes]
        raise UserError(f"data: other classes than in training: {', '.join(odd) or 'their order differs'}")


def choose_test_images(splits: Splits, split: Any, raw: Mapping[str, Any], record: Mapping[str, Any]) -> Splits:
    """Return the splits with the images to be tested in place of the test set, and a line about them in `about`.

    If `raw` names other images than those of the training, and the opener itself has cut them into splits, these
    splits have no meaning, so the default is to test all images.

    Args:
        split: train, val, test or all; None: `all` for such other images, else `test`.
        record: the checkpoint's, with the fingerprint of the training's data.

    Raises:
        UserError: `split` has another value, or the data set has no such split.
    """
    parts = {name: getattr(splits, name) for name in SPLITS if getattr(splits, name) is not None}
    names_data = raw.get("data_dir") is not None or "_target_" in (raw.get("data") or {})
    if split is None:
        other = splits.divided and names_data and splits.fingerprint != record.get("fingerprint")
        split = "all" if other else "test"
    if split not in (*SPLITS, "all"):
        raise UserError(f"split={show(split)}: must be {', '.join(SPLITS)} or all")
    if split != "all" and split not in parts:
        others = " or ".join(f"split={name}" for name in parts)
        raise UserError(f"split={split}: this data set has no such images: use {others}")
    tested = ConcatDataset(parts.values()) if split == "all" else parts[split]
    count, total = len(tested), sum(map(len, parts.values()))
    which = f"all {count:,} images" if split == "all" else f"{count:,} of {total:,} images, split={split}"
    return replace(splits, test=tested, about=f"tested: {which}")


def evaluate(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Test in this worker and return the summary. Every worker of the layout must call it.

    Raises:
        UserError: The data set has no test images.
    """
    if splits.test is None:
        raise UserError(f"data={config.data.get('name')}: its Source has no test set: use split=train, val or all")
    started = time.perf_counter()
    rank = set_up_worker(config, folder)
    module = make_module(config, splits)
    data = make_data(config, splits, rank)
    callbacks = [DummyBatchOnEmptyRank(), *make_callbacks(config, splits, folder, module)]
    trainer = make_trainer(config, folder, callbacks)
    run = RunRecord(config, splits, folder, trainer, started)
    with weights_must_fit(config):
        trainer.test(module, datamodule=data, ckpt_path=config.checkpoint, verbose=False)
    run.record_fit()
    run.record_test()
    if rank == 0 and splits.about:
        LOG.info("%s", splits.about)
    return run.finish("completed", None)
