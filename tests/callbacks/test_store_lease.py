"""A run that has lost torchrun's store takes no further step."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from plain import Plain, loaders, trainer_with

from lockstep.callbacks import store_lease
from lockstep.callbacks.store_lease import StoreLease, store_leases
from lockstep.errors import WorkerFailed
from lockstep.launch.environment import STORE
from lockstep.programs import torchrun

SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[Any]:
    """Return a process that serves a store, with its address."""
    process: Any = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    process.address = f"127.0.0.1:{process.stdout.readline().strip()}"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


class LosesTheStore(Callback):
    """Before its third step the store does not answer any more, as over a cut link, for `seconds`; or it is gone."""

    def __init__(self, pid: int, number: int, seconds: float) -> None:
        self.pid, self.number, self.seconds = pid, number, seconds

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            os.kill(self.pid, self.number)
            time.sleep(self.seconds)
            os.kill(self.pid, signal.SIGCONT)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_without_an_answer_no_step_is_taken(
    tmp_path: Path, server: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lease, "ASK_SECONDS", 0.1)
    trainer = trainer_with(tmp_path, LosesTheStore(server.pid, number, 3.0), StoreLease(server.address, 2.0))
    with pytest.raises(WorkerFailed, match=rf"^torchrun's store at {server.address} has not answered for 2 s: .*"):
        trainer.fit(Plain(), **loaders())
    assert trainer.global_step == 2


@pytest.mark.usefixtures("processes")
def test_with_answers_the_run_goes_on(tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the store is silent for a shorter time."""
    monkeypatch.setattr(store_lease, "ASK_SECONDS", 0.1)
    trainer = trainer_with(tmp_path, LosesTheStore(server.pid, signal.SIGSTOP, 1.0), StoreLease(server.address, 20.0))
    trainer.fit(Plain(), **loaders())
    assert trainer.global_step == 6


@pytest.mark.usefixtures("whole_run")
def test_a_store_that_is_missing_is_lost_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="has not answered for 1 s"):
        trainer_with(tmp_path, StoreLease("127.0.0.1:1", 1.0)).fit(Plain(), **loaders())


@pytest.mark.parametrize(
    ("arguments", "store"),
    [
        ("--nnodes=1:3 --rdzv-endpoint=10.0.0.2:29500", "10.0.0.2:29500"),
        ("--rdzv_endpoint 10.0.0.2 --nnodes 2:3", "10.0.0.2:29400"),
        ("--nnodes=3 --rdzv-endpoint=10.0.0.2:29500", ""),  # no part of three machines can continue without the rest
        ("--nnodes=1:3", ""),
    ],
)
def test_torchrun_is_told_the_store_if_fewer_machines_may_continue(
    arguments: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.execve", lambda program, words, variables: started.append((words, variables)))
    words = [*arguments.split(), "src/train.py", "--nnodes=1:9", "--help"]
    torchrun.main(words)
    ((command, variables),) = started
    assert command[-len(words) :] == words, "the last ones of torchrun's options count"
    assert variables.get(STORE, "") == store
    assert any(word.startswith("--rdzv-conf=is_host=0,") for word in command) == ("10.0.0.2" in arguments)
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_only_workers_of_torchrun_have_one(set_environment: Callable[..., None]) -> None:
    set_environment(**{STORE: "127.0.0.1:1"})
    assert store_leases() == []
    set_environment(RANK="1", WORLD_SIZE="2", LOCAL_RANK="0", TORCHELASTIC_RUN_ID="a")
    (lease,) = store_leases()
    assert isinstance(lease, StoreLease)
    lease.on_train_start()  # rank one does not ask: where the network is cut, it waits for rank zero
    lease.on_before_optimizer_step()
