"""Sweeps that finish: whatever happens to a job, the others go on, and what is missing can be run later."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_RUN, TINY, Process, Program, Run, checkpoint_of, ended, summary_of, wait_for, workers_of

from lockstep.checkpoint.resume import resolve
from lockstep.commands.sweeps import Progress, Slot, best_of, result_lines, slots
from lockstep.config.arguments import read_arguments
from lockstep.config.pages import SEARCHED
from lockstep.errors import UserError
from lockstep.launch.machine import available_cores

SWEEP = (*TINY, "max_epochs=24", "checkpoint_every=7", "logger=csv", "model.dropout=0.3")


def arguments(typed: list[str]) -> list[str]:
    """Return the arguments with which Hydra composes the config of a command line."""
    return resolve(read_arguments(typed, "train")).line


def kill_in(process: Process, outputs: Path, job: int) -> None:
    """Kill a job as soon as it has saved a checkpoint: its process and its workers, at once."""
    wait_for(lambda: list(outputs.rglob(f"{job}/checkpoints/last.ckpt")), process)
    (pid,) = workers_of(process)
    os.killpg(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def killed(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a sweep: jobs 0 and 1 are the same, and 1 is killed; 2 has another seed."""
    program = Program(tmp_path_factory.mktemp("sweep") / "outputs")
    process = program.start("-m", *SWEEP, "seed=1,1,2")
    kill_in(process, program.outputs, 1)
    return program.finish(process)


@pytest.fixture(scope="module")
def summaries(killed: Run) -> list[dict[str, Any]]:
    """Return what its jobs say of themselves, before a test resumes the sweep."""
    return [summary_of(job) for job in killed.jobs]


@pytest.mark.usefixtures("processes")
def test_a_killed_job_leaves_the_others_alone(killed: Run, summaries: list[dict[str, Any]]) -> None:
    assert killed.returncode == 1, str(killed)
    assert "Traceback" not in killed.stderr
    assert [summary["status"] for summary in summaries] == ["completed", "failed", "completed"]
    assert summaries[1]["error"] == "the job was killed by SIGKILL"
    lines = [line for line in killed.stderr.splitlines() if line.startswith("[")]
    assert [line.split(" in ")[0] for line in lines] == [
        "[1 of 3] job 0 completed",
        "[2 of 3] job 1 failed",
        "[3 of 3] job 2 completed",
    ]
    assert re.search(r": seed=1 \| val/acc [\d.]+ \| about \d+ s left$", lines[0])
    assert re.search(r": seed=2 \| val/acc [\d.]+ \| best [\d.]+ \(job [02], larger is better\)$", lines[2])
    folder = killed.jobs[0].parent
    assert re.search(
        rf"\nbest val/acc \(larger is better\): [\d.]+ in {folder}/[02]\n3 runs in {folder} \|", killed.stderr
    )
    assert f"sweep.resume={killed.jobs[0].parent}\n" in killed.stderr, "as it can be pasted from any directory"
    assert killed.stderr.endswith("error: 1 job of the sweep failed\n")


@pytest.mark.usefixtures("processes")
def test_jobs_of_one_sweep_have_the_same_number_of_threads(tmp_path: Path) -> None:
    """Where that follows from the layout: two workers have a core each, one has all."""
    task = [each for each in SWEEP if not each.startswith(("strategy", "devices", "threads"))]
    run = Program(tmp_path)("-m", *task, "seed=1", "max_steps=1", "strategy=ddp,dp", "devices=2", "logger=none")
    threads = {re.search(r"\| (?:channels_last, )?(\d+) threads?", (job / "train.log").read_text()) for job in run.jobs}
    assert len({match and match[1] for match in threads}) == 1
    words = [(job / ".hydra" / "overrides.yaml").read_text() for job in run.jobs]
    assert all(f"threads={max(1, available_cores() // 2)}" in each for each in words) or available_cores() == 1


