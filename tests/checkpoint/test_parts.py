"""Checkpoints of which each rank writes its parts: complete or refused in one line, and never executed."""

import hashlib
import re
import shutil
import threading
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import lockstep
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import part_files, paths
from lockstep.checkpoint.io import AtomicCheckpointIO, CheckpointError, step_of
from lockstep.checkpoint.parts import INDEX, SavedParts, new_folder_name
from lockstep.checkpoint.weights import read_weights
from lockstep.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")
RANKS = 3
W = torch.arange(35.0).view(7, 5)  # three rows on ranks 0 and 1, one on rank 2
FILE = "shard-{:05d}-model-00001-of-00001.safetensors"
B = torch.arange(4.0, dtype=torch.float64).to(torch.bfloat16)


def empty() -> Tensor:
    return torch.empty(W.shape, dtype=W.dtype, device="meta")


def content(step: int) -> dict[str, Any]:
    """Return what rank zero saves: `w` is cut, `momentum` is rank one's, and `b` is in the file."""
    return {
        "state_dict": {"w": empty(), "b": B},
        "optimizer_states": [{"state": {0: {"momentum": empty(), "step": torch.tensor(3.0)}}}],
        "pytorch-lightning_version": "2",
        "global_step": step,
    }


def parts_of(rank: int, content: dict[str, Any], scale: float = 1.0) -> list[Any]:
    parts = [(content["state_dict"]["w"], W[rank * 3 : rank * 3 + 3] * scale, (rank * 3, 0))]
    if rank == 1 and content["optimizer_states"]:
        parts.append((content["optimizer_states"][0]["state"][0]["momentum"], -W * scale, (0, 0)))
    return parts


def save_step(io: AtomicCheckpointIO, rank: int, step: int, file: Path) -> None:
    """Save a checkpoint whose weights are multiples of the step."""
    made = content(step)
    io.save_parts(made, parts_of(rank, made, step), file)


def save(ranks: Ranks, folder: Path, *steps: int, best: int | None = None, number: int = 0) -> Path:
    """Save checkpoints of these steps, whose weights are multiples of them. Return the path of the last one."""
    last = paths.last(folder)

    def of_rank(rank: int) -> None:
        io = AtomicCheckpointIO(last=last, number=number)
        for step in steps:
            save_step(io, rank, step, last)
            if rank == 0 and step == best:
                io.link_checkpoint(last, paths.best(folder))
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


