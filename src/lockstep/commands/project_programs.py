"""The programs of a project: what they do before their workers run the project's function.

This module imports neither torch nor Lightning, so bad input is refused in a second or two.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.checkpoint.resume import hydra_files_of
from lockstep.commands import cli
from lockstep.config.arguments import overridden_keys
from lockstep.config.check import check
from lockstep.job.supervisor import check_start_files, run_in_workers
from lockstep.launch.portable import choose_kernels

if TYPE_CHECKING:
    from lockstep.job.job import Job

Function = Callable[["Job"], Any]


def run(function: Function, file: str) -> NoReturn:
    """Run a program of a project, and exit; see `lockstep.command`."""
    name = getattr(function, "__name__", "")
    if name not in PROGRAMS:
        wrong = f"the function's name says what the program does, and is {name or 'missing'}"
        print(f"error: lockstep.command: {wrong}: it must be one of {', '.join(PROGRAMS)}", file=sys.stderr)
        sys.exit(cli.REFUSED)
    cli.command(partial(PROGRAMS[name], function), name, file)


def train(function: Function | None, raw: dict[str, Any], folder: Path) -> Any:
    """Train. Return the summary.

    Args:
        function: None: that of the project's `src/train.py`.
    """
    config = check(raw, overridden=overridden_keys())
    choose_kernels(config.layout.exact)

    # These import torch, which takes longer than the checks above.
    from lockstep.data.build import open_data
    from lockstep.job.training import fit_and_test

    check_start_files(config, folder)
    splits = open_data(config.data, config.data_dir, config.seed)
    if config.data.get("image_size", 0) is None:  # what was chosen is recorded, and holds in every evaluation
        config = replace(config, data={**config.data, "image_size": splits.spec.image_size})
    work = partial(fit_and_test, hydra_files=hydra_files_of(raw), train=function)
    return run_in_workers(work, config, splits, folder)


def evaluate(function: Function, raw: dict[str, Any], folder: Path) -> Any:
    """Find the checkpoint, open its data and test it. Return the summary."""
    from lockstep.data.build import open_data
    from lockstep.job import evaluation

    checkpoint, record = evaluation.find_checkpoint_and_record(raw)
    config = evaluation.config_of(checkpoint, record, raw)
    trained_classes = evaluation.spec_of(checkpoint, record).classes
    splits = open_data(config.data, config.data_dir, config.seed, trained_classes)
    evaluation.check_same_images(checkpoint, record, splits.spec)
    splits = evaluation.normalised_as_trained(splits, checkpoint, record, raw)
    splits = evaluation.choose_test_images(splits, raw["split"], raw, record)
    return run_in_workers(partial(evaluation.evaluate, function=function), config, splits, folder)


def predict(function: Function, raw: dict[str, Any], folder: Path) -> Any:
    """Find the checkpoint and the images, and predict them. Return the summary."""
    from lockstep.job import prediction

    images, reader, top_k = raw.pop("images"), raw.pop("reader"), raw.pop("top_k")
    config, spec = prediction.config_and_spec(raw)
    prediction.check_top_k(top_k, spec)
    splits = prediction.as_splits(spec, prediction.open_files(images, reader, config, spec))
    return run_in_workers(partial(prediction.predict, top_k=top_k, function=function), config, splits, folder)


PROGRAMS = {each.__name__: each for each in (train, evaluate, predict)}
