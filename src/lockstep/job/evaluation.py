"""Test a checkpoint on any layout, as a run with its own folder."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import ConcatDataset

from lockstep.callbacks import DummyBatchOnEmptyRank, EvaluationSeed
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths, resume
from lockstep.checkpoint.io import CheckpointError
from lockstep.checkpoint.record import SpecRecord
from lockstep.config import value_checks
from lockstep.config.check import Config, check
from lockstep.config.instantiate import check_targets_named
from lockstep.config.schema import OptionalGroup
from lockstep.config.value_checks import checker, show
from lockstep.data import Spec, Splits
from lockstep.data.build import without_training_settings
from lockstep.data.splits import is_other_data, same_classes
from lockstep.errors import UserError
from lockstep.job.build import make_callbacks, make_module, make_trainer
from lockstep.job.job import Job
from lockstep.job.worker_setup import set_up_worker
from lockstep.launch.process_group import decide_on_rank_zero
from lockstep.lightning.hooks import overrides_method
from lockstep.report.summary import RunRecord
from lockstep.text import join_names
from lockstep.trainer.trainer import Trainer

REFUSED_KEYS = ("model", "seed", "optimizer", "scheduler", "lr")  # a user may not give them: the checkpoint has them
SPLITS = ("train", "val", "test")
SAVED_GROUPS = ("model", "data", "optimizer", "scheduler")  # config groups that are read from the checkpoint
SAVED_KEYS = ("seed", "data_dir")  # single keys that are read from the checkpoint, and `lr` if it has one

LOG = logging.getLogger("lockstep")
check_group, check_spec = checker(OptionalGroup), checker(SpecRecord)


def find_checkpoint(raw: Mapping[str, Any]) -> Path:
    """Return the file that `checkpoint=` names.

    The value is a file; a run folder, which stands for its best checkpoint, or its last one if it has no best one; or
    `last`, which stands for the newest run in `outputs`.
    """
    path = value_checks.as_text(raw["checkpoint"])  # a file may have the name 5
    if not isinstance(path, str) or not path:
        raise UserError(f"checkpoint={show(path)}: must be a .ckpt file, a run folder, or last")
    if path == "last":
        path = str(resume.newest_run_folder("checkpoint", raw["outputs"]))
    location = Path(path).expanduser()
    if not location.is_dir():
        return location
    if checkpoint := paths.best_in(location):
        return checkpoint
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
        content = checkpoint_io.load(path, tensors=False).get("lockstep")
        if not isinstance(content, dict) or not {"config", "spec"} <= content.keys():
            raise CheckpointError(f"{path}: the file does not name its model: use a checkpoint that Lockstep wrote")
        facts = content.get("trainer")
        record = {"config": content["config"], "spec": content["spec"], **(facts if isinstance(facts, dict) else {})}
        try:
            json.dumps(record)  # other machines get the record as JSON
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: the Lockstep config inside it can't be read ({error})") from None
        return [str(path), record]

    decision_name = f"checkpoint={raw['checkpoint']}"  # jobs of a sweep may test different checkpoints
    path, record = decide_on_rank_zero(decision_name, read_record)
    return Path(path), record


def config_of(path: Path, record: Mapping[str, Any], raw: Mapping[str, Any]) -> Config:
    """Return the config of an evaluation.

    The checkpoint's record gives the model and its training. It also gives the data set, and its options and folder,
    where `raw` has none. Everything else comes from `raw`.

    Args:
        record: the checkpoint's record, see `find_checkpoint_and_record`.
        raw: the config that the user has composed.

    Raises:
        CheckpointError: The record lacks a key.
        UserError: A value in `raw` is bad, or `raw` has one of REFUSED_KEYS; or the record names a class or function
            that no file of the user's conf/ names, see `check_targets_named`.
    """
    for key in REFUSED_KEYS:
        # `model._target_` may be given: it allows the checkpoint's class if no file of conf/ names it.
        if key in raw and (key != "model" or list(raw["model"]) != ["_target_"]):
            raise UserError(f"{key} comes from the checkpoint: leave it out")
    trained_config = record["config"] if isinstance(record["config"], Mapping) else {}
    if missing := sorted({*SAVED_GROUPS, *SAVED_KEYS} - trained_config.keys()):
        raise CheckpointError(f"{path}: its config lacks {', '.join(missing)}: use a checkpoint of this version")
    # `check` refuses the key `split`, which a run of training lacks. `choose_test_images` gets it as an argument.
    raw = {key: value for key, value in raw.items() if key != "split"}
    merged = {key: trained_config[key] for key in (*SAVED_KEYS, "lr") if key in trained_config}
    if raw.get("data_dir") is not None:
        merged["data_dir"] = raw["data_dir"]
    for group in SAVED_GROUPS:
        saved, requested = (check_group(group, source.get(group)) for source in (trained_config, raw))
        if group == "data":
            saved, requested = without_training_settings(saved), without_training_settings(requested)
        # The options of the checkpoint are for its own target; another target has other options.
        if requested.get("_target_") in (None, saved.get("_target_")):
            check_targets_named(path, group, saved, requested)
            requested = {**saved, **requested}
        if group == "data":  # a model takes images as in its training, also those of another page
            requested = {**requested, **_as_trained(requested, saved, path, record)}
        merged[group] = requested
    return check({**raw, **merged, "checkpoint": str(path)}, trains=False)


def _as_trained(
    requested: Mapping[str, Any], saved: Mapping[str, Any], path: Path, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a data group that a user has left open, as they were in training: size and transforms.

    Args:
        requested: the group of this evaluation.
        saved: that of the training.
    """
    options: dict[str, Any] = {}
    if requested.get("image_size", 0) is None:
        options["image_size"] = spec_of(path, record).image_size
    transforms, trained = requested.get("transforms"), (saved.get("transforms") or {}).get("eval")
    if isinstance(transforms, Mapping) and not transforms.get("eval") and trained:
        options["transforms"] = {**transforms, "eval": trained}
    return options


