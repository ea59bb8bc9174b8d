"""Checkpoints of which each rank writes its parts: complete or refused in one line, and never executed."""

import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import Ranks
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.checkpoint.io import AtomicCheckpointIO, CheckpointError, step_of
from lockstep.checkpoint.weights import read_weights
from lockstep.errors import UserError
from lockstep.files import link_file
from lockstep.strategies.saved_parts import INDEX, Part, SavedParts, new_folder_name, stand_in

pytestmark = pytest.mark.filterwarnings("ignore")
RANKS = 3
W = torch.arange(35.0).view(7, 5)  # three rows on ranks 0 and 1, one on rank 2
B = torch.arange(4.0, dtype=torch.float64).to(torch.bfloat16)


def content(step: int) -> dict[str, Any]:
    """Return what rank zero saves: `w` is cut, `momentum` is rank one's, and `b` is in the file."""
    return {
        "state_dict": {"w": stand_in(W.shape, W.dtype), "b": B},
        "optimizer_states": [{"state": {0: {"momentum": stand_in(W.shape, W.dtype), "step": torch.tensor(3.0)}}}],
        "pytorch-lightning_version": "2",
        "global_step": step,
    }


def parts_of(rank: int, scale: float = 1.0) -> dict[str, Part]:
    parts = {"state_dict/w": Part(W[rank * 3 : rank * 3 + 3] * scale, (rank * 3, 0), tuple(W.shape))}
    if rank == 1:
        parts["optimizer_states/0/state/0/momentum"] = Part(-W * scale, (0, 0), tuple(W.shape))
    return parts


def save(ranks: Ranks, folder: Path, *steps: int, best: int | None = None, number: int = 0) -> Path:
    """Save checkpoints of these steps, whose weights are multiples of them. Return the path of the last one."""
    last = paths.last(folder)

    def of_rank(rank: int) -> None:
        io = AtomicCheckpointIO(last=last, number=number)
        for step in steps:
            io.save_parts(content(step), parts_of(rank, step), last)
            if rank == 0 and step == best:
                io.then(link_file, last, paths.best(folder))
        io.teardown()

    ranks(RANKS, of_rank)
    return last


def folders(file: Path) -> list[Path]:
    return sorted(file.parent.glob("parts-*"))


def test_parts_are_read_whole_and_in_regions(ranks: Ranks, tmp_path: Path) -> None:
    file = save(ranks, tmp_path, 1)
    whole = checkpoint_io.load(file)
    assert INDEX not in whole
    assert torch.equal(whole["state_dict"]["w"], W)
    assert torch.equal(whole["state_dict"]["b"], B)
    assert torch.equal(whole["optimizer_states"][0]["state"][0]["momentum"], -W)
    assert not torch.equal(whole["state_dict"]["w"], W + 1), "the control"
    late = checkpoint_io.load(file, whole=False)
    value, saved = late["state_dict"]["w"], late[INDEX]
    assert value.is_meta
    for begin in range(8):
        for size in range(8 - begin):
            assert torch.equal(saved.read(value, (begin, 0), (size, 5)), W[begin : begin + size])
    assert torch.equal(saved.read(value, (2, 1), (3, 2)), W[2:5, 1:3])
    assert read_weights("init_from", file).sets["state_dict"].keys() == {"w", "b"}
    assert step_of(file) == 1


def test_ranks_read_what_rank_zero_sends(ranks: Ranks, tmp_path: Path) -> None:
    """So a machine that does not see the folder can read a checkpoint, too."""
    file = save(ranks, tmp_path, 1)
    loaded = ranks(2, lambda rank: checkpoint_io.load(file, broadcast=True)["state_dict"])
    assert all(torch.equal(each["w"], W) and torch.equal(each["b"], B) for each in loaded)


def test_torch_reads_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    file = save(ranks, tmp_path, 1)
    dcp_to_torch_save(folders(file)[0], tmp_path / "all.pt")
    assert torch.equal(torch.load(tmp_path / "all.pt", weights_only=True)["state_dict/w"], W)


def test_a_folder_goes_with_the_last_file_that_names_it(ranks: Ranks, tmp_path: Path) -> None:
    file = save(ranks, tmp_path, 1, 2, 3, best=1)
    assert len(folders(file)) == 2
    assert checkpoint_io.load(paths.best(tmp_path))["state_dict"]["w"][0, 1] == 1
    assert checkpoint_io.load(file)["state_dict"]["w"][0, 1] == 3
    save(ranks, tmp_path, 4, 5, number=-1)
    assert len(folders(file)) == 3, "of best, step 4 and step 5"
    assert step_of(paths.step_path(file.parent, 4)) == 4


def test_a_folder_that_a_killed_rank_has_left_is_removed(ranks: Ranks, tmp_path: Path) -> None:
    file = save(ranks, tmp_path, 1)
    shutil.copytree(folders(file)[0], abandoned := file.parent / new_folder_name())
    (mine := file.parent / "parts-of-mine").mkdir()
    save(ranks, tmp_path, 2)
    assert not abandoned.exists()
    assert mine.exists()
    mine.rmdir()
    assert step_of(file) == 2


