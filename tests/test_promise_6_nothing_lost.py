"""Promise 6: killed at any moment, a run goes on to the bitwise same end; and promise 9, through the programs.

test_promise_6_histories.py and scripts/lab/chaos.py do the same at random; here each case is one that a reader can
follow.
"""

import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, TRAINER_BY_DAY, Process, Program, Run, checkpoint_of, ended, read_proc, wait_for, workers_of
from plain import scalars
from user_runs import go_on, same_bits, train

# Whatever has a state between steps: dropout, augmentation, momentum, a schedule, a tail that pieces don't divide.
AUGMENT = "data.augment={crop: 1, flip: true, fill: zero}"
JOB = (*TINY, "data.samples=415", AUGMENT, "model.dropout=0.25", "checkpoint_every=5")
DDP = ("strategy=ddp", "devices=2")
LONG_RUN = (*JOB, "max_epochs=100000", "scheduler=constant", "logger=none", "callbacks.console=null")


def saves(outputs: Path, process: Process, times: int = 1) -> Path:
    """Return the run folder below `outputs`, once its last.ckpt has been replaced so many times from now on."""

    def newest() -> tuple[int, Path] | None:
        actual = [(path.stat().st_mtime_ns, path) for path in outputs.rglob("last.ckpt")]
        return max(actual, default=None)

    seen = {newest()}
    for _ in range(times):
        seen.add(wait_for(lambda: {newest()} - seen, process).pop())
    actual = newest()
    assert actual is not None
    return actual[1].parent.parent


def same_end(run: Run, undisturbed: Run) -> None:
    actual, expected = run.summary, undisturbed.summary
    for key in ("status", "weights_sha256", "steps", "samples_seen"):
        assert actual[key] == expected[key], key
    assert actual["metrics"] == pytest.approx(expected["metrics"]), "epoch means too are right across the cuts"


# --- killed -----------------------------------------------------------------------------------------------------------


def test_a_cut_leaves_no_trace(run_train: Program, tmp_path: Path) -> None:
    options = (*JOB, "max_epochs=10", "log_every=1", "checkpoint_every=7")
    undisturbed = Program(tmp_path / "undisturbed")(*options)
    process = run_train.start(*options)
    folder = saves(run_train.outputs, process, 3)
    time.sleep(0.05)
    run_train.kill(process)
    before = (folder / "train.log").read_text()
    step = checkpoint_of(folder)["global_step"]
    assert 0 < step < undisturbed.summary["steps"]

    run = run_train(f"resume={folder}")
    assert f"resumes after step {step}\n" in run.stdout + run.stderr
    assert run.folder == folder, "in its own folder"
    same_end(run, undisturbed)
    assert (folder / "train.log").read_text().startswith(before), "the log goes on"
    boards = [scalars(next((each / "tensorboard").iterdir())) for each in (folder, undisturbed.folder)]
    timeless = {curve for curve in boards[1] if re.search("train/|val/|test/|optim", curve)}
    assert timeless
    for curve in timeless:
        actual, expected = (board[curve] for board in boards)
        assert [at for at, _ in actual] == [at for at, _ in expected], f"{curve}: each step once"
        assert [value for _, value in actual] == pytest.approx([value for _, value in expected]), curve


@TRAINER_BY_DAY
@pytest.mark.parametrize(("cut", "on"), [("SIGKILL", ("strategy=ddp", "devices=2")), ("SIGTERM", ())])
def test_a_run_that_a_signal_ends_goes_on_to_the_same_bits_on_another_layout(
    either: Path, tmp_path: Path, cut: str, on: tuple[str, ...]
) -> None:
    """Several ranks would agree on SIGTERM a second later."""
    task = ("exact=true", "pieces=4", "checkpoint_every=5")
    whole = train(either, tmp_path / "whole", "Random", *task)
    run = train(either, tmp_path / "cut", "CutRandom", *task, *on, cut=cut, ok=False)
    assert run.returncode in (1, 143), str(run)
    step = checkpoint_of(run.folder)["global_step"]
    assert step == 5 if cut == "SIGKILL" else step > 5
    resumed = go_on(either, run, "strategy=dp", "devices=3")
    assert resumed.summary["status"] == "completed"
    assert same_bits(whole, resumed)
    assert not same_bits(whole, train(either, tmp_path / "control", "Random", *task, "max_steps=7"))