@pytest.mark.usefixtures("processes", "summaries")
def test_what_is_missing_is_run(killed: Run) -> None:
    """The killed job goes on from its checkpoint, to the bits of the job that was not killed."""
    before = {job: (job / "summary.json").stat().st_mtime_ns for job in killed.jobs}
    run = Program(killed.outputs)(f"sweep.resume={killed.jobs[0].parent}")
    assert [summary_of(job)["status"] for job in run.jobs] == ["completed"] * 3
    assert [job for job in run.jobs if (job / "summary.json").stat().st_mtime_ns != before[job]] == [run.jobs[1]]
    assert re.search(r"resumes after step \d+", (run.jobs[1] / "train.log").read_text())
    weights = [summary_of(job)["weights_sha256"] for job in run.jobs]
    assert weights[1] == weights[0] != weights[2]
    assert "[3 of 3] job 1 completed" in run.stderr
    again = Program(killed.outputs)(f"sweep.resume={killed.jobs[0].parent}")
    assert "job" not in again.stderr, "nothing was missing any more"
    assert "the sweep is complete, 3 of 3\n" in again.stderr
    assert f"lockstep compare {killed.jobs[0].parent}\n" in again.stderr


def test_a_closed_terminal_ends_the_sweep(run_train: Program) -> None:
    process = run_train.start("-m", *LONG_RUN, "seed=0,1")
    run_train.wait_for_checkpoint(process)
    os.killpg(process.pid, signal.SIGHUP)  # jobs have groups of their own and hear it once
    run = run_train.finish(process)
    assert run.returncode == 143, str(run)
    assert "Traceback" not in run.stderr
    assert (run.summary["status"], run.summary["error"]) == ("interrupted", "interrupted by SIGTERM")
    assert run.summary["steps"] == checkpoint_of(run.folder)["global_step"] > 0
    assert run.summary["last_checkpoint"] == "checkpoints/last.ckpt"
    assert "to run the remaining jobs" in run.stderr


def test_jobs_die_with_their_sweep(run_train: Program) -> None:
    process = run_train.start("-m", *LONG_RUN, "seed=0,1")
    run_train.wait_for_checkpoint(process)
    (job,) = workers_of(process)
    process.kill()
    process.communicate(timeout=30)  # ends when the last process that holds the pipes does
    assert ended(job)


def test_jobs_side_by_side(run_train: Program) -> None:
    process = run_train.start("-m", *LONG_RUN, "seed=0,1,2", "sweep.jobs=2")
    if len(os.sched_getaffinity(0)) < 2:
        assert "sweep.jobs=2: each job needs its own core" in run_train.finish(process).stderr
        return
    wait_for(lambda: len(list(run_train.outputs.rglob("last.ckpt"))) == 2, process)
    cores = [os.sched_getaffinity(pid) for pid in workers_of(process)]
    assert len(cores) == 2
    assert not cores[0] & cores[1]
    process.send_signal(signal.SIGINT)
    run = run_train.finish(process)
    assert run.returncode == 130, str(run)
    assert run.stderr.count("SIGINT: saving a checkpoint, then ending; press Ctrl-C again to end now") == 1
    assert [summary_of(job)["status"] for job in run.jobs] == ["interrupted"] * 2
    assert "step 32 samples" not in run.stderr
    assert all("step 32 samples" in (job / "output.log").read_text() for job in run.jobs)


# The parts


