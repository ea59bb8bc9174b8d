"""Checkpoint files: whole or refused by name, and no code in them."""

import multiprocessing
import os
import pickle
import sys
import time
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torchvision
from conftest import forked
from plain import PATHS

from lockstep import files as atomic
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.checkpoint.io import AtomicCheckpointIO, CheckpointError
from lockstep.checkpoint.record import FORMAT
from lockstep.checkpoint.start import load_start
from lockstep.testing.fake_gpu import DEVICE, WAITS, fake_gpu

RECORD = {"format": FORMAT, "seed": 0}


def plain(value: float = 1.0) -> dict[str, Any]:
    return {"pytorch-lightning_version": "2", "state_dict": {"w": torch.full((5000,), value)}, "lockstep": RECORD}


def test_a_gpu_is_not_waited_for_until_the_file_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    with fake_gpu() as gpu:
        state = {"a": torch.zeros(3, device=DEVICE), "b": [torch.zeros(2, device=DEVICE)], "c": torch.zeros(1), "d": 5}
        copy, wait = checkpoint_io.copied_to_cpu(state)
        assert gpu.faults == {}
        assert {each.device.type for each in (copy["a"], copy["b"][0], copy["c"])} == {"cpu"}
        assert copy["c"].data_ptr() != state["c"].data_ptr()  # type: ignore[attr-defined]
        event = stream.return_value.record_event.return_value
        assert (stream.call_count, event.synchronize.call_count) == (1, 0)  # one for all tensors
        wait()
        assert event.synchronize.call_count == 1
        state["a"].cpu()  # type: ignore[attr-defined]
        assert list(gpu.faults.values()) == [WAITS]  # the control


def test_the_writer_waits_before_it_reads_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(checkpoint_io, "copied_to_cpu", lambda state: (state, lambda: order.append("wait")))
    monkeypatch.setattr(checkpoint_io, "save", lambda *args: order.append("save"))
    writer = AtomicCheckpointIO([Mock(before_write=lambda checkpoint: order.append("observer"))])
    writer.save_checkpoint(plain(), tmp_path / "last.ckpt")
    writer.wait()
    assert order == ["wait", "observer", "save"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint_io.save(plain(), tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def test_layers_keep_the_versions_that_their_loading_asks_for(tmp_path: Path) -> None:
    """torchvision's MNASNet can't load weights without."""
    state = torchvision.models.mnasnet0_5(num_classes=2).state_dict()
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"state_dict": state, "pytorch-lightning_version": "2"}, tmp_path / "last.ckpt")
    writer.wait()
    torchvision.models.mnasnet0_5(num_classes=2).load_state_dict(
        checkpoint_io.load(tmp_path / "last.ckpt")["state_dict"]
    )


def test_a_checkpoint_comes_back_and_is_an_ordinary_one(saved: Path) -> None:
    assert torch.equal(checkpoint_io.load(saved)["state_dict"]["w"], plain()["state_dict"]["w"])
    assert torch.load(saved, weights_only=True)["lockstep"] == RECORD
    assert zipfile.ZipFile(saved).testzip() is None
    assert os.listdir(saved.parent) == ["last.ckpt"]