def test_an_epoch_that_max_steps_ended_or_cut_short(run_train: Program, tmp_path: Path) -> None:
    job = (*JOB, "scheduler=constant", "max_epochs=3", "logger=none")  # of 12 steps each
    undisturbed = Program(tmp_path / "undisturbed")(*job, "max_steps=36")
    run = run_train(*job, "max_steps=12")
    for steps in (15, 36):
        assert run.summary["weights_sha256"] != undisturbed.summary["weights_sha256"]
        assert "val/acc" in run.summary["metrics"]
        assert (run.folder / "checkpoints" / "best.ckpt").exists()
        run = run_train(f"resume={run.folder}", f"max_steps={steps}")
    same_end(run, undisturbed)


@pytest.mark.usefixtures("processes")
def test_cut_between_a_step_and_what_follows_it(project: Path, tmp_path: Path) -> None:
    """Validation is not left out, and where nothing is left to train its metrics are still told."""
    options = (*JOB, "max_epochs=2", "checkpoint_every=1", "logger=none")
    undisturbed = Program(tmp_path / "undisturbed")(*options)
    for hook, step in (("on_validation_start", 12), ("on_train_end", 24)):
        program = Program(tmp_path / hook, home=project)
        killed = f"+callbacks.killed={{_target_: mine.KilledIn, hook: {hook}, step: {step}}}"
        done = program(*options, killed, env={"CUT": "SIGKILL"}, ok=False)
        assert done.returncode == -signal.SIGKILL, str(done)
        (folder,) = program.outputs.glob("*/*")
        same_end(program(f"resume={folder}"), undisturbed)
        best = (checkpoint_of(run, "best") for run in (folder, undisturbed.folder))
        assert len({actual["global_step"] for actual in best}) == 1


def test_three_ranks_make_the_bits_of_a_run_that_was_not_cut(run_train: Program, tmp_path: Path) -> None:
    """A ring adds a gradient's parts in an order that its place in DDP's buckets gives; this model has three."""
    small = ("data=synthetic", "data.samples=80", "data.image_size=16", "data.num_classes=3", "batch_size=12")
    options = (*small, "threads=1", "model=resnet18", "scheduler=constant", "logger=none", "strategy=ddp", "devices=3")
    undisturbed = Program(tmp_path / "undisturbed")(*options, "max_steps=4")
    run_train(*options, "max_steps=2")
    run = run_train("resume=last", f"outputs={run_train.outputs}", "max_steps=4")
    assert run.summary["steps"] == 4
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


# --- asked to save, or to end -----------------------------------------------------------------------------------------


def test_terminated_with_the_whole_group(run_train: Program) -> None:
    """As SLURM and Kubernetes do it. Loader processes hear it too; without them there would be no next step."""
    process = run_train.start(*LONG_RUN, *DDP, "num_workers=2")
    folder = saves(run_train.outputs, process)
    os.killpg(process.pid, signal.SIGTERM)
    run = run_train.finish(process)
    assert run.returncode == 143, str(run)
    assert checkpoint_of(folder)["global_step"] == run.summary["steps"]
    assert (run.summary["status"], run.summary["error"]) == ("interrupted", "interrupted by SIGTERM")
    assert "Traceback" not in run.stderr


def pending(pid: int, signum: int) -> bool:
    """Return whether a signal that was sent to a process is still pending."""
    return bool(int(read_proc(pid, "status").partition("ShdPnd:")[2].split()[0], 16) >> signum - 1 & 1)