def test_torch_and_safetensors_read_the_folder_and_nothing_in_it_is_a_pickle(ranks: Ranks, tmp_path: Path) -> None:
    folder = folders(save(ranks, tmp_path, 1))[0]
    assert sorted(each.name for each in folder.iterdir()) == [FILE.format(rank) for rank in (1, 2, 3)]
    state = {"state_dict/w": torch.zeros_like(W), "optimizer_states/0/state/0/momentum": torch.zeros_like(W)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert torch.equal(state["state_dict/w"], W)
    assert torch.equal(state["optimizer_states/0/state/0/momentum"], -W)
    assert torch.equal(load_file(folder / FILE.format(3))["state_dict/w"], W[6:])


def test_large_parts_are_in_several_files(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "FILE_SIZE", 50)
    file = save(ranks, tmp_path, 1)
    assert [each.name for each in sorted(folders(file)[0].iterdir())] == [
        "shard-00001-model-00001-of-00002.safetensors",
        "shard-00002-model-00001-of-00002.safetensors",
        "shard-00002-model-00002-of-00002.safetensors",
        "shard-00003-model-00001-of-00002.safetensors",
    ]
    whole = checkpoint_io.load(file)
    assert torch.equal(whole["state_dict"]["w"], W)
    assert torch.equal(whole["optimizer_states"][0]["state"][0]["momentum"], -W)


def test_a_folder_goes_with_the_last_file_that_names_it(ranks: Ranks, tmp_path: Path) -> None:
    file = save(ranks, tmp_path, 1, 2, 3, best=1)
    assert len(folders(file)) == 2
    assert checkpoint_io.load(paths.best(tmp_path))["state_dict"]["w"][0, 1] == 1
    assert checkpoint_io.load(file)["state_dict"]["w"][0, 1] == 3
    save(ranks, tmp_path, 4, 5, number=-1)
    assert len(folders(file)) == 3, "of best, step 4 and step 5"
    assert step_of(paths.step_path(file.parent, 4)) == 4


def test_a_folder_that_a_killed_rank_has_left_is_removed_when_a_run_starts(ranks: Ranks, tmp_path: Path) -> None:
    """During a run, it may be one that another run writes to the same folder."""
    file = save(ranks, tmp_path, 1)
    shutil.copytree(folders(file)[0], abandoned := file.parent / new_folder_name())
    (mine := file.parent / "parts-of-mine").mkdir()
    save(ranks, tmp_path, 2, 3)
    io = AtomicCheckpointIO()
    checkpoint_io.copy_checkpoint(file, old := tmp_path / "mine" / "old.ckpt")
    io.remove_checkpoint(old)
    io.link_checkpoint(file, paths.best(tmp_path))
    io.teardown()
    assert not folders(old)
    assert abandoned.exists()
    assert len(folders(file)) == 3
    checkpoint_io.remove_unused_parts(file.parent)
    assert not abandoned.exists()
    assert mine.exists()
    mine.rmdir()
    assert step_of(file) == 3
    assert len(folders(file)) == 1


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
    checkpoint_io.remove_unused_parts(file.parent)
    assert len(folders(file)) == 3
    other.unlink()
    save(ranks, tmp_path, 4)
    checkpoint_io.remove_unused_parts(file.parent)
    assert len(folders(file)) == 1


def cut_off(folder: Path) -> None:
    (part := folder / FILE.format(2)).write_bytes(part.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((part := folder / FILE.format(2)).read_bytes())
    content[-50] ^= 4  # in the numbers: torch's reader takes it for another number
    part.write_bytes(content)


def swap_two(folder: Path) -> None:
    first, second = folder / FILE.format(1), folder / FILE.format(3)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def remove_a_file(folder: Path) -> None:
    (folder / FILE.format(2)).unlink()


def add_a_file(folder: Path) -> None:
    save_file({"state_dict/w": W}, folder / "a.safetensors")


DAMAGED = f"{FILE.format(2)} is damaged, or is another file: its SHA-256 does not match"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut_off, DAMAGED),
        (flip_a_bit, DAMAGED),
        (swap_two, DAMAGED.replace(FILE.format(2), FILE.format(1))),
        (remove_a_file, f"lacks {FILE.format(2)}: it must be beside the file"),
        (add_a_file, "has a.safetensors, which is no part of it: move it elsewhere"),
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


def test_parts_of_another_checkpoint_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Also where their SHA-256 are the ones that the file has: of a forged file, or of another module."""
    file = save(ranks, tmp_path, 1)
    right = torch.load(file, weights_only=True)
    folder = folders(file)[0]

    def wrong(change: Callable[[dict[str, Any]], Any]) -> str:
        changed = deepcopy(right)
        change(changed)
        torch.save(changed, file)
        with pytest.raises(CheckpointError) as error:
            checkpoint_io.load(file)
        return str(error.value).partition(f"{folder.name}, the folder of its parts")[2]

    def shape(content: dict[str, Any], *sizes: int, dtype: torch.dtype = W.dtype) -> None:
        content["state_dict"]["w"] = torch.empty(sizes, dtype=dtype, device="meta")

    def without(content: dict[str, Any]) -> None:
        content["optimizer_states"] = []
        content[INDEX]["tensors"] = ["state_dict/w"]

    others: list[Callable[[dict[str, Any]], Any]] = [
        lambda content: shape(content, 7, 6),
        lambda content: shape(content, 35),
        lambda content: shape(content, 7, 5, dtype=torch.float64),
        without,
    ]
    assert [wrong(change) for change in others] == [": has other tensors than the file"] * len(others)
    part = folder / FILE.format(3)
    metadata = {"DCP_SHARDING_INFO": '{"state_dict/w": {"saved_offsets": [6, 0]}}'}
    for tensors in ({"state_dict/w": W[:2]}, {"other": W[6:]}, {}):  # a gap, another name, nothing
        save_file(tensors, part, metadata)
        digest = hashlib.sha256(part.read_bytes()).hexdigest()
        message = wrong(lambda content, digest=digest: content[INDEX]["sha256"].update({part.name: digest}))  # type: ignore[misc]
        assert message in (": has other tensors than the file", ": is damaged (KeyError)"), tensors
    part.write_bytes(b"")
    digest = hashlib.sha256(b"").hexdigest()
    assert ": is damaged (" in wrong(lambda content: content[INDEX]["sha256"].update({part.name: digest}))


def test_what_a_forged_file_says_about_its_parts_is_refused(tmp_path: Path) -> None:
    name = FILE.format(1)

    def forged(change: Callable[[dict[str, Any]], Any], **more: Any) -> dict[str, Any]:
        index: dict[str, Any] = {"folder": new_folder_name(), "sha256": {name: "0" * 64}, "tensors": ["w"]}
        change(index)
        return {"w": empty(), INDEX: index, **more}

    SavedParts(tmp_path / "x.ckpt", forged(lambda index: None))  # the control
    endless = forged(lambda index: None)
    endless["itself"] = endless
    SavedParts(tmp_path / "x.ckpt", endless)
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda index: index.update(folder="../elsewhere"),
        lambda index: index.update(folder="checkpoints"),
        lambda index: index.update(folder=3),
        lambda index: index.pop("folder"),
        lambda index: index.update(tensors=[]),
        lambda index: index.update(tensors=3),
        lambda index: index.update(tensors=["w", "v"]),
        lambda index: index.pop("tensors"),
        lambda index: index.update(sha256={}),
        lambda index: index.update(sha256={f"../{name}": "0"}),
        lambda index: index.update(sha256={3: "0"}),
        lambda index: index.update(sha256={".metadata": "0"}),
        lambda index: index.update(sha256=[name]),
        lambda index: index.pop("sha256"),
    ]
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    value = empty()
    for content in (
        forged(lambda index: None, nested=nested),
        forged(lambda index: index.update(tensors=["w", "tuple/0"]), tuple=(value,)),
        *map(forged, changes),
    ):
        with pytest.raises(UserError, match="what it says about its parts is not as this version writes it"):
            SavedParts(tmp_path / "x.ckpt", content)


def test_a_rank_that_can_not_write_fails_all_and_the_earlier_checkpoint_stays(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(ranks, tmp_path, 1)
    resolve = part_files._PartsToSave.resolve_data

    def full_disk(self: Any, item: Any) -> Any:
        if item.index.fqn.endswith("momentum"):
            raise OSError(28, "No space left on device")
        return resolve(self, item)

    monkeypatch.setattr(part_files._PartsToSave, "resolve_data", full_disk)

    def of_rank(rank: int) -> None:
        io = AtomicCheckpointIO()
        save_step(io, rank, 2, file)
        io.wait()

    errors = ranks(RANKS, of_rank, errors=OSError)
    assert all("rank 1 can't write its parts (No space left on device)" in str(error) for error in errors)
    assert checkpoint_io.load(file)["global_step"] == 1
    assert len(folders(file)) == 1


def test_an_error_while_rank_zero_reads_is_raised_on_all_ranks(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(ranks, tmp_path, 1)
    zeros = torch.zeros

    def lack_memory(*args: Any, **kwargs: Any) -> Tensor:
        if args[0] == W.shape:
            raise RuntimeError("can't allocate memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", lack_memory)
    errors = ranks(2, lambda rank: checkpoint_io.load(file, broadcast=True), errors=CheckpointError)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[1]).startswith(
        f"{file}: {folders(file)[0].name}: state_dict/w can't be read (RuntimeError: can't"
    )


def test_a_file_with_tensors_without_data_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    empty: dict[str, Any] = content(1)
    torch.save(empty, file := tmp_path / "empty.ckpt")
    has_none = f"{file}: state_dict/w has no data, only a shape \\(device meta\\): save it again, from a model"
    for error in ranks(2, lambda rank: checkpoint_io.load(file, broadcast=True), errors=CheckpointError):
        assert re.match(has_none, str(error))
    with pytest.raises(CheckpointError, match=f"init_from={has_none}"):
        read_weights("init_from", file)
    with pytest.raises(CheckpointError, match=f"{file}: not saved, because state_dict/w has no data"):
        checkpoint_io.save(empty, file)
    itself: dict[str, Any] = {"state_dict": {"w": W}}
    itself["itself"] = itself
    torch.save(itself, file)
    assert torch.equal(read_weights("init_from", file).sets["state_dict"]["w"], W), "the control"


@pytest.mark.parametrize(
    ("hook", "named"),
    [
        (lambda checkpoint: checkpoint.update(mine=(checkpoint["state_dict"]["w"],)), "mine/0"),
        (lambda checkpoint: checkpoint.update(mine=[{checkpoint["state_dict"]["w"]}]), "mine/0/0"),
        (lambda checkpoint: checkpoint.update(mine=deepcopy(checkpoint["state_dict"])), "mine/w"),
        (lambda checkpoint: checkpoint["state_dict"].update(w=checkpoint["state_dict"]["w"].half()), "state_dict/w"),
        (lambda checkpoint: checkpoint.update(mine=[checkpoint["state_dict"]["w"]]), ""),
        (lambda checkpoint: checkpoint.update(mine=checkpoint["state_dict"]), ""),
        (lambda checkpoint: checkpoint.update(mine=(checkpoint["state_dict"]["b"],)), ""),
    ],
)
def test_what_a_hook_does_with_a_tensor_without_data_is_saved_or_refused(
    ranks: Ranks, tmp_path: Path, hook: Callable[[dict[str, Any]], Any], named: str
) -> None:
    """As a strategy saves a checkpoint after the hooks `on_save_checkpoint`."""
    file = tmp_path / "a.ckpt"

    def of_rank(rank: int) -> None:
        checkpoint: dict[str, Any] = {**content(1), "optimizer_states": []}
        parts = parts_of(rank, checkpoint)
        hook(checkpoint)
        io = AtomicCheckpointIO()
        io.save_parts(checkpoint, parts, file)
        io.teardown()

    errors = ranks(RANKS, of_rank, errors=CheckpointError)
    if named:
        assert str(errors[0]).startswith(f"{file}: not saved, because {named} has no data (device meta): on_save"), (
            errors
        )
        assert errors[1:] == [None, None]
        assert not file.exists()
        assert not folders(file)
    else:
        assert errors == [None] * RANKS
        loaded = checkpoint_io.load(file)
        assert torch.equal(loaded["state_dict"]["w"], W)
        mine = loaded["mine"]
        assert torch.equal(mine["w"] if isinstance(mine, dict) else mine[0], W if isinstance(mine, list | dict) else B)


def test_a_file_is_removed_when_those_before_it_are_written(tmp_path: Path) -> None:
    """So a process that is killed leaves one of them."""
    old, new, may_write = tmp_path / "old.ckpt", tmp_path / "new.ckpt", threading.Event()
    old.touch()
    io = AtomicCheckpointIO()
    io.then(lambda: None if may_write.wait(10) else pytest.fail("it has waited"))
    io.then(new.touch)
    io.remove_checkpoint(old)
    assert old.exists()
    may_write.set()
    io.wait()
    assert new.exists()
    assert not old.exists()
    io.then((tmp_path / "missing" / "file").touch)
    io.remove_checkpoint(new)
    with pytest.raises(FileNotFoundError):
        io.teardown()
    assert new.exists(), "a write that has failed"


def test_parts_are_written_within_the_timeout_of_the_run(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker that is frozen while it writes would keep the others from ending."""
    groups, new_group = [], torch.distributed.new_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        groups.append((kwargs["timeout"].total_seconds(), kwargs["backend"]))
        return new_group(*args, **kwargs)

    monkeypatch.setattr(torch.distributed, "new_group", noted)

    def of_rank(rank: int) -> None:
        io = AtomicCheckpointIO(timeout=7)
        save_step(io, rank, 1, tmp_path / "a.ckpt")
        io.teardown()

    ranks(RANKS, of_rank)
    assert groups == [(7, "gloo")] * RANKS, "gloo, since a thread writes while training uses the other group"


def test_a_checkpoint_is_copied_with_its_parts(ranks: Ranks, tmp_path: Path) -> None:
    file, copy = save(ranks, tmp_path, 1), tmp_path / "trial" / "last.ckpt"
    copy.parent.mkdir()
    checkpoint_io.copy_checkpoint(file, copy)
    shutil.rmtree(file.parent)
    assert torch.equal(checkpoint_io.load(copy)["state_dict"]["w"], W)
    shutil.rmtree(folders(copy)[0])
    checkpoint_io.copy_checkpoint(copy, file := tmp_path / "again.ckpt")
    with pytest.raises(CheckpointError, match=r"again.ckpt: .*lacks all of it: it must be beside the file"):
        checkpoint_io.load(file)


class Whole(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(7, 5)), nn.Parameter(torch.zeros(4))


def test_lightning_alone_does_not_read_a_file_without_its_parts_in_silence(ranks: Ranks, tmp_path: Path) -> None:
    """docs/use/lightning.md has the error and what reads the file instead."""
    file = save(ranks, tmp_path, 1)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor"):
            Whole.load_from_checkpoint(file, strict=strict)
    lockstep.load_weights("weights", module := Whole(), str(file))
    assert torch.equal(module.w, W)