def normalised_as_trained(splits: Splits, path: Path, record: Mapping[str, Any], raw: Mapping[str, Any]) -> Splits:
    """Return splits whose images are normalised by the mean and deviation of the training, unless `raw` has others."""
    trained, data = spec_of(path, record), raw.get("data") or {}
    chosen = {name: getattr(trained, name) for name in ("mean", "std") if data.get(name) is None}
    return replace(splits, spec=replace(splits.spec, **chosen))


@contextmanager
def weights_must_fit(config: Config) -> Iterator[None]:
    """Inside the `with` block, turn torch's error about weights that do not fit into a UserError of one line."""
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
    """Return the spec of the images that a checkpoint was trained on."""
    try:
        return Spec(**check_spec("spec", record["spec"]))
    except (UserError, ValueError) as refusal:  # Spec raises ValueError
        raise CheckpointError(f"{path}: {str(refusal)[:200]}") from None


def check_same_images(path: Path, record: Mapping[str, Any], spec: Spec) -> None:
    """Check that images to be tested have the channels, the task and the classes that a checkpoint was trained on."""
    trained_spec = spec_of(path, record)
    if trained_spec.channels != spec.channels:
        raise UserError(
            f"data: images have channels={spec.channels}, but {path} was trained on {trained_spec.channels}"
        )
    if trained_spec.task != spec.task:
        raise UserError(
            f"data: this data set is for {spec.task}, but {path} was trained for {trained_spec.task}: "
            f"use a data set for {trained_spec.task}"
        )
    if not same_classes(trained_spec.classes, spec.classes):
        data_classes, trained_classes = set(spec.classes), set(trained_spec.classes)
        only_in = {"the data set": data_classes - trained_classes, path: trained_classes - data_classes}
        differences = [f"only {one} has {join_names(sorted(names), 5)}" for one, names in only_in.items() if names]
        raise UserError(f"data: other classes than in training: {', '.join(differences) or 'their order differs'}")


