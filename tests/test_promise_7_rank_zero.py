"""Promise 7: rank zero speaks, and one run is one folder: under any launcher, on several machines, whatever dies."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    LONG_RUN,
    TINY,
    Program,
    Run,
    checkpoint_of,
    ended,
    listening,
    summary_of,
    torchrun_environments,
    workers_of,
)
from user_runs import train

SHORT = (*TINY, "max_epochs=1", "logger=none")
LAYOUT = {"strategy", "accelerator", "devices", "num_nodes", "accumulate_grad_batches"}
LAYOUT |= {"pieces", "piece_size", "batch_size", "exact"}
# What a run of two epochs prints once.
ONCE = ("step 32 samples", "epoch 1/2", "epoch 2/2", "test (best.ckpt by val/acc, step ", "completed: ")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1", "--max-restarts=1")


def assert_contract(folder: Path, steps: int, test_count: int) -> dict[str, Any]:
    """Check what every completed run leaves behind; return its summary."""
    summary = summary_of(folder)
    assert (folder / ".hydra" / "config.yaml").is_file()
    assert (folder / "train.log").read_text()
    assert (summary["status"], summary["error"], summary["steps"]) == ("completed", None, steps)
    assert set(summary) >= {"name", "model", "data", "seed", "epochs", "samples_seen", "restarts", "versions", "git"}
    assert set(summary["layout"]) >= LAYOUT
    metrics = summary["metrics"]
    assert set(metrics) >= {"val/acc", "val/loss", "test/acc", "test/loss", "test/correct", "test/count"}
    assert metrics["test/count"] == test_count
    assert metrics["test/acc"] == metrics["test/correct"] / test_count
    assert all(summary["throughput"][name] > 0 for name in ("samples_per_second", "seconds_to_first_step", "seconds"))
    assert re.fullmatch("[0-9a-f]{64}", summary["weights_sha256"])
    for name in ("best", "last"):
        assert summary[f"{name}_checkpoint"] == f"checkpoints/{name}.ckpt"
        actual = checkpoint_of(folder, name)
        assert actual["lockstep"]["config"]["batch_size"] == summary["layout"]["batch_size"]
        assert all(key.startswith("net.") for key in actual["state_dict"]), "the plain module's keys"
    return summary


@pytest.fixture(scope="module")
def ddp(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return one run on two workers, looked at from several sides."""
    program = Program(tmp_path_factory.mktemp("ddp") / "outputs", fresh=True)
    return program(*TINY, "strategy=ddp", "devices=2", "max_epochs=2", "seed=3", "data.samples=205")


def test_a_run_is_one_folder(ddp: Run) -> None:
    name, stamp = ddp.folder.relative_to(ddp.outputs).parts
    assert name == "mnist_cnn_synthetic"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_[\d-]+", stamp)
    summary = assert_contract(ddp.folder, steps=12, test_count=41)  # 205 less a tenth: 185 samples, 6 steps an epoch
    assert (summary["epochs"], summary["samples_seen"], summary["seed"]) == (2, 2 * 185, 3)
    layout = summary["layout"]
    assert (layout["strategy"], layout["devices"], layout["pieces"], layout["piece_size"]) == ("ddp", 2, 2, 16)
    assert list((ddp.folder / "tensorboard").glob("*/events.out.tfevents.*"))
    assert not (ddp.folder / "rank_1.log").exists(), "it has nothing to say but what libraries always say"
    assert not (ddp.folder / "rank_0.log").exists()


def test_rank_zero_speaks_alone(ddp: Run) -> None:
    output = ddp.stdout + ddp.stderr
    assert "step 32 samples = 2 pieces x 16 on 2 devices, 1 each | ddp on cpu | lr " in output
    assert "run 6 steps per epoch, 12 in all (max_epochs=2) | " in output
    assert str(ddp.folder) in output
    assert [output.count(once) for once in ONCE] == [1] * len(ONCE), output
    assert "Traceback" not in output
    assert "Warning" not in output
    for line in output.splitlines():
        assert line in (ddp.folder / "train.log").read_text()