def test_a_file_with_a_changed_byte_is_refused(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[content.index(plain()["state_dict"]["w"].numpy().tobytes()) + 2] ^= 1
    saved.write_bytes(content)
    assert torch.load(saved, weights_only=True)["state_dict"]["w"][0] != 1, "the control: torch reads it"
    with pytest.raises(CheckpointError, match=r"last.ckpt: the file is damaged: its checksums do not match$"):
        checkpoint_io.load(saved)
    assert checkpoint_io.damage(saved, checksums=False) == ""


def test_what_a_worker_has_read_is_handed_over_once(saved: Path) -> None:
    content = checkpoint_io.load(saved)
    writer = AtomicCheckpointIO(loaded=content)
    references = sys.getrefcount(content)
    assert writer.load_checkpoint(saved) is content
    assert sys.getrefcount(content) < references, "it is large"
    assert writer.load_checkpoint(saved) is not content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        (b"", "torch.save did not write it"),
        (b"epoch,step,loss\n", "torch.save did not write it"),
        (pickle.dumps({"state_dict": {}}), "torch.save did not write it"),
        (0.5, "cut off"),
    ],
)
def test_what_is_no_checkpoint_is_named(saved: Path, content: bytes | float | None, reason: str) -> None:
    if content is None:
        saved.unlink()
    elif isinstance(content, float):
        saved.write_bytes(saved.read_bytes()[: int(saved.stat().st_size * content)])
    else:
        saved.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        checkpoint_io.load(saved)
    assert str(saved) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_and_a_foreign_file_of_torch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        checkpoint_io.load(tmp_path)
    torch.save({"hello": 1}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a Lockstep or Lightning checkpoint"):
        checkpoint_io.load(tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(CheckpointError, match=r"some\.zip"):
        checkpoint_io.load(tmp_path / "some.zip")


def test_no_run_continues_from_what_no_run_has_saved(tmp_path: Path) -> None:
    checkpoint_io.save(plain(), tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(
        CheckpointError, match=r"last.ckpt: no lockstep.Trainer has saved it, .*: init_from= begins a new"
    ):
        load_start(tmp_path, None, {}, [0])


def test_a_file_that_is_being_written_is_loaded_when_it_is_complete(tmp_path: Path) -> None:
    writer = AtomicCheckpointIO()
    writer.then(time.sleep, 0.2)
    writer.then(checkpoint_io.save, plain(2.0), tmp_path / "new.ckpt")
    assert writer.load_checkpoint(tmp_path / "new.ckpt").keys() == plain(2.0).keys()


def test_what_could_not_be_loaded_is_not_saved(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(CheckpointError, match=r"not saved.*pathlib"):
        checkpoint_io.save({**plain(2.0), "folder": Path("/")}, saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["last.ckpt"]


def test_the_best_stays_what_it_was_where_the_new_one_cannot_be_saved(saved: Path) -> None:
    best, writer = saved.with_name("best.ckpt"), AtomicCheckpointIO()
    best.write_bytes(b"the best before")
    writer.save_checkpoint({**plain(), "lockstep": print}, saved)  # code, which is not saved
    writer.then(atomic.link_file, saved, best)
    with pytest.raises(CheckpointError, match="not saved"):
        writer.wait()
    writer.then(lambda: None)
    writer.wait()  # for the thread, which may come to the second task only now
    assert best.read_bytes() == b"the best before"
    writer.save_checkpoint(plain(2.0), saved)
    writer.then(atomic.link_file, saved, best)
    writer.teardown()
    assert best.samefile(saved)


@pytest.mark.parametrize(("number", "remaining"), [(1, [6]), (2, [4, 6]), (9, [2, 4, 6]), (-1, [2, 4, 6])])
def test_step_checkpoints_are_the_latest_up_to_this_one(saved: Path, number: int, remaining: list[int]) -> None:
    """Also in a run that went back from step 8: that file is of steps which no longer count."""
    for step in (2, 4, 8):
        paths.step_path(saved.parent, step).write_bytes(b"")
    checkpoint_io.keep_step_checkpoint(saved, 6, number)
    assert list(paths.step_checkpoints(saved.parent)) == remaining
    assert paths.step_path(saved.parent, 6).samefile(saved)


KILLS = """
import os, sys, time; sys.path[:0] = sys.argv[1].split(':')
import torch
import torchvision
from lockstep.checkpoint import io as checkpoint_io
torch.set_num_threads(1)
content = {'pytorch-lightning_version': '2', 'state_dict': {'w': torch.zeros(500_000)}}
for delay in (0.02, 0.05, 0.1):
    child = os.fork()
    while child == 0:
        checkpoint_io.save(content, sys.argv[2])
    time.sleep(delay)
    os.kill(child, 9)
    os.waitpid(child, 0)
    checkpoint_io.load(sys.argv[2])
"""


@pytest.mark.usefixtures("processes")
def test_killed_while_saving_the_old_file_is_whole(saved: Path) -> None:
    program = saved.parent.with_name("kills.py")
    program.write_text(KILLS)
    done = forked(program, PATHS, str(saved))
    assert done.returncode == 0, done.stderr
    assert set(os.listdir(saved.parent)) <= {"last.ckpt", ".last.ckpt.tmp"}
    checkpoint_io.save(plain(), saved)
    assert os.listdir(saved.parent) == ["last.ckpt"]  # what the killed process left is gone


def write_often(path: str, letter: str) -> None:
    for _ in range(200):
        atomic.write(path, letter.encode() * 5000)


@pytest.mark.usefixtures("processes")
def test_several_processes_that_write_one_file_leave_a_whole_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(str(tmp_path / "file"), letter)) for letter in "abcdef"]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert [each.exitcode for each in writers] == [0] * 6
    content = (tmp_path / "file").read_text()
    assert content == content[0] * 5000
    assert os.listdir(tmp_path) == ["file"]


def test_a_second_name_keeps_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last, best = tmp_path / "last", tmp_path / "best"
    last.write_text("one")
    atomic.link_file(last, best)
    assert last.samefile(best)
    atomic.link_file(last, best)
    assert sorted(os.listdir(tmp_path)) == ["best", "last"], "nothing beside them"
    with atomic.replacing(last) as file:
        file.write(b"two")
    assert (last.read_text(), best.read_text()) == ("two", "one")

    def no_links(*args: Any) -> None:
        raise OSError(1, "not here")

    monkeypatch.setattr(os, "link", no_links)
    atomic.link_file(last, best)
    assert best.read_text() == "two"
    assert not last.samefile(best)


@pytest.mark.parametrize("of_run", [True, False], ids=["of the run", "of a user"])
def test_copies_are_made_of_the_runs_last_checkpoint_only(tmp_path: Path, of_run: bool) -> None:
    last = tmp_path / "checkpoints" / "last.ckpt"
    path = last if of_run else tmp_path / "shared" / "step_7.ckpt"
    path.parent.mkdir()
    for step in (1, 2, 9):
        (path.parent / f"step_{step}.ckpt").touch()
    writer = AtomicCheckpointIO(last=last, number=2)
    writer.save_checkpoint({**plain(), "global_step": 8}, path)
    writer.wait()
    steps = [*paths.step_checkpoints(path.parent)]
    assert steps == ([2, 8] if of_run else [1, 2, 7, 9])


@pytest.mark.parametrize("place", ["cnn_digits/2026-01-02", "cnn_digits/sweeps/2026-01-02/3"])
def test_a_machine_without_the_folder_puts_it_at_the_same_place(place: str) -> None:
    checkpoint = paths.last(Path("/there/outputs", place))
    assert paths.place_in_outputs(paths.run_of(checkpoint)) == Path(place)
