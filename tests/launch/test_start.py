"""A command imports what its run needs, ends without losing anything, and its workers share the data in memory."""

from pathlib import Path

import pytest
from conftest import Program, python, workers_of

pytestmark = pytest.mark.usefixtures("processes")

# train.py, whose worker then tells of itself
COMMAND = """
import gc, sys
from lockstep import command
from lockstep.commands import project_programs
from train import train

in_workers = project_programs.run_in_workers

def work(*args):
    from lockstep.job.training import fit_and_test as fit

    result = fit(*args)
    print("\\nCOLLECTS", gc.isenabled(), gc.get_freeze_count() > 100_000)
    print("IMPORTED", *sys.modules, flush=True)
    return result

print("COLLECTS", gc.isenabled())
project_programs.run_in_workers = lambda _, *args: in_workers(work, *args)
command(train, "src/train.py")
"""


def test_a_worker_imports_nothing_that_it_does_not_need_and_collects_no_garbage_of_others(tmp_path: Path) -> None:
    done = python(COMMAND, "max_steps=2", "batch_size=8", f"outputs={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "COLLECTS True True\n" in done.stdout
    imported = set(next(line for line in done.stdout.splitlines() if line.startswith("IMPORTED")).split())
    assert {"torch", "lightning", "torchmetrics", "lockstep.job.training"} <= imported  # the control
    needless = {"sklearn", "pandas", "optuna", "onnx", "onnxruntime"}
    assert not imported & needless, imported & needless


def test_leaving_loses_nothing(tmp_path: Path) -> None:
    program = f"""
import logging, logging.handlers
from lockstep.launch.process_lifetime import exit_process
kept = logging.handlers.MemoryHandler(100, target=logging.FileHandler({str(tmp_path / "log")!r}))
kept.emit(logging.LogRecord("x", 20, "x", 1, "logged", (), None))
print("written", end=" ")
exit_process(7)
"""
    done = python(program)
    assert (done.returncode, done.stdout, done.stderr) == (7, "written ", "")
    assert (tmp_path / "log").read_text().strip() == "logged"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells what processes share")
@pytest.mark.nightly
def test_workers_share_the_data_in_memory(tmp_path: Path) -> None:
    samples, size = 60_000, 64
    data = samples * size**2 >> 10  # KiB
    train = Program(tmp_path, fresh=True)
    task = ("data=synthetic", f"data.samples={samples}", f"data.image_size={size}", "batch_size=8")
    process = train.start(*task, "checkpoint_every=20", "strategy=ddp", "devices=2")
    try:
        train.wait_for_checkpoint(process)
        workers = [memory(pid) for pid in workers_of(process)]
    finally:
        train.kill(process)
    assert len(workers) == 2
    for remaining in workers:
        assert remaining["Rss"] > data  # the control: this worker has the data
        assert remaining["Private_Dirty"] < data / 2


def memory(pid: int) -> dict[str, int]:
    """Return the KiB of a process by kind, see proc(5), smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
