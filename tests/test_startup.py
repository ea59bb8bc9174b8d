"""A command imports what its run needs, ends without losing anything, and its workers share the data in memory."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Program, wait_for, workers_of
from PIL import Image

from lockstep.launch import interpreter
from project.data import image_folder

# train.py, whose run is framed by `before` (in the command's process) and `after` (in its worker).
COMMAND = """
import atexit, gc, sys
from lockstep.run import cli
from train import train

def after():
    AFTER

def job(raw, folder):
    import lockstep.run.training as training
    fit = training.train
    def work(*args):
        result = fit(*args)
        after()
        return result
    training.train = work
    BEFORE
    return train(raw, folder)

cli.command(job, "train")
"""


def command(folder: Path, *overrides: str, before: str = "pass", after: str = "pass") -> str:
    """What such a command prints; it trains for two steps."""
    program = COMMAND.replace("BEFORE", before).replace("AFTER", after)
    done = subprocess.run(
        [sys.executable, "-c", program, "max_steps=2", "batch_size=8", f"outputs={folder}", *overrides],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "recipe", [("model=mnist_cnn", "data=digits"), ("model=resnet18", "data=synthetic", "data.samples=60")]
)
def test_a_run_imports_nothing_that_it_does_not_need(tmp_path: Path, recipe: tuple[str, ...]) -> None:
    printed = command(tmp_path, *recipe, after='print("\\nIMPORTED", *sys.modules, flush=True)')
    imported = set(next(line for line in printed.splitlines() if line.startswith("IMPORTED")).split())
    assert {"torch", "lightning", "torchmetrics", "lockstep.run.training"} <= imported  # the control
    needless = {"scipy.signal._signaltools", "scipy.stats", "sklearn", "pandas", "optuna", "onnx", "onnxruntime"}
    assert not imported & needless


def test_what_is_put_off_comes_when_it_is_asked_for(tmp_path: Path) -> None:
    """A module, garbage collection, exit handlers."""
    printed = command(
        tmp_path,
        before='print("IMPORTING", gc.isenabled(), flush=True); atexit.register(print, "HANDLED")',
        after=(
            'print("\\nTRAINED", gc.isenabled(), gc.get_freeze_count() > 100_000); import scipy.signal as s; '
            'print("USED", s.hamming(3).size, s.convolve([1, 2], [1, 2]).tolist(), flush=True)'
        ),
    )
    for said in ("IMPORTING False", "TRAINED True True", "USED 3 [1, 4, 4]", "HANDLED"):
        assert said in printed


def test_leaving_loses_nothing(tmp_path: Path) -> None:
    program = f"""
        import atexit, logging, logging.handlers, sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from lockstep.launch.interpreter import leave
        kept = logging.handlers.MemoryHandler(100, target=logging.FileHandler({str(tmp_path / "log")!r}))
        kept.emit(logging.LogRecord("x", 20, "x", 1, "logged", (), None))
        atexit.register(print, "handled")
        threading.Thread(target=lambda: (time.sleep(0.2), print("threaded"))).start()
        pool = ThreadPoolExecutor(1)  # whose thread would wait for more for ever
        pool.submit(print, "pooled").result()
        print("written", end=" ")
        leave(7)
    """
    path = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.split() == ["pooled", "written", "threaded", "handled"]
    assert (tmp_path / "log").read_text().strip() == "logged"


def test_the_collector_of_a_users_process_is_left_alone() -> None:
    before = gc.get_freeze_count()
    interpreter.imported()
    assert gc.isenabled()
    assert gc.get_freeze_count() == before


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells what processes share")
def test_workers_share_the_data_in_memory(tmp_path: Path) -> None:
    samples, size = 60_000, 64
    data = samples * size**2 >> 10  # KiB
    train = Program(tmp_path, fresh=True)
    process = train.start(
        *[
            "data=synthetic",
            f"data.samples={samples}",
            f"data.image_size={size}",
            "batch_size=8",
            "checkpoint_every=20",
        ],
        *["strategy=ddp", "devices=2"],
    )
    try:
        wait_for(lambda: [*train.outputs.rglob("last.ckpt")], process)
        workers = [memory(pid) for pid in workers_of(process)]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert len(workers) == 2
    for kept in workers:
        assert kept["Rss"] > data  # the control: this worker has the data
        assert kept["Private_Dirty"] < data / 2


def test_image_folders_keep_no_pixel(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 64, 64, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        for split in ("train", "test"):
            folder = tmp_path / split / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.png")
    train = image_folder(str(tmp_path), image_size=64, channels=3).train
    assert sum(int(image.sum()) for image, _ in (train[index] for index in range(len(train)))) == int(pixels.sum())
    assert len(pickle.dumps(train)) < pixels.nbytes / 20


def memory(pid: int) -> dict[str, int]:
    """KiB of a process by kind, see proc(5), smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