def test_each_run_of_either_program_is_reported_once_and_has_its_folder(either: Path, tmp_path: Path) -> None:
    """More of where a `lockstep.Trainer` writes: tests/trainer/test_run_folder.py."""
    files = []
    for number in (1, 2):
        run = train(either, tmp_path, "LitDigits", "strategy=ddp", "devices=2")
        output = run.stdout + run.stderr
        assert [output.count(text) for text in ("step 24 samples = 6 pieces x 4 on 2", "completed: ")] == [1, 1]
        assert len(run.folders) == number, "no run writes into the folder of another"
        files.append({path: path.read_bytes() for path in tmp_path.rglob("*.ckpt")})
    assert files[0].items() < files[1].items()


def test_two_processes_that_are_no_ranks_print_twice(run_train: Program) -> None:
    """The control: without a common group each process has a folder, and prints every line."""
    processes = [run_train.start(*TINY, "max_epochs=2", "seed=3", "data.samples=205") for _ in range(2)]
    runs = [run_train.finish(process) for process in processes]
    printed = "".join(run.stdout + run.stderr for run in runs)
    assert [printed.count(once) for once in ONCE] == [2] * len(ONCE), printed
    assert len(runs[0].folders) == 2


def test_a_monitor_that_nothing_logs_is_bad_input(run_train: Program) -> None:
    """More of them: tests/callbacks/test_monitors.py."""
    run = run_train(*SHORT, "scheduler=plateau", "scheduler.monitor=val/x", "scheduler.mode=min", ok=False)
    assert run.returncode == 2, str(run)
    assert re.search("^error: .*val/x.*val/acc", run.stderr.splitlines()[-1])
    assert not run.folders, "it is known before the first step"


def test_a_run_that_is_refused_late_keeps_what_it_has_trained(run_train: Program, tmp_path: Path) -> None:
    stopping = "callbacks.stopping={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: train/x, mode: min}"
    run = run_train(*SHORT, f"++{stopping}", ok=False)
    assert (run.returncode, run.summary["status"]) == (2, "failed"), str(run)
    again = run_train(f"resume={run.folder}", "callbacks.stopping.monitor=train/loss")
    assert f"resumes after step {run.summary['steps']}" in again.stderr
    undisturbed = Program(tmp_path / "undisturbed")(*SHORT)
    assert again.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def test_a_sweep_goes_on_after_failures(run_train: Program) -> None:
    # job 0 has a crop that only the open data can refuse; 1 completes; 2 is as 0; 3 meets a gradient that is not finite
    crops = "data.augment={crop:12},null"
    run = run_train("lr=0.01,1e30", *SHORT, crops, "scheduler=constant", "-m", ok=False)
    assert run.returncode == 1, str(run)
    assert "Traceback" not in run.stderr
    summaries = [summary_of(job) for job in run.jobs]
    assert [summary["status"] for summary in summaries] == ["failed", "completed", "failed", "failed"]
    assert "data.augment.crop=12" in summaries[0]["error"]
    assert summaries[2]["error"] == summaries[0]["error"]
    assert "not finite" in summaries[3]["error"]
    assert "error: 3 jobs of the sweep failed" in run.stderr


def test_a_grid_is_refused_before_its_first_job(run_train: Program) -> None:
    run = run_train(*TINY, "lr=0.01,0.1,-1", "strategy=dp,ddp", "-m", ok=False)
    assert run.returncode == 2, str(run)
    assert re.fullmatch(r"error: lr=-1: must be .* \(job 4: lr=-1 strategy=dp\)\n", run.stderr), run.stderr
    assert not list(run_train.outputs.glob("*")), "no folder is left"


# Workers that exist already, and several machines


SAVES_OFTEN = (*TINY, "max_epochs=24", "checkpoint_every=7", "strategy=ddp", "logger=none")


