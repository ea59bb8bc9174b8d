"""Tests a checkpoint on any layout, as a run of its own."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
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
from lockstep.config.schema import OptionalGroup, SpecRecord
from lockstep.config.targets import check_targets_named
from lockstep.config.value_checks import checker, show
from lockstep.data import Spec, Splits
from lockstep.data.build import for_evaluation
from lockstep.errors import UserError
from lockstep.launch.rank_zero_decisions import decide_on_rank_zero
from lockstep.run.build import make_callbacks, make_data, make_module, make_trainer
from lockstep.run.summary import RunRecord
from lockstep.run.worker_setup import set_up_worker

DECIDED = ("model", "seed", "optimizer", "scheduler", "lr")  # keys of a config: by the checkpoint
SPLITS = ("train", "val", "test")
NAMED = 5  # classes or files that a message names
CARRIED = ("model", "data", "optimizer", "scheduler")  # groups of the training that an evaluation takes over
VALUES = ("seed", "lr", "data_dir")

LOG = logging.getLogger("lockstep")
check_group, check_spec = checker(OptionalGroup), checker(SpecRecord)


def find_checkpoint(raw: Mapping[str, Any]) -> Path:
    """What `checkpoint` means: a file; of a run folder the best checkpoint, else the last; `last`: that of the newest
    run in `outputs`.

    Raises:
        CheckpointError: there is none.
        UserError: it is neither, or no run has one.
    """
    path = value_checks.as_text(raw["checkpoint"])  # a file may be named 5
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
    raise CheckpointError(f"{path}: no checkpoints/best.ckpt or last.ckpt in this folder")


def record_of(path: Path) -> dict[str, Any]:
    """What Lockstep has recorded in a checkpoint: config, spec, fingerprint.

    Raises:
        CheckpointError: the file can't be used, or was not written by Lockstep.
    """
    recorded = checkpoint_io.load(path).get("lockstep")
    if not isinstance(recorded, dict) or not {"config", "spec"} <= recorded.keys():
        raise CheckpointError(f"{path}: it has no Lockstep config inside, so there is no telling which model it is")
    return recorded


def find_checkpoint_and_record(raw: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that `checkpoint` means, and what is recorded in it, where the run is kept: other machines, or
    ranks, need no such file. Raises as `find_checkpoint` and `record_of`."""

    def read_record() -> list[Any]:
        path = find_checkpoint(raw)
        whole = record_of(path)
        record = {"config": whole["config"], "spec": whole["spec"], "fingerprint": whole.get("fingerprint")}
        try:
            json.dumps(record)  # as other machines get it
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: the Lockstep config inside it can't be read ({error})") from None
        return [str(path), record]

    decision_name = f"checkpoint={raw['checkpoint']}"  # another job of a sweep may ask for another one
    path, record = decide_on_rank_zero(decision_name, read_record)
    return Path(path), record


def config_of(path: Path, record: Mapping[str, Any], raw: Mapping[str, Any]) -> Config:
    """The config of an evaluation: model and data set from the checkpoint's record, its options and the data's folder
    too unless `raw` has others, everything else from `raw`.

    Raises:
        CheckpointError: the record lacks something.
        UserError: a value in `raw`, or a key there that the record decides; or the record names what the user's own
            config doesn't, see `check_targets_named`.
    """
    for key in DECIDED:
        if key in raw and (key != "model" or list(raw["model"]) != ["_target_"]):  # which says that it is wanted
            raise UserError(f"{key}: the checkpoint decides it, and holds all weights; leave it out")
    trained = record["config"] if isinstance(record["config"], Mapping) else {}
    if missing := sorted({*CARRIED, *VALUES} - trained.keys()):
        raise CheckpointError(f"{path}: the Lockstep config inside it has no {', '.join(missing)}")
    raw = {key: value for key, value in raw.items() if key != "split"}  # which images, not which model
    merged = {key: trained[key] for key in VALUES}
    if raw.get("data_dir") is not None:
        merged["data_dir"] = raw["data_dir"]
    for group in CARRIED:
        carried, requested = (check_group(group, source.get(group)) for source in (trained, raw))
        if group == "data":
            carried, requested = for_evaluation(carried), for_evaluation(requested)
        if requested.get("_target_") in (None, carried.get("_target_")):  # another has other options
            check_targets_named(path, group, carried, requested)
            requested = {**carried, **requested}
        merged[group] = requested
    return check({**raw, **merged, "checkpoint": str(path)}, trains=False)


@contextmanager
def weights_must_fit(config: Config) -> Iterator[None]:
    """Refuses in one line what torch refuses on many: weights that are not those of the model."""
    try:
        yield
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{config.checkpoint}: does not fit {config.model['name']} on such images ({reason})"
        ) from error


def spec_of(path: Path, record: Mapping[str, Any]) -> Spec:
    """What the images were that a checkpoint was trained on.

    Raises:
        CheckpointError: no images are like that.
    """
    try:
        return Spec(**check_spec("spec", record["spec"]))
    except UserError as refusal:
        raise CheckpointError(f"{path}: {str(refusal)[:200]}") from None


def check_same_images(path: Path, record: Mapping[str, Any], spec: Spec) -> None:
    """Compares the images that are to be tested on with those that a checkpoint was trained on.

    Raises:
        UserError: other channels, other classes, or these in another order.
    """
    before = spec_of(path, record)
    if before.channels != spec.channels:
        raise UserError(f"data: channels is {spec.channels}, and {path} was trained with {before.channels}")
    if list(before.classes) != list(spec.classes):
        only = {"the data set": set(spec.classes) - set(before.classes), path: set(before.classes) - set(spec.classes)}
        odd = [f"only {one} has {some(sorted(classes))}" for one, classes in only.items() if classes]
        raise UserError(f"data: other classes than in training: {', '.join(odd) or 'their order is another'}")


def with_tested(splits: Splits, split: Any, raw: Mapping[str, Any], record: Mapping[str, Any]) -> Splits:
    """The splits, with what shall be tested in the place of the test set, and `about` saying so.

    Images that are not those of the training belong to no split: where `raw` names their folder or data set, and the
    opener has cut them into splits by itself, all of them are tested.

    Args:
        split: train, val, test or all; None: `test`, or `all` for such images.

    Raises:
        UserError: another name, or the data set has no such split.
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
        raise UserError(f"split={split}: this data set has no such images; {others}")
    tested = ConcatDataset(parts.values()) if split == "all" else parts[split]
    count, total = len(tested), sum(map(len, parts.values()))
    which = f"all {count:,} images" if split == "all" else f"{count:,} of {total:,} images, split={split}"
    return replace(splits, test=tested, about=f"tested: {which}")


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def evaluate(config: Config, splits: Splits, folder: Path) -> dict[str, Any]:
    """Tests in this worker; returns the summary. Every worker of the layout calls it.

    Raises:
        UserError: the data set has no test images.
    """
    if splits.test is None:
        raise UserError(f"data={config.data.get('name')}: its Source has no test set")
    started = time.perf_counter()
    rank = set_up_worker(config, folder)
    module = make_module(config, splits)
    data = make_data(config, splits, rank)
    callbacks = [DummyBatchOnEmptyRank(), *make_callbacks(config, splits, folder, module)]
    trainer = make_trainer(config, folder, callbacks)
    run = RunRecord(config, splits, folder, trainer, started)
    with weights_must_fit(config):
        trainer.test(module, datamodule=data, ckpt_path=config.checkpoint, verbose=False)
    run.fitted()
    run.tested()
    if rank == 0 and splits.about:
        LOG.info("%s", splits.about)
    return run.finish("completed", None)
