"""`strategy=fsdp`: a fault while a checkpoint is gathered, written or read leaves one to continue from."""

import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies.sharded_runs import by_day, on, train

import lockstep
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import part_files, parts
from lockstep.errors import UserError, WorkerFailed
from lockstep.strategies import FSDP
from lockstep.strategies.fsdp.checkpoints import CheckpointParts
from lockstep.strategies.fsdp.strategy import FullySharded

STEPS = 6
# the function that is called at each moment, its owner and its name
MOMENTS: dict[str, tuple[Any, str]] = {
    "a pass": (FullySharded, "training_step"),
    "the optimizer": (torch.optim.AdamW, "step"),
    "gathering": (CheckpointParts, "to_save"),
    "writing parts": (part_files._PartsToSave, "resolve_data"),
    "writing the file": (checkpoint_io, "save"),
    "removing the earlier parts": (checkpoint_io.AtomicCheckpointIO, "_remove_parts"),
    "reading": (parts.SavedParts, "read"),
}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("a planted error")


def lack_memory() -> None:
    status = Path("/proc/self/status").read_text()
    size = int(status.partition("VmSize:")[2].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
    torch.empty(1 << 28)


def fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def disturbed(
    folder: Path, strategy: Any, moment: str, rank: int, call: int, strike: Callable[[], None], **options: Any
) -> str:
    """Train and save after each step. On one rank, call `strike` in a certain call of the function of a moment."""
    torch.set_num_threads(1)
    owner, name = MOMENTS[moment]
    method, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            strike()
        return method(*args, **kwargs)

    if torch.distributed.get_rank() == rank:
        setattr(owner, name, counted)
    return train(folder, strategy, "vit", "adamw", checkpoint_every=1, **options)


def undisturbed(folder: Path) -> str:
    return train(folder, "auto", "vit", "adamw")


def step_of(folder: Path) -> int:
    return checkpoint_io.step_of(folder / "checkpoints" / "last.ckpt")


WHOLE: Any = "whole"
SHARDED: Any = "sharded"
KILLS = [
    (WHOLE, "a pass", 0, 29),
    (SHARDED, "a pass", 1, 29),
    (WHOLE, "gathering", 0, 40),
    (WHOLE, "gathering", 1, 40),
    (SHARDED, "gathering", 1, 40),
    (SHARDED, "writing parts", 0, 40),
    (SHARDED, "writing parts", 1, 40),
    (SHARDED, "writing the file", 0, 3),
    (SHARDED, "removing the earlier parts", 0, 3),
]
FEW = (KILLS[3], KILLS[6])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("checkpoint", "moment", "rank", "call"), by_day(KILLS, FEW))
def test_a_rank_that_is_killed_costs_no_more_than_a_step(
    tmp_path: Path, checkpoint: Any, moment: str, rank: int, call: int
) -> None:
    strategy = FSDP(checkpoint=checkpoint)
    with pytest.raises(WorkerFailed, match=f"rank {rank} .*SIGKILL") as error:
        on(2, disturbed, tmp_path, strategy, moment, rank, call, kill)
    assert "\n" not in str(error.value)
    assert 1 <= step_of(tmp_path) < STEPS
    assert on(2, partial(train, ckpt_path="last"), tmp_path, strategy, "vit", "adamw") == train(
        tmp_path / "one", "auto", "vit", "adamw"
    )
    assert len([*(tmp_path / "checkpoints").glob("parts-*")]) == (checkpoint == SHARDED)
    assert [each.name for each in (tmp_path / "checkpoints").glob(".*")] == []


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_a_rank_that_is_frozen_while_it_writes_ends_the_run_in_time(tmp_path: Path) -> None:
    arguments = (tmp_path, FSDP(checkpoint=SHARDED), "writing parts", 1, 40, freeze)
    with pytest.raises(WorkerFailed, match=r"^rank 1 did not join the other ranks within 8 s"):
        lockstep.launch(disturbed, *arguments, devices=2, accelerator="cpu", hang_timeout=8)
    assert 1 <= step_of(tmp_path) < STEPS


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_a_rank_that_is_killed_while_it_reads_changes_nothing(tmp_path: Path) -> None:
    strategy = FSDP(checkpoint=SHARDED)
    on(2, partial(train, max_epochs=1), tmp_path, strategy, "vit", "adamw")
    with pytest.raises(WorkerFailed, match=r"rank 1 .*SIGKILL"):
        on(3, partial(disturbed, ckpt_path="last"), tmp_path, strategy, "reading", 1, 5, kill)
    assert on(3, partial(train, ckpt_path="last"), tmp_path, strategy, "vit", "adamw") == train(
        tmp_path / "one", "auto", "vit", "adamw"
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("checkpoint", "moment", "rank", "call", "strike", "message"),
    [
        (
            WHOLE,
            "a pass",
            1,
            29,  # a rank has 20 passes before the first step, which try the module, and three in a step
            lack_memory,
            r"^step [2-6]: out of memory in 6 pieces of 2 samples with strategy=fsdp: ",
        ),
        pytest.param(
            *(WHOLE, "the optimizer", 0, 3, lack_memory),
            r"(?m)^step 3: out of memory in the optimizer with strategy=fsdp: .*, or strategy.reshard=true$",
            marks=pytest.mark.nightly,
        ),
        (WHOLE, "gathering", 1, 40, fail, "a planted error"),
        (SHARDED, "writing parts", 1, 40, fill_the_disk, r"rank 1 can't write its parts \(File too large\)"),
        pytest.param(SHARDED, "writing parts", 0, 40, fail, "a planted error", marks=pytest.mark.nightly),
    ],
)
def test_an_error_ends_the_run_and_the_earlier_checkpoint_stays(
    tmp_path: Path, checkpoint: Any, moment: str, rank: int, call: int, strike: Callable[[], None], message: str
) -> None:
    with pytest.raises((WorkerFailed, OSError, RuntimeError, UserError), match=message):
        on(2, disturbed, tmp_path, FSDP(checkpoint=checkpoint), moment, rank, call, strike)
    assert 1 <= step_of(tmp_path) < STEPS
    last = checkpoint_io.load(tmp_path / "checkpoints" / "last.ckpt")
    assert last["global_step"] == step_of(tmp_path)
    assert len([*(tmp_path / "checkpoints").glob("parts-*")]) == (checkpoint == SHARDED)
