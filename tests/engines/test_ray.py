"""Ray Train: one TorchTrainer with two workers on CPUs, which have a process group before the run begins."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MARK, ROOT, Run, wait_for
from engines.sites import JOB, SECONDS, SLOW, Site, ended_well, everything

# Ray and what it needs have a folder of their own, so that all other tests run without them: see install.sh.
FOLDER = Path(sys.prefix) / "engines"
pytestmark = [
    pytest.mark.nightly,  # Ray has time limits of its own for its start, which other tests beside it exceed
    pytest.mark.skipif(not (FOLDER / "ray").is_dir(), reason="Ray is not installed (tests/engines/install.sh)"),
]


def start(site: Site, *overrides: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(site.home / "src"), str(FOLDER)])
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "HOME": str(site.home)}  # Ray keeps a token there
    quiet |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(SECONDS)}  # 60, too few on a busy machine
    program = ROOT / "tests" / "engines" / "ray_program.py"
    return site.start("python", str(program), *overrides, env={"PYTHONPATH": path, **quiet})


def workers() -> list[int]:
    """Return the process ids of the workers that Ray has started for this test session."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    running = {int(folder.name): folder for folder in Path("/proc").glob("[0-9]*")}
    named = {pid: folder for pid, folder in running.items() if b"RayTrainWorker" in read(folder / "cmdline")}
    return [pid for pid, folder in named.items() if mark in read(folder / "environ")]


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # gone meanwhile
        return b""


def test_a_torch_trainer_of_two_workers_is_lost_and_goes_on(site: Site, one_device: Run) -> None:
    outputs = f"outputs={site.outputs}"
    process = start(site, "strategy=ddp", *JOB, SLOW, "name=ray", outputs)
    folder = site.wait_for_checkpoint("ray", process)
    actual = wait_for(workers, process)
    os.kill(actual[-1], signal.SIGKILL)
    assert site.finish(process).returncode != 0
    site.hurry()
    run = site.finish(start(site, f"resume={folder}"))
    assert run.returncode == 0, str(run)
    summary = ended_well("ray", [site], one_device, everything(run))
    assert (summary["layout"]["devices"], summary["layout"]["num_nodes"]) == (2, 1), "as Ray has started them"