def test_a_second_ctrl_c_ends_at_once(run_train: Program) -> None:
    process = run_train.start(*LONG_RUN, *DDP)
    folder = saves(run_train.outputs, process)
    workers = workers_of(process)
    os.kill(workers[1], signal.SIGSTOP)  # so that nobody can end in good order
    wait_for(lambda: read_proc(workers[1], "stat").rpartition(")")[2].split()[0] == "T", process)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(lambda: pending(workers[1], signal.SIGTERM), process)  # it was answered: two at once would be one
    os.killpg(process.pid, signal.SIGINT)
    run = run_train.finish(process, timeout=100)  # a silent worker would be waited for
    assert run.returncode == 130, str(run)
    assert all(ended(pid) for pid in workers)
    assert (
        "SIGINT: saving a checkpoint, then ending; press Ctrl-C again to end now\ninterrupted by SIGINT\n" in run.stderr
    )
    assert checkpoint_of(folder)["global_step"] - 1 <= run.summary["steps"]  # a step is told of when the next begins
    assert 0.9 < run.summary["samples_seen"] / (32 * run.summary["steps"]) <= 1


def test_a_validation_and_an_epochs_end_follow_every_step(run_train: Program, tmp_path: Path) -> None:
    """And nothing else saves."""
    job = (*LONG_RUN, *DDP, "data.samples=80", "batch_size=72", "val_every=1", "callbacks.checkpoint=null")
    process = run_train.start(*job)
    (log,) = wait_for(lambda: list(run_train.outputs.rglob("train.log")), process)
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "SIGUSR1: saved last.ckpt" in log.read_text(), process)
    folder = log.parent
    os.kill(workers_of(process)[1], signal.SIGTERM)  # not the one that saves
    run = run_train.finish(process)
    assert run.returncode == 143, str(run)
    assert "Traceback" not in run.stderr
    step = checkpoint_of(folder)["global_step"]
    assert checkpoint_of(folder)["lockstep"]["config"]["batch_size"] == 72  # without the callback that saves, too
    assert (run.summary["status"], run.summary["steps"]) == ("interrupted", step)
    assert (folder / "train.log").read_text().count("saved last.ckpt after step") == 2
    undisturbed = Program(tmp_path / "undisturbed")(*job, f"max_steps={step + 2}")
    same_end(run_train(f"resume={folder}", f"max_steps={step + 2}"), undisturbed)


# --- files that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["alone", "when a signal asks it to end", "under an engine"])
def test_disk_full(run_train: Program, how: str) -> None:
    """It has failed, whoever starts the workers, and also when it should have saved and ended: nothing was saved."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    engine = one if how == "under an engine" else {}
    process = run_train.start(*LONG_RUN, *([] if engine else DDP), env=engine)
    folder = saves(run_train.outputs, process)
    for pid in [process.pid] if engine else reversed(workers_of(process)):  # rank zero is the one that writes
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
    if how == "when a signal asks it to end":
        process.send_signal(signal.SIGTERM)
    run = run_train.finish(process)
    assert run.returncode == 1, str(run)
    assert re.search(r"rank 0.*can't write \(File too large\).*last\.ckpt", run.stderr), str(run)
    assert "Traceback" not in run.stderr
    assert checkpoint_of(folder)["global_step"] > 0, "the checkpoint before is whole"
    assert not list(folder.rglob(".*.tmp"))


class Payload:
    """What a hostile checkpoint holds: loading it by pickle makes a folder."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.witness),)