def test_no_folder_is_removed_where_a_file_is_damaged(ranks: Ranks, tmp_path: Path) -> None:
    """Nobody knows which folder it names."""
    file = save(ranks, tmp_path, 1, best=1)
    checkpoint_io.save({"w": torch.zeros(3)}, tmp_path / "checkpoints" / "other.ckpt")
    damaged = bytearray((other := tmp_path / "checkpoints" / "other.ckpt").read_bytes())
    at = damaged.index(b"data.pkl") + 40
    damaged[at : at + 30] = bytes(30)
    other.write_bytes(damaged)
    save(ranks, tmp_path, 2)
    paths.best(tmp_path).unlink()
    save(ranks, tmp_path, 3)
    assert len(folders(file)) == 3
    other.unlink()
    save(ranks, tmp_path, 4)
    assert len(folders(file)) == 1


def cut_off(folder: Path) -> None:
    (part := folder / "__1_0.distcp").write_bytes(part.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((part := folder / "__1_0.distcp").read_bytes())
    content[len(content) // 3] ^= 4
    part.write_bytes(content)


def remove_a_file(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut_off, "__1_0.distcp is cut off"),
        (flip_a_bit, "__1_0.distcp is damaged: its checksums do not match"),
        (remove_a_file, "lacks __1_0.distcp: it must be beside the file"),
        (shutil.rmtree, "lacks all of it: it must be beside the file"),
    ],
)
def test_a_missing_or_damaged_part_is_refused(
    ranks: Ranks, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    file = save(ranks, tmp_path, 1)
    harm(folders(file)[0])
    for whole in (True, False):
        load = partial(checkpoint_io.load, file, broadcast=True, whole=whole)
        errors = ranks(2, lambda rank, load=load: load(), errors=CheckpointError)  # type: ignore[misc]
        assert all(message in str(error) and str(error).startswith(f"{file}: ") for error in errors), errors
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint_io.load(file)
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="init_from="):
        read_weights("init_from", file)
    assert step_of(file) == -1


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_nothing_in_the_folder_is_executed(ranks: Ranks, tmp_path: Path) -> None:
    file, executed = save(ranks, tmp_path, 1), tmp_path / "executed"
    folder = folders(file)[0]
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(executed)))
    assert torch.equal(checkpoint_io.load(file)["state_dict"]["w"], W)
    late = checkpoint_io.load(file, whole=False)
    part = folder / "__0_0.distcp"
    torch.save(Evil(executed), folder / "evil")
    part.write_bytes((folder / "evil").read_bytes() + part.read_bytes()[(folder / "evil").stat().st_size :])
    with pytest.raises(UserError, match="w can't be read"):
        late[INDEX].read(late["state_dict"]["w"])
    assert not executed.exists()
    pickle.loads((folder / ".metadata").read_bytes()).close()
    assert executed.exists(), "the control"


def forged(index: dict[str, Any], change: Callable[[dict[str, Any]], Any], value: Tensor) -> dict[str, Any]:
    made = {"folder": index["folder"], "tensors": {"w": [list(each) for each in index["tensors"]["w"]]}}
    change(made)
    return {"w": value, INDEX: made}


def test_a_forged_index_is_refused(tmp_path: Path) -> None:
    index: dict[str, Any] = {
        "folder": new_folder_name(),
        "tensors": {"w": [[[0, 0], [7, 5], "__0_0.distcp", 0, 1000, 1]]},
    }
    value = stand_in(W.shape, W.dtype)
    SavedParts(tmp_path / "x.ckpt", forged(index, lambda index: None, value))  # the control
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda index: index.update(folder="../elsewhere"),
        lambda index: index.update(folder="checkpoints"),
        lambda index: index.update(folder=3),
        lambda index: index.pop("folder"),
        lambda index: index.update(tensors=[]),
        lambda index: index["tensors"].pop("w"),
        lambda index: index["tensors"].update(other=[]),
        lambda index: index["tensors"]["w"].clear(),
        lambda index: index["tensors"]["w"][0].pop(),
        lambda index: index["tensors"]["w"][0].__setitem__(0, [1, 0]),
        lambda index: index["tensors"]["w"][0].__setitem__(0, [0]),
        lambda index: index["tensors"]["w"][0].__setitem__(0, [-1, 0]),
        lambda index: index["tensors"]["w"][0].__setitem__(2, "../../secret"),
        lambda index: index["tensors"]["w"][0].__setitem__(4, 100),  # fewer bytes than the elements have
    ]
    endless: dict[str, Any] = forged(index, lambda index: None, value)
    endless["itself"] = endless
    for content in (endless, *(forged(index, change, value) for change in changes)):
        with pytest.raises(UserError, match="its index of parts is not as this version writes it"):
            SavedParts(tmp_path / "x.ckpt", content)


def test_a_rank_that_can_not_write_fails_all_and_the_earlier_checkpoint_stays(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(ranks, tmp_path, 1)
    from lockstep.strategies import distributed_checkpoint

    resolve = distributed_checkpoint._PartsToSave.resolve_data

    def full_disk(self: Any, item: Any) -> Tensor:
        if item.index.fqn.endswith("momentum"):
            raise OSError(28, "No space left on device")
        return resolve(self, item)

    monkeypatch.setattr(distributed_checkpoint._PartsToSave, "resolve_data", full_disk)

    def of_rank(rank: int) -> None:
        io = AtomicCheckpointIO()
        io.save_parts(content(2), parts_of(rank, 2), file)
        io.wait()

    errors = ranks(RANKS, of_rank, errors=OSError)
    assert all("rank 1 can't write its parts (No space left on device)" in str(error) for error in errors)
    assert checkpoint_io.load(file)["global_step"] == 1
    assert len(folders(file)) == 1