def choose_test_images(splits: Splits, split: Any, raw: Mapping[str, Any], record: Mapping[str, Any]) -> Splits:
    """Return the splits with the images to be tested in place of the test set, and a line about them in `about`.

    By default the test set is tested. But if the user chose a data set on which the model was not trained, and its test
    set is only a random part of it (`split_by_opener`), all of its images are tested.

    Args:
        splits: the opened data set.
        split: train, val, test or all; None: the default.
        raw: the config that the user has composed.
        record: the checkpoint's record, with fingerprint and content of the data set of the training.
    """
    datasets = {name: getattr(splits, name) for name in SPLITS if getattr(splits, name) is not None}
    user_chose_data = raw.get("data_dir") is not None or "_target_" in (raw.get("data") or {})
    other_images = is_other_data(record, splits)
    # The same names, labels and sizes are split in the same way, so some of them were trained on, whatever their bytes.
    other_names = splits.fingerprint != record.get("fingerprint")
    if split is None:
        split = "all" if user_chose_data and other_names and splits.split_by_opener else "test"
    if split not in (*SPLITS, "all"):
        raise UserError(f"split={show(split)}: must be {', '.join(SPLITS)} or all")
    if split != "all" and split not in datasets:
        others = " or ".join(f"split={name}" for name in datasets)
        raise UserError(f"split={split}: this data set has no such images: use {others}")
    test_set = ConcatDataset(datasets.values()) if split == "all" else datasets[split]
    count, total = len(test_set), sum(map(len, datasets.values()))
    tested_images = f"all {count:,} images" if split == "all" else f"{count:,} of {total:,} images, split={split}"
    has_changed = record.get("fingerprint") and other_images and not user_chose_data
    changed = "; the data set has changed since the training" if has_changed else ""
    return replace(splits, test=test_set, about=f"tested: {tested_images}{changed}")


class EvaluationJob(Job):
    """A test of a checkpoint; see `Job`.

    Attributes:
        run: the record from which the summary is written; None before `make_trainer`.

    Raises:
        UserError: The data set has no test images.
    """

    name = "evaluate"

    def __init__(self, config: Config, splits: Splits, folder: Path) -> None:
        if splits.test is None:
            raise UserError(f"data={config.data.get('name')}: its Source has no test set: use split=train, val or all")
        self.started = time.perf_counter()
        set_up_worker(config, folder)
        super().__init__(config, splits, folder, config.checkpoint)
        self.run: RunRecord | None = None
        self._tested = False

    def build_module(self) -> pl.LightningModule:
        """Build the module, whose weights `trainer.test` loads."""
        module = make_module(self.config, self.splits)
        if not overrides_method(module, "test_step", pl.LightningModule):
            raise UserError(
                f"{type(module).__name__} has no test_step, which evaluates the images of any split: add one"
            )
        return module

    def build_trainer(self, module: pl.LightningModule) -> Trainer:
        """Build the trainer with the config's callbacks."""
        config, splits, folder = self.config, self.splits, self.folder
        callbacks = [EvaluationSeed(), DummyBatchOnEmptyRank(), *make_callbacks(config, splits, folder, module)]
        trainer = make_trainer(config, folder, callbacks, run=self)
        self.run = RunRecord(config, splits, folder, trainer, self.started)
        return trainer

    @contextmanager
    def around_test(self, ckpt_path: Any) -> Iterator[None]:
        """Record the metrics of a `trainer.test`, and the weights that were tested."""
        assert self.run is not None
        if ckpt_path != self.checkpoint:
            raise UserError(
                f"evaluate(job) passes ckpt_path={ckpt_path} to trainer.test: pass ckpt_path=job.checkpoint, which is "
                f"{self.checkpoint}"
            )
        with weights_must_fit(self.config):
            yield
        self._tested = True
        self.run.record_weights()  # those that were loaded from the checkpoint
        self.run.record_test()

    def finish(self) -> dict[str, Any]:
        """Write the summary, and return it."""
        if self.run is None or not self._tested:
            raise UserError("evaluate(job) has ended without trainer.test: it must call it once at least")
        if self.run.trainer.is_global_zero and self.splits.about:
            LOG.info("%s", self.splits.about)
        return self.run.finish("completed", None)


def evaluate(
    config: Config, splits: Splits, folder: Path, function: Callable[[Job], Any] | None = None
) -> dict[str, Any]:
    """Call `function(job)` in this worker, and return the summary. Every worker of the layout must call it.

    Args:
        config: the config of the evaluation, from `config_of`.
        splits: the data, from `choose_test_images`.
        function: None: `evaluate` of the project's `src/evaluate.py`.

    Raises:
        UserError: The data set has no test images.
    """
    job = EvaluationJob(config, splits, folder)
    job.call(function)
    return job.finish()