@pytest.fixture(scope="module")
def undisturbed(processes: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what SAVES_OFTEN ends with on two devices of one machine, by its weights' digest."""
    run = Program(tmp_path_factory.mktemp("undisturbed"))(*SAVES_OFTEN, "devices=2")
    return str(run.summary["weights_sha256"])


@pytest.mark.usefixtures("engine")
def test_torchrun_starts_a_run_again_where_it_was(tmp_path: Path, undisturbed: str) -> None:
    program = Program(tmp_path / "outputs", launcher=TORCHRUN, fresh=True)  # whose interpreter is taken apart
    process = program.start(*SAVES_OFTEN, "devices=2")
    program.wait_for_checkpoint(process)
    agent = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    os.kill(int(agent.read_text().split()[-1]), signal.SIGKILL)
    run = program.finish(process)
    assert run.returncode == 0, str(run)
    assert assert_contract(run.folder, steps=144, test_count=40)["restarts"] == 1
    assert run.stderr.count("step 32 samples") == 2, "rank zero speaks alone, in each life"
    assert "leaked" not in run.stderr, "what C++ libraries say of what is left at an interpreter's end"
    assert re.search(r"resumes after step \d+", run.stderr)
    assert run.summary["weights_sha256"] == undisturbed


@pytest.mark.usefixtures("engine")
def test_a_sweep_of_torchruns_workers(run_train: Program) -> None:
    environments = torchrun_environments()
    port = int(environments[0]["MASTER_PORT"])
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # the agent's
    options = ("-m", *SHORT, "strategy=ddp", "devices=2", "seed=0,1")
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    workers = [run_train.start(*options, env=agents | each) for each in environments]
    run, other = (run_train.finish(worker) for worker in workers)
    assert (run.returncode, other.returncode) == (0, 0), f"{run}\n{other}"
    assert [summary_of(job)["status"] for job in run.jobs] == ["completed"] * 2
    lines = [line.split(" in ")[0] for line in run.stderr.splitlines() if line.startswith("[")]
    assert lines == ["[1 of 2] job 0 completed", "[2 of 2] job 1 completed"]
    assert "completed" not in other.stderr
    assert store.num_keys() > 0


@pytest.mark.usefixtures("engine")
def test_bad_input_of_torchruns_workers_leaves_nothing(run_train: Program) -> None:
    options = (*TINY, "strategy=ddp", "devices=2", "data.augment={crop:99}")
    runs = [
        run_train.finish(worker) for worker in [run_train.start(*options, env=each) for each in torchrun_environments()]
    ]
    assert [run.returncode for run in runs] == [2, 2], "\n".join(map(str, runs))
    assert runs[0].stderr.startswith("error: data.augment.crop=99: ")
    assert runs[1].stderr == "", "what all ranks refuse is printed once"
    assert not list(run_train.outputs.glob("*"))


# Signals and deaths; of the parent: tests/job/test_lock.py


def started(program: Program, *overrides: str) -> Any:
    """Start an endless run, and wait for its first checkpoint."""
    process = program.start(*LONG_RUN, *overrides)
    program.wait_for_checkpoint(process)
    return process


def test_a_signal_saves_and_ends(run_train: Program) -> None:
    """SIGTERM: see test_promise_6_nothing_lost.py. Nor can anyone on another machine talk to the workers."""
    process = started(run_train, "strategy=ddp", "devices=2")
    heard = {address for pid in (process.pid, *workers_of(process)) for address in listening(pid)}
    process.send_signal(signal.SIGINT)
    run = run_train.finish(process)
    assert run.returncode == 130, str(run)
    assert "Traceback" not in run.stderr
    summary = run.summary
    log = (run.folder / "train.log").read_text()
    assert f"asked to end: saved last.ckpt after step {summary['steps']}" in log
    assert run.stderr.endswith(f"to continue: resume={run.folder}\n"), "it is not below the current directory"
    assert (summary["status"], summary["last_checkpoint"]) == ("interrupted", "checkpoints/last.ckpt")
    assert "SIGINT" in summary["error"]
    assert checkpoint_of(run.folder)["global_step"] == summary["steps"] > 0, "when it was asked to end, not before"
    assert heard, "the rendezvous listens somewhere"
    assert heard <= {"127.0.0.1", "::1"}


def test_a_killed_worker_fails_the_run(run_train: Program) -> None:
    process = started(run_train, "strategy=ddp", "devices=2")
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    run = run_train.finish(process)
    assert run.returncode == 1, str(run)
    assert "Traceback" not in run.stderr
    output = "error: rank 1 was killed by SIGKILL (out of memory?)\nto continue from its last checkpoint: resume="
    assert run.stderr.endswith(f"{output}{run.folder}\n")
    assert (run.summary["status"], run.summary["error"]) == ("failed", "rank 1 was killed by SIGKILL (out of memory?)")
    assert run.summary["last_checkpoint"] == "checkpoints/last.ckpt"
    assert all(ended(pid) for pid in workers)
