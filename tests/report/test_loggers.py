"""What loggers keep of whole runs, read back from their files: no network is there."""

import csv
import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Program, composed

from lockstep.config.check import check
from lockstep.errors import UserError
from lockstep.report.loggers import make_loggers, title


def records(path: Path) -> Iterator[Any]:
    """Return what a file of W&B's holds: after 7 bytes, records that may be cut at blocks of 32 KiB, as in LevelDB's
    log."""
    from wandb.proto import wandb_internal_pb2

    record: Any = vars(wandb_internal_pb2)["Record"]  # made when it is imported
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield record.FromString(whole)
            whole = b""


def points(path: Path, tag: str) -> list[int]:
    """Return the steps at which a file of W&B's has a metric."""
    actual = []
    for record in records(path):
        row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if tag in row:
            actual.append(int(row["trainer/global_step"]))
    return actual


@pytest.mark.nightly
def test_a_run_that_goes_on_goes_on_in_every_logger_and_a_sweep_is_a_group(run_train: Program) -> None:
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = (*TINY, "strategy=ddp", "devices=2", "max_epochs=1", "logger=[tensorboard,csv,mlflow,wandb]")
    jobs = run_train(*options, "lr=0.1,0.2", "-m").jobs
    run_train(f"resume={jobs[0]}", "max_epochs=2", "optimizer.weight_decay=0.01")
    ids = [json.loads((job / "loggers.json").read_text()) for job in jobs]
    assert [each["title"] for each in ids] == ["lr=0.1", "lr=0.2"]

    client = MlflowClient(f"sqlite:///{run_train.outputs}/mlflow.db")
    (experiment,) = (actual for actual in client.search_experiments() if actual.name == "mnist_cnn_synthetic")
    runs = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {each["logger.mlflow"] for each in ids}
    sweep = jobs[0].parent.name
    for each, lr in zip(ids, ("0.1", "0.2"), strict=True):
        run = runs[each["logger.mlflow"]]
        assert (run.info.run_name, run.data.tags["sweep"], run.info.status) == (f"lr={lr}", sweep, "FINISHED")
        assert (run.data.params["lr"], run.data.params["strategy.name"]) == (lr, "ddp")
    steps = [[point.step for point in client.get_metric_history(each["logger.mlflow"], "val/acc")] for each in ids]
    assert steps == [[6, 12], [6]]

    for job, each, lives in zip(jobs, ids, ([[6], [12]], [[6]]), strict=True):
        files = sorted(job.glob("wandb/offline-run-*/*.wandb"))
        assert [points(path, "val/acc") for path in files] == lives
        for path in files:
            actual = list(records(path))
            (run,) = (record.run for record in actual if record.WhichOneof("record_type") == "run")
            assert (run.run_id, run.run_group, run.display_name) == (each["logger.wandb"], sweep, each["title"])
            assert [record.exit.exit_code for record in actual if record.WhichOneof("record_type") == "exit"] == [0]

        with (job / "csv" / "metrics.csv").open() as file:
            rows = [int(row["step"]) for row in csv.DictReader(file) if row["val/acc"]]
        assert rows == [step for life in lives for step in life]
        (board,) = (job / "tensorboard").iterdir()
        assert board.name == each["title"]
        events = EventAccumulator(str(board), size_guidance={"scalars": 0}).Reload()
        assert [event.step for event in events.Scalars("val/acc")] == rows


def test_a_title_reports_what_differs_from_other_jobs(tmp_path: Path) -> None:
    """Hydra writes `exact=True` for a job where `exact=true` was given to the sweep."""
    (tmp_path / "0" / ".hydra").mkdir(parents=True)
    for file, overrides in (
        ("0/.hydra/hydra.yaml", ["lr=0.1", "exact=True", "compile=False"]),
        ("multirun.yaml", ["lr=0.1", "exact=true"]),
    ):
        (tmp_path / file).write_text(json.dumps({"hydra": {"overrides": {"task": overrides}}}))
    assert title(tmp_path / "0") == "compile=false"


@pytest.mark.usefixtures("whole_run")
def test_a_tracker_that_is_not_installed_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real_find_spec = importlib.util.find_spec
    check(composed("logger=[wandb,mlflow]"))  # the control
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real_find_spec(name))
    with pytest.raises(UserError, match=r"WandbLogger: needs wandb: pip install wandb$"):
        check(composed("logger=[csv,wandb]"))


def test_a_damaged_list_of_trackers_is_refused(tmp_path: Path) -> None:
    config = check(composed("logger=csv"))
    assert make_loggers(config, tmp_path, 0)  # the control
    (tmp_path / "loggers.json").write_text('{"title": "lr=')
    with pytest.raises(UserError, match=r"loggers.json: damaged: remove it, and trackers begin a new run$"):
        make_loggers(config, tmp_path, 0)


def test_a_tracker_that_can_not_be_opened_is_reported_in_a_line(run_train: Program) -> None:
    run = run_train(*TINY, "logger=mlflow", "logger.mlflow.tracking_uri=http://127.0.0.1:9", ok=False)
    assert run.returncode == 2
    assert "error: logger.mlflow: can't be opened (" in run.stderr
    assert "Traceback" not in run.stderr
    assert not run.folders


def test_a_sweep_of_one_job_is_called_by_its_overrides(tmp_path: Path) -> None:
    (tmp_path / "0" / ".hydra").mkdir(parents=True)
    for file in (tmp_path / "multirun.yaml", tmp_path / "0" / ".hydra" / "hydra.yaml"):
        file.write_text("hydra: {overrides: {task: [lr=0.01, max_epochs=1, name=one]}}")
    assert title(tmp_path / "0") == "lr=0.01 max_epochs=1"


@pytest.mark.parametrize(
    ("setting", "kind"),
    [("logger.mine", "lightning.pytorch.loggers.Logger"), ("callbacks.mine", "lightning.pytorch.Callback")],
)
def test_what_is_no_logger_or_callback_is_refused(run_train: Program, setting: str, kind: str) -> None:
    run = run_train(*TINY, f"+{setting}._target_=os.getcwd", ok=False)
    assert run.returncode == 2, str(run)
    assert run.stderr.endswith(f"error: {setting}._target_=os.getcwd: must be a {kind}\n")
    assert not run.folders