@pytest.fixture(scope="module")
def finished(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Program(tmp_path_factory.mktemp("finished") / "outputs")(*JOB, "max_epochs=1", "logger=none")


def test_a_refused_resume_leaves_the_run_as_it_was(finished: Run, run_train: Program) -> None:
    folder = shutil.copytree(finished.folder, run_train.outputs / "run")
    first = folder / "checkpoints" / "first.ckpt"
    first.write_bytes((folder / "checkpoints" / "last.ckpt").read_bytes())
    through = run_train(f"resume={folder}", "max_epochs=2").summary
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for wanted, wrong in [(folder, "pieces=3"), (first, "batch_size=16")]:  # by the parent, and by a worker
        run = run_train(f"resume={wanted}", wrong, ok=False)
        assert run.returncode == 2, str(run)
        assert run.stderr.count("\n") == 1
        log = {folder / "train.log", folder / "provenance.json", folder / "git.diff", folder / ".lock"}
        now = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert {path: now[path] for path in now if path not in log} == {
            path: content for path, content in before.items() if path not in log
        }
    # an older one takes the last one's place when it is taken; what was given once, here max_epochs, stays
    again = run_train(f"resume={first}")
    assert "resumes after step 12\n" in again.stderr
    assert [again.summary[key] for key in ("weights_sha256", "steps")] == [through["weights_sha256"], 24]
    assert "max_steps" not in (folder / ".hydra" / "overrides.yaml").read_text()
    run_train(f"resume={first}", "max_epochs=null", "max_steps=12")  # nothing is left to train, and it is taken, too
    assert (folder / "checkpoints" / "last.ckpt").samefile(first)
    assert "max_steps=12" in (folder / ".hydra" / "overrides.yaml").read_text()


READS = """
import os, runpy, sys, zipfile
sys.path.insert(0, "src")
import torch

def counted(kind, function):
    def call(file, *args, **kwargs):
        name = os.path.basename(getattr(file, "filename", file))
        with open(os.environ["READS"], "a") as reads:
            reads.write(f"{name}: {kind} by the {'parent' if os.getpid() == os.getpgrp() else 'worker'}\\n")
        return function(file, *args, **kwargs)
    return call

torch.load = counted("load", torch.load)
zipfile.ZipFile.testzip = counted("checksums", zipfile.ZipFile.testzip)
runpy.run_path("src/train.py", run_name="__main__")
"""


@pytest.mark.usefixtures("processes")
def test_a_resumed_run_reads_its_checkpoint_once(finished: Run, tmp_path: Path) -> None:
    """And what is damaged is refused by name, where the user has named it."""
    folder, script = tmp_path / "run", tmp_path / "reads.py"
    shutil.copytree(finished.folder, folder)
    script.write_text(READS)
    program, reads = Program(tmp_path / "outputs", str(script)), tmp_path / "reads"
    program(f"resume={folder}", "max_epochs=2", env={"READS": str(reads)})
    last = folder / "checkpoints" / "last.ckpt"
    of_last = [line for line in reads.read_text().splitlines() if line.startswith("last.ckpt")]
    assert of_last == ["last.ckpt: checksums by the worker", "last.ckpt: load by the worker"]
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    refused = program(f"resume={folder}", "max_epochs=3", env={"READS": str(reads)}, ok=False)
    assert refused.returncode == 2
    assert refused.stderr == f"error: {last}: the file is damaged: its checksums do not match\n"


def test_a_run_goes_on_whoever_names_its_folder_and_past_a_damaged_checkpoint(
    finished: Run, run_train: Program
) -> None:
    folder = shutil.copytree(finished.folder, run_train.outputs / "run")
    last, best = (folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    best.write_bytes(last.read_bytes())
    last.write_bytes(last.read_bytes()[:-100])
    run = run_train(*JOB, "logger=none", f"hydra.run.dir={folder}", "max_steps=24")
    assert "the file is cut off" in run.stderr
    assert "continuing from the older best.ckpt\n" in run.stderr
    assert "resumes after step 12\n" in run.stderr


def test_a_hostile_checkpoint_is_refused_by_name(either: Path, tmp_path: Path) -> None:
    witness, run = tmp_path / "it-ran", train(either, tmp_path / "outputs", "LitDigits", "max_epochs=1")
    path = run.folder / "checkpoints" / "last.ckpt"
    torch.save(checkpoint_of(run.folder) | {"payload": Payload(witness)}, path)
    refused = [("train", f"resume={run.folder}")]
    if (either / "src" / "evaluate.py").exists():
        refused.append(("evaluate", f"checkpoint={path}"))
    for name, option in refused:
        program = Program(tmp_path / "others", f"src/{name}.py", either)
        done = program(option, env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}, ok=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines()[-1].startswith(f"error: {path}: "), done.stderr
        assert "Traceback" not in done.stderr
    assert not witness.exists()
    assert not list(tmp_path.glob("others/*")), "a refused run leaves no folder"
    torch.load(path, weights_only=False)  # the control: the payload does run
    assert witness.exists()
