"""The lines that a run prints when it starts and when it is completed, and what stays out of its log."""

import logging
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Program, composed
from small_data import fast_cnn
from torch import nn

from lockstep.config import check as config_check
from lockstep.config.check import check
from lockstep.data import ArrayDataset, Spec, Splits
from lockstep.launch import logs, machine
from lockstep.report import report_lines
from lockstep.report.report_lines import (
    WIDTH,
    chance_level_line,
    data_counts,
    peak_lr,
    precision_text,
    speed_text,
    start_lines,
)
from lockstep.vision import schedules

TASK = ("data=synthetic", "data.samples=300", "data.image_size=12", "data.num_classes=3", "batch_size=32", "threads=1")


def test_a_run_reports_what_it_is_and_what_it_leaves(run_train: Program) -> None:
    """One that learns nothing, so that it is stopped early."""
    stop = ("callbacks=early_stopping", "callbacks.early_stopping.patience=1")
    run = run_train(*TASK, *stop, "optimizer=adamw", "optimizer.lr=1e-30", "strategy=ddp", "devices=2", "max_epochs=4")
    assert "chance level" not in run.stderr, "too few steps to tell"
    output, folder = run.stderr.splitlines(), run.folder
    start = output[: output.index(f"folder {folder}") + 1]
    assert [line.split()[0] for line in start] == ["model", "data", "step", "run", "folder"]
    assert max(map(len, start[:-1])) <= WIDTH
    assert start[0] == "model mnist_cnn | 14,743 parameters"
    assert re.fullmatch(r"data synthetic \| train 270, val 30, test 60 \| 3 classes", start[1])
    assert start[2] == "step 32 samples = 2 pieces x 16 on 2 devices, 1 each | ddp on cpu | lr 1e-30"
    assert start[3].startswith("run 9 steps per epoch, 36 in all (max_epochs=4) | 32-true | ")

    metrics, step = run.summary["metrics"], run.summary["tested_step"]
    early = "ended early, after step 18 of 36: val/acc has not improved in the last 1 validations, its best is "
    assert f"{early}{metrics['val/acc']:.4f}" in output
    assert output[-4:] == [
        f"completed: {folder}",
        f"best.ckpt: largest val/acc {metrics['val/acc']:.4f} at step {step}",
        f"  to look at the curves: tensorboard --logdir {run.outputs}",
        f"to predict: python src/predict.py checkpoint={folder} images=<folder>",
    ]
    log = (folder / "train.log").read_text()
    assert [text for _, text in logs.HARMLESS if text in log] == []
    assert "`Trainer.fit` stopped" in log or "GPU available" in log, "the control: other notices stay"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """Return the file of a process that is set up as rank zero; all is put back afterwards."""
    root, ours = logging.root, logging.getLogger("lockstep")
    before = root.handlers, root.level, ours.handlers, logging.raiseExceptions
    thread_hook = threading.excepthook
    logs.configure_logging(tmp_path, 0)
    yield tmp_path / "train.log"
    root.handlers, ours.handlers, logging.raiseExceptions = before[0], before[2], before[3]
    root.setLevel(before[1])
    threading.excepthook = thread_hook
    logging.captureWarnings(False)


def test_known_noise_is_left_out_of_a_log_and_everything_else_stays(log: Path) -> None:
    warned = logging.getLogger("py.warnings")
    for library, text in logs.HARMLESS:
        warned.warning("%s", f"/site-packages/{library}/x.py:3: Some{text}, and more\n")
    warned.warning("%s", "/site-packages/lightning/x.py:3: It is recommended to use `self.log(...)`")
    logging.getLogger("lockstep").info("does not have many workers which may be a bottleneck")  # our own
    (before, last) = log.read_text().splitlines()
    assert "It is recommended" in before
    assert last.endswith("lockstep: does not have many workers which may be a bottleneck")


@pytest.mark.parametrize("error", [RuntimeError("no more room"), OSError("disk full"), SystemExit()])
def test_an_error_of_a_thread_is_logged(error: BaseException, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An OSError is not printed, because TensorBoard's writer raises it again. SystemExit is no error."""

    def fail() -> None:
        raise error

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert (f"{type(error).__name__}: {error}" in log.read_text()) == (not isinstance(error, SystemExit))
    assert ("RuntimeError: no more room" in capsys.readouterr().err) == isinstance(error, RuntimeError)


def test_a_program_without_a_log_hides_the_same_warnings() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        logs.hide_harmless_warnings()
        warnings.warn("The `srun` command is available on your system but is not used. HINT: x", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in shown] == ["something else"]


# --- without runs ---


def rate(*groups: float, schedule: Any = None) -> str:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in groups], lr=1.0)
    if schedule is not None:
        schedule(optimizer)
    return peak_lr([optimizer])


def test_the_learning_rate_is_what_the_schedule_rises_to() -> None:
    assert rate(0.1) == "lr 0.1"
    assert rate(0.5, 0.1, 0.3) == "lr 0.1 to 0.5"
    assert rate(0.1, schedule=partial(schedules.onecycle, total_steps=10)) == "lr 0.1"
    one_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=10)
    assert rate(0.1, schedule=one_cycle) == "lr 0.4"


def made(labels: list[int], classes: tuple[str, ...]) -> Splits:
    dataset = ArrayDataset(np.zeros((len(labels), 1, 8, 8), dtype=np.uint8), np.array(labels))
    return Splits(dataset, None, dataset, Spec(1, 8, classes), "")