@pytest.mark.parametrize(
    ("jobs", "gpus", "cores", "expected"),
    [
        (2, "0123", 2, [Slot(("0", "1"), (0,)), Slot(("2", "3"), (1,))]),
        (2, "57", 1, [Slot(("5",)), Slot(("7",))]),
        (2, "", 5, [Slot((), (0, 1)), Slot((), (2, 3))]),  # with more cores, a job would have more threads
    ],
)
def test_devices_are_divided(jobs: int, gpus: str, cores: int, expected: list[Slot]) -> None:
    assert slots(jobs, gpus, range(cores)) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("hydra.sweep.subdir=mine_${hydra.job.num}", "a job's folder has its number as name: leave it out"),
        ("hydra.sweeper.max_batch_size=2", "give sweep.jobs=, the number of jobs at the same time"),
    ],
)
def test_settings_of_hydra_that_a_sweep_can_not_have_are_refused(
    run_train: Program, setting: str, message: str
) -> None:
    run = run_train("-m", *LONG_RUN, "seed=0,1", setting, ok=False)
    assert (run.returncode, run.stderr) == (2, f"error: {setting}: {message}\n")
    assert not list(run_train.outputs.rglob("*"))


def test_what_only_some_jobs_change_is_checked_before_the_first_one(run_train: Program) -> None:
    run = run_train("-m", *TINY, "optimizer.lr=0.1,0.3", "lr=0.1", ok=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: optimizer.lr=0.3: lr=0.1 is given too and overrides it"), str(run)
    assert not list(run_train.outputs.rglob("*"))


@pytest.mark.parametrize(
    ("gpus", "cores", "available"), [("01", 8, "own GPU, and there are 2: "), ("", 1, "own core, and there is 1: ")]
)
def test_more_jobs_than_devices_are_refused(gpus: str, cores: int, available: str) -> None:
    with pytest.raises(UserError, match=f"sweep.jobs=3: .*{available}"):
        slots(3, gpus, range(cores))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    (tmp_path / "multirun.yaml").write_text(
        "hydra: {overrides: {task: ['seed=0,1', lr=0.1, sweep.jobs=2],"
        " hydra: [hydra.mode=MULTIRUN, hydra.sweep.dir=elsewhere, hydra.verbose=true]}}\n"
    )
    return tmp_path


def test_resuming_repeats_what_was_set(recorded: Path) -> None:
    available = [f"sweep.resume='{recorded}'", f"hydra.sweep.dir='{recorded}'"]
    words = ["hydra.verbose=true", "seed=0,1", "lr=0.1", "sweep.jobs=2"]
    assert arguments([f"sweep.resume={recorded}"]) == [*words, *available, "-m"]
    words[3] = "sweep.jobs=1"
    assert arguments(["-m", "sweep.jobs=1", f"sweep.resume={recorded}"]) == [*words, *available, "-m"]
    assert arguments(["lr=1", "-m", "seed=0,1"]) == ["lr=1", "seed=0,1", "-m"]


def test_flags_are_distinguished_from_overrides(recorded: Path) -> None:
    assert arguments(["lr=1", "--config-dir", "x", "seed=1", "-c", "job"]) == [
        *("lr=1", "seed=1", "--config-dir", "x", "-c", "job")
    ]
    assert arguments([f"sweep.resume={recorded}", "--config-dir", "x"])[-3:] == ["-m", "--config-dir", "x"]


def test_a_sweep_goes_on_with_the_config_folder_of_its_command(recorded: Path) -> None:
    record = recorded / "multirun.yaml"
    sources = "runtime: {config_sources: [{path: /a b, schema: file, provider: command-line}]}"
    record.write_text(record.read_text().replace("{overrides", f"{{{sources}, overrides", 1))
    assert f"hydra.searchpath=['file:///a b',{','.join(SEARCHED)}]" in arguments([f"sweep.resume={recorded}"])
    assert "searchpath" not in "".join(arguments([f"sweep.resume={recorded}", "--config-dir=x"]))


@pytest.mark.parametrize("changed", ["seed=0,1,2", "seed=1", "batch_size=32,64"])
def test_resuming_does_not_list_other_jobs(recorded: Path, changed: str) -> None:
    with pytest.raises(UserError, match=f"{changed}: sweep.resume= runs the jobs that the sweep lists"):
        arguments([changed, f"sweep.resume={recorded}"])


def test_resuming_what_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a sweep's folder"):
        arguments([f"sweep.resume={tmp_path}"])


def a_sweep(folder: Path, *jobs: tuple[dict[str, Any], float]) -> list[str]:
    """Return the last lines of a sweep whose jobs have this data and other keys, and this val/loss."""
    for number, (config, loss) in enumerate(jobs):
        hydra = folder / str(number) / ".hydra"
        hydra.mkdir(parents=True)
        data = {key: value for key, value in config.items() if key.startswith("data.")}
        content = {"data": {key[5:]: value for key, value in data.items()}, "data_dir": config.get("data_dir", "d")}
        (hydra / "config.yaml").write_text(json.dumps(content))
        (hydra / "overrides.yaml").write_text(json.dumps([f"{key}={value}" for key, value in config.items()]))
        summary = {"status": "completed", "metrics": {"val/loss": loss}}
        (hydra.parent / "summary.json").write_text(json.dumps(summary))
    return result_lines(folder, "val/loss", "min")


@pytest.mark.parametrize("varied", ["lr", "data.image_size", "data.augment", "seed"])
def test_a_sweep_ends_with_its_best_run_its_folder_and_how_to_compare(tmp_path: Path, varied: str) -> None:
    best, where = a_sweep(tmp_path, ({varied: 1}, 2.0), ({varied: 2}, 0.5), ({varied: 3}, 1.0))
    assert best == f"best val/loss (smaller is better): 0.5 in {tmp_path / '1'}"
    assert where == f"3 runs in {tmp_path} | to compare: lockstep compare {tmp_path}"


@pytest.mark.parametrize("varied", ["data.name", "data.split_seed", "data.val_fraction", "data.samples", "data_dir"])
def test_no_best_of_different_samples(tmp_path: Path, varied: str) -> None:
    lines = a_sweep(tmp_path, ({varied: 1}, 2.0), ({varied: 2}, 0.5))
    assert lines[0] == "the runs were scored on different samples, so none of them is the best"
    assert len(lines) == 2
    progress = Progress(2, "val/loss", "min", tmp_path)
    for number in (0, 1):
        progress.add(number, summary_of(tmp_path / str(number)))
    assert progress.best is None


def test_folds_have_a_mean_and_no_best(tmp_path: Path) -> None:
    folds: list[tuple[dict[str, Any], float]]
    folds = [({"data.folds": 3, "data.fold": fold}, loss) for fold, loss in enumerate((1.0, 2.0, 3.0))]
    (mean, _) = a_sweep(tmp_path / "folds", *folds)
    assert mean == "val/loss (smaller is better) over 3 folds: mean 2, standard deviation 1"
    also = [({**each, "lr": lr}, loss) for lr in (0.1, 0.2) for each, loss in folds]
    assert a_sweep(tmp_path / "and lr", *also)[0].startswith("the runs were scored on different samples")


@pytest.mark.parametrize(
    ("metric", "mode", "best"), [("val/acc", "max", 1), ("val/acc", "min", 3), ("val/loss", "min", 1)]
)
def test_of_equally_good_runs_the_best_has_the_smallest_loss(metric: str, mode: str, best: int) -> None:
    scores = [(0.9, 0.3), (0.9, 0.1), (0.9, 0.2), (0.8, 0.5), (0.8, None)]
    metrics: list[dict[str, Any]] = [{"val/acc": acc, **({"val/loss": loss} if loss else {})} for acc, loss in scores]
    summaries = {number: {"status": "completed", "metrics": each} for number, each in enumerate(metrics)}
    with_metric = {number: each for number, each in summaries.items() if metric in each["metrics"]}
    assert best_of(with_metric, metric, mode) == best


def test_one_run_is_no_best(tmp_path: Path) -> None:
    assert len(a_sweep(tmp_path, ({"lr": 1}, 2.0))) == 1
