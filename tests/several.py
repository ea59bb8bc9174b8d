"""Machines for tests: network namespaces, each with a name, a link, a copy of the project and folders of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import forks
import pytest
from conftest import PATIENCE, STRUCK, Process, Run, summary_of, template, wait_for
from network.machines import Machines

JOB = (*STRUCK, "exact=true", "pieces=4")

SLOW = """
import time
from pathlib import Path

from lightning.pytorch import Callback


class Slow(Callback):
    def on_train_batch_end(self, *args, **kwargs):
        time.sleep(0 if Path("hurry").exists() else 0.2)
"""


class Site:
    """Several machines, none of which sees another one's files."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines, self.names = machines, machines.names
        self.homes = [folder / f"home{index}" for index in range(len(machines.names))]
        for home in self.homes:
            template(home).joinpath("src", "project", "slow.py").write_text(SLOW)
            home.joinpath("conf", "callbacks", "slow.yaml").write_text("slow:\n  _target_: project.slow.Slow\n")
        self.servers = [forks.Server(partial(self._on, index)) for index in range(len(self.homes))]

    def _on(self, index: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        home = self.homes[index]
        return self.machines.start(
            index, command, [other for other in self.homes if other != home], cwd=home, **options
        )

    def start(
        self,
        index: int,
        *options: str,
        launcher: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        script: str = "train.py",
    ) -> Process:
        home = self.homes[index]
        command, environment = [str(home / "src" / script), *options], {**os.environ, **(env or {})}
        if launcher[:1] != ("-u",):
            return forks.Fork([*launcher, *command], home, environment, self.servers[index])
        pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, *launcher, *command]
        return self._on(index, command, env=environment, start_new_session=True, **pipe)

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def kill(self, index: int) -> None:
        """SIGKILL to all that runs on the machine, but for what forks its programs."""
        for pid in self.machines.processes(index):
            with suppress(ProcessLookupError):
                if os.getsid(pid) != self.servers[index].process.pid:
                    os.kill(pid, signal.SIGKILL)

    def start_all(self, *options: str, count: int | None = None) -> list[Process]:
        """The same command on the first `count` machines, which meet by the first one's name."""
        count = count or len(self.homes)
        met = (f"num_nodes={count}", f"rdzv_endpoint={self.names[0]}:29500", "strategy=ddp")
        return [self.start(index, *JOB, *met, *options) for index in range(count)]

    def finish(self, index: int, process: Process, timeout: float = PATIENCE) -> Run:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill(index)
            pytest.fail(f"machine {index} is still running after {timeout:.0f} s\n{process.communicate()}")
        assert process.returncode is not None
        return Run(process.returncode, stdout, stderr, self.homes[index] / "outputs")

    def finish_all(self, processes: list[Process], timeout: float = PATIENCE) -> list[Run]:
        return [self.finish(index, process, timeout) for index, process in enumerate(processes)]

    def saved(self, index: int, process: Process) -> None:
        """Waits until the machine has saved a checkpoint from now on."""
        began = time.time()
        runs = self.homes[index] / "outputs"
        wait_for(lambda: any(file.stat().st_mtime > began for file in runs.rglob("last.ckpt")), process)


def hurry(site: Site, on: bool = True) -> None:
    """Lets steps of runs with callbacks=[default,slow], which take long, take no longer than they need."""
    for home in site.homes:
        (home / "hurry").touch() if on else (home / "hurry").unlink(missing_ok=True)


def ended_well(runs: list[Run], name: str) -> dict[str, object]:
    """The summary of a run that all machines have ended well, of which the first one alone keeps more than its log."""
    assert [run.returncode for run in runs] == [0] * len(runs), "\n".join(map(str, runs))
    for rank, run in enumerate(runs[1:], 1):
        kept = [file.name for file in run.outputs.glob(f"{name}/**/*") if file.is_file()]
        assert {name[:5] for name in kept} == {"rank_"}, f"machine {rank} keeps {kept}"
        assert "completed; the run is on machine" in run.stderr
    (folder,) = runs[0].outputs.glob(f"{name}/*")
    return summary_of(folder)


def stop(process: Process, signum: int = signal.SIGTERM) -> None:
    os.kill(process.pid, signum)