def test_classes_are_counted_where_that_is_short() -> None:
    pets = made([0] * 3 + [2], ("cat", "dog", "fox"))
    assert data_counts(pets) == ["train 4, test 4", "3 classes: cat 3, dog 0, fox 1"]
    assert data_counts(made([0, 1], ("0", "1"))) == ["train 2, test 2", "2 classes"]  # digits are no names
    many = tuple(f"a class of a long name {number}" for number in range(9))
    assert data_counts(made([0, 1], many))[1] == "9 classes"
    assert data_counts(replace(pets, train=[1.5, 2.5]))[1] == "3 classes"  # without labels


def test_frozen_parameters_and_the_key_that_ends_a_run_are_named() -> None:
    overrides = ("lr_scaling=linear", "batch_size=128", "max_steps=3", "max_epochs=2", "name=x")
    config = check(composed(*overrides))
    module, splits = fast_cnn(freeze=["net.logits.*"]), made([0, 1] * 640, ("0", "1"))
    lines = start_lines(config, splits, module, (), Path("outputs"), "lr 0.04")
    frozen = sum(parameter.numel() for name, parameter in module.named_parameters() if "logits" in name)
    assert lines[0].endswith(f" trained, {frozen:,} frozen")
    assert "lr 0.04 (linear from 0.02 at 64)" in " ".join(lines)
    assert any(line.startswith("run 10 steps per epoch, 3 in all (max_steps=3) | ") for line in lines)
    assert lines[-1] == "folder outputs"


@pytest.mark.usefixtures("whole_run")
def test_compilation_and_graphs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    monkeypatch.setattr(config_check, "compiler_lacking", lambda accelerator: None)
    texts = {
        text.rpartition(", ")[0]: overrides
        for overrides in ((), ("compile=true",), ("compile=true", "speed.cuda_graphs=true"))
        if (text := speed_text(nn.Linear(1, 1), check(composed(*overrides))))
    }
    assert list(texts) == ["", "compiled", "compiled, CUDA graphs"]


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        ((), "32-true (TF32 in convolutions)"),
        (("speed.tf32=true",), "32-true (TF32)"),
        (("speed.tf32=false",), "32-true (no TF32)"),
        (("precision=bf16-mixed",), "bf16-mixed"),
        (("accelerator=cpu",), "32-true"),
    ],
)
def test_a_run_on_a_gpu_states_which_products_are_rounded_to_tf32(
    overrides: tuple[str, ...], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    for module in (config_check, report_lines):
        monkeypatch.setattr(module, "computes_bf16", lambda accelerator: accelerator == "gpu")
    config = check(composed(*overrides))
    lines = start_lines(config, made([0, 1] * 640, ("0", "1")), fast_cnn(), (), Path("outputs"), "lr 0.04")
    assert f" | {pattern} | " in " ".join(lines)
    monkeypatch.setattr(report_lines, "computes_bf16", lambda accelerator: False)  # an older GPU
    assert precision_text(config) == config.precision


@pytest.mark.parametrize(
    ("metrics", "pattern"),
    [
        ({"test/acc": 0.61}, "test/acc 0.6100 is chance level (always guessing the most common class gives 0.7000)"),
        ({"val/acc": 0.1, "test/acc": 0.7}, "test/acc 0.7000"),
        ({"test/acc": 0.72}, None),
        ({"val/acc": 0.1}, None),  # there is no such set
        ({"test/loss": 0.1}, None),
    ],
)
def test_chance_is_what_the_most_common_class_has(metrics: dict[str, float], pattern: str | None) -> None:
    labels = [0] * 700 + [1] * 300
    actual = chance_level_line(metrics, made(labels, ("a", "b")), "lr 3")
    assert (actual is None) if pattern is None else actual is not None and actual.startswith(pattern)
    assert chance_level_line(metrics, made(labels, ("only",)), "lr 3") is None  # no classes
    assert chance_level_line(metrics, replace(made(labels, ("a", "b")), test=[1.5]), "lr 3") is None  # no labels


def test_a_run_that_ends_at_chance_names_the_learning_rate(run_train: Program) -> None:
    run = run_train(*TASK, "optimizer=adamw", "optimizer.lr=1e-30", "max_epochs=12", "batch_size=24")
    assert run.summary["steps"] > 100
    chance = f"test/acc {run.summary['metrics']['test/acc']:.4f} is chance level (always guessing the most common class"
    (line,) = [line for line in run.stderr.splitlines() if line.startswith(chance)]
    assert line.endswith("): the usual cause is the learning rate, lr 1e-30")


def test_chance_has_a_margin_around_a_guess_among_all_classes() -> None:
    tenths = made([label for label in range(10) for _ in range(36)], tuple("abcdefghij"))
    assert chance_level_line({"test/acc": 0.1278}, tenths, "lr 0.1") is not None  # 46 of 360: probability 0.052
    assert chance_level_line({"test/acc": 0.1306}, tenths, "lr 0.1") is None  # 47
    few = made([label for label in range(10) for _ in range(20)], tuple("abcdefghij"))
    assert chance_level_line({"test/acc": 31 / 200}, few, "lr 0.1") is None
    assert chance_level_line({"test/acc": 0.0}, few, "lr 0.1") is not None
